"""What the I/O threads of the fs tier do with a block."""

from __future__ import annotations

import errno
import os
import stat
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, TypeAlias

from kvtier import seal
from kvtier.base import OffloadKey
from kvtier.tiering.fs.below import Below
from kvtier.tiering.fs.block_file import check_block, write_header
from kvtier.tiering.fs.books import NAME_BYTES, SeatLost
from kvtier.tiering.fs.clerk import Arrival, Change, Clerk, News
from kvtier.tiering.fs.lease import NoRoom, Room, Shut
from kvtier.tiering.fs.names import block_path
from kvtier.tiering.fs.tree import BlockFile, bytes_taken
from kvtier.tiering.io.errors import ErrorLog
from kvtier.tiering.io.lane import CannotBegin, Ended
from kvtier.tiering.io.page import PAGE_BYTES
from kvtier.tiering.io.payload import Payload
from kvtier.tiering.io.transfer import Piece, Transfer, Unit
from kvtier.tiering.io.work import WorkQueue

if TYPE_CHECKING:
    from kvtier.tiering.base import SecondaryTierManager

__all__ = ["FsMover", "FsTransfer"]

_Piece: TypeAlias = Piece[OffloadKey]
_Unit: TypeAlias = Unit[OffloadKey]
_Outcome: TypeAlias = tuple[_Unit, Sequence[_Piece], Sequence[_Piece]]


@dataclass(slots=True, eq=False)
class FsTransfer(Transfer[OffloadKey]):
    """A job of the fs tier on its way. Cheap to make, on the scheduler's thread: what is to be
    known of each block is found out on the others."""

    namespace: str = ""
    """The directory of the blocks."""
    begun_ns: int = field(default_factory=time.time_ns)
    positions: dict[OffloadKey, int] = field(default_factory=dict)
    """A store: where its blocks are in the prompt."""
    rooms: dict[OffloadKey, Room] = field(default_factory=dict)
    """A store: where its blocks are written first."""
    refused: list[OffloadKey] = field(default_factory=list)
    """A store: blocks for which there was no room."""
    gone: list[OffloadKey] = field(default_factory=list)
    """A load: blocks that have left."""

    def take_unit(self, max_pieces: int) -> Unit[OffloadKey]:
        position = self.num_taken
        unit = Transfer.take_unit(self, max_pieces)
        if not self.job.is_promotion:
            self.positions[unit.pieces[0][1]] = position
        return unit

    def stamp_of(self, key: OffloadKey) -> int:
        """When it counts as used. Of one prompt, the head is the last to leave."""
        return self.begun_ns - self.positions[key]


def _transfer_of(unit: _Unit) -> FsTransfer:
    transfer = unit.transfer
    assert isinstance(transfer, FsTransfer)
    return transfer


class FsMover:
    """Reads and writes block files: a `Mover` for lanes. Units are single blocks."""

    def __init__(
        self,
        tier: SecondaryTierManager,
        where: Path,
        below: Below,
        rows_address: int,
        work: WorkQueue[OffloadKey],
        clerk: Clerk[_Unit],
        errors: ErrorLog,
        *,
        is_direct: bool,
    ) -> None:
        """`tier`: whose rows are moved, and who counts what was refused."""
        self.where = where
        self._below = below
        self.rows = tier.rows
        self.rows_address = rows_address
        self._tier = tier
        self._work = work
        self._clerk = clerk
        self._errors = errors
        self._file_bytes = PAGE_BYTES + tier.rows.row_bytes
        flags = os.O_DIRECT if is_direct else 0
        # O_NONBLOCK: a pipe in the place of a block must not be waited for.
        self._read_flags = os.O_RDONLY | os.O_NONBLOCK | flags
        self._write_flags = os.O_WRONLY | flags

    def note_error(self, error: int, is_write: bool) -> None:
        if error != errno.ENODATA or is_write:  # a file that is too short is a damaged block
            self._errors.note(error, is_write)

    def _note(self, error: OSError, is_write: bool) -> None:
        self._errors.note(error.errno or errno.EIO, is_write, error.filename)

    # --- begin ---------------------------------------------------------------------------------

    def begin(
        self, unit: _Unit, pages: Sequence[memoryview], payloads: Sequence[Payload]
    ) -> tuple[int, int]:
        ((_, key),) = unit.pieces
        transfer = _transfer_of(unit)
        if transfer.job.is_promotion:
            return self._open_to_read(transfer, key), 0
        if self._is_there(transfer, key):
            self._work.finish([(unit, unit.pieces, ())])
            raise CannotBegin  # and need not
        (page,), (payload,) = pages, payloads
        payload.collect()
        write_header(page, self._tier.seal_block(transfer.job, key, payload.memory))
        return self._open_to_write(transfer, key), 0

    def _open_to_read(self, transfer: FsTransfer, key: OffloadKey) -> int:
        try:
            return self._below.open(block_path(transfer.namespace, key), self._read_flags)
        except FileNotFoundError:
            transfer.gone.append(key)
        except OSError as error:
            self._note(error, is_write=False)
        raise CannotBegin

    def _is_there(self, transfer: FsTransfer, key: OffloadKey) -> bool:
        """Whether another engine has stored a block before us. Raises `CannotBegin` where it could
        not be published anyway."""
        path = block_path(transfer.namespace, key)
        try:
            status = self._below.lstat(path)
            if not stat.S_ISREG(status.st_mode):
                raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST), path)
        except FileNotFoundError:
            return False
        except OSError as error:
            self._note(error, is_write=True)
            raise CannotBegin from None
        self._clerk.news.append(News(transfer.namespace, [key], Change.SEEN))
        return True

    def _open_to_write(self, transfer: FsTransfer, key: OffloadKey) -> int:
        try:
            room = transfer.rooms[key] = self._clerk.lease.take()
        except NoRoom:
            transfer.refused.append(key)
            raise CannotBegin from None
        except (Shut, SeatLost):
            raise CannotBegin from None
        fd = -1
        try:
            if not room.is_new:
                return self._below.open(room.path, self._write_flags)
            fd = self._below.open(room.path, self._write_flags | os.O_CREAT | os.O_EXCL)
            # A write that makes a file longer would be waited for.
            os.ftruncate(fd, self._file_bytes)
        except OSError as error:
            self._note(error, is_write=True)
            if fd >= 0:
                os.close(fd)
            self._clerk.return_room(room)
            raise CannotBegin from None
        return fd

    # --- end -----------------------------------------------------------------------------------

    def end(self, ended: Sequence[Ended[OffloadKey]]) -> None:
        outcomes: list[_Outcome] = []
        arrivals: list[Arrival[_Unit]] = []
        for each in ended:
            if each.unit.transfer.job.is_promotion:
                outcomes.append(self._end_load(each))
            else:
                arrival = self._end_store(each)
                if arrival is not None:
                    arrivals.append(arrival)
                else:
                    outcomes.append((each.unit, (), each.unit.pieces))
        if outcomes:
            self._work.finish(outcomes)
        if arrivals:
            self._clerk.publish_soon(arrivals)

    def published(self, results: Sequence[tuple[Arrival[_Unit], bool]]) -> None:
        """On the clerk's thread: whether blocks that were written are there now."""
        self._work.finish(
            [
                (arrival.what, arrival.what.pieces, ())
                if is_there
                else (arrival.what, (), arrival.what.pieces)
                for arrival, is_there in results
            ]
        )

    def _end_store(self, ended: Ended[OffloadKey]) -> Arrival[_Unit] | None:
        ((_, key),) = ended.unit.pieces
        transfer = _transfer_of(ended.unit)
        room = transfer.rooms.pop(key)
        try:
            if not ended.error:
                # The file's time says when its block was used last.
                stamp = transfer.stamp_of(key)
                os.utime(ended.fd, ns=(stamp, stamp))
                # A file that is overwritten takes what it took.
                num_bytes = room.charge - NAME_BYTES
                if room.is_new:
                    num_bytes = bytes_taken(os.fstat(ended.fd))
                final = block_path(transfer.namespace, key)
                return Arrival(ended.unit, key, room, transfer.namespace, final, num_bytes)
        except OSError as error:
            self._note(error, is_write=True)
        finally:
            os.close(ended.fd)
        self._clerk.return_room(room)
        return None

    def _end_load(self, ended: Ended[OffloadKey]) -> _Outcome:
        unit, fd, (page,), (payload,), error = ended
        ((_, key),) = unit.pieces
        transfer = _transfer_of(unit)
        try:
            if error == errno.ENODATA:
                failure = seal.SealFailure.LENGTH
            elif error:
                return unit, (), unit.pieces
            else:
                found = check_block(page, payload.memory, key, transfer.job.fingerprint)
                if found is None:
                    payload.deliver()
                    return unit, unit.pieces, ()
                failure = found
            if not self._is_damaged(fd, block_path(transfer.namespace, key), failure):
                transfer.gone.append(key)
        finally:
            os.close(fd)
        return unit, (), unit.pieces

    def _is_damaged(self, fd: int, path: str, failure: seal.SealFailure) -> bool:
        """False: the file has left meanwhile, and may have been overwritten while it was read."""
        try:
            found = self._below.lstat(path)
            if not os.path.samestat(found, os.fstat(fd)):
                return False
        except OSError:
            return False
        self._tier.refuse_block(failure)
        self._clerk.remove_soon(BlockFile.of(path, found))
        return True
