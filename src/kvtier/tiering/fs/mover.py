"""Reads and writes block files, for the lanes (I/O threads) of the fs tier.

A load opens the block's file, and the lane reads it. If the seal is right, the payload is copied
into the row, the memory of a slot, unless the lane has read it there directly. A store seals the
row and writes it to a reserved path; `publisher` then gives the file its final name.
"""

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
from kvtier.tiering.fs.access import NoFollowTree
from kvtier.tiering.fs.layout import (
    BlockFile,
    block_path,
    bytes_taken,
    check_block,
    write_header,
)
from kvtier.tiering.fs.publisher import Change, Publisher, StagedBlock
from kvtier.tiering.fs.quota import NoSpace, Reservation, StoresSuspended
from kvtier.tiering.fs.root import PresenceLost
from kvtier.tiering.fs.transaction import NAME_BYTES
from kvtier.tiering.io.buffers import Payload
from kvtier.tiering.io.lane import CannotBegin, Ended
from kvtier.tiering.io.metrics import ErrorLog
from kvtier.tiering.io.page import PAGE_BYTES
from kvtier.tiering.io.queue import Piece, Transfer, Unit, WorkQueue

if TYPE_CHECKING:
    from kvtier.tiering.base import SecondaryTierManager

__all__ = ["FsMover", "FsTransfer"]

_Piece: TypeAlias = Piece[OffloadKey]
_Unit: TypeAlias = Unit[OffloadKey]
_Outcome: TypeAlias = tuple[_Unit, Sequence[_Piece], Sequence[_Piece]]


@dataclass(slots=True, eq=False)
class FsTransfer(Transfer[OffloadKey]):
    """A job under way. The scheduler's thread creates it, so the constructor is cheap: the lanes
    fill in positions and reservations."""

    namespace: str = ""
    """The directory of the blocks."""
    begun_ns: int = field(default_factory=time.time_ns)
    positions: dict[OffloadKey, int] = field(default_factory=dict)
    """A store: the position of each block in the prompt."""
    reservations: dict[OffloadKey, Reservation] = field(default_factory=dict)
    """A store: the file that each block is being written to."""
    refused: list[OffloadKey] = field(default_factory=list)
    """A store: blocks for which there was no space."""
    gone: list[OffloadKey] = field(default_factory=list)
    """A load: blocks that were evicted before or while they were read."""

    def take_unit(self, max_pieces: int) -> Unit[OffloadKey]:
        position = self.num_taken
        unit = Transfer.take_unit(self, max_pieces)
        if not self.job.is_promotion:
            self.positions[unit.pieces[0][1]] = position
        return unit

    def stamp_of(self, key: OffloadKey) -> int:
        """The time of the block's last use, in nanoseconds since 1970. Later blocks of a prompt
        count as older, so that the head of the prompt is evicted last."""
        return self.begun_ns - self.positions[key]


def _transfer_of(unit: _Unit) -> FsTransfer:
    transfer = unit.transfer
    assert isinstance(transfer, FsTransfer)
    return transfer


class FsMover:
    """The `Mover` of the fs tier's lanes. Each unit of work is one block."""

    def __init__(
        self,
        tier: SecondaryTierManager,
        where: Path,
        tree: NoFollowTree,
        rows_address: int,
        work: WorkQueue[OffloadKey],
        publisher: Publisher[_Unit],
        errors: ErrorLog,
        *,
        is_direct: bool,
    ) -> None:
        """`tier`: owns the rows, seals blocks, and counts blocks with broken seals. `where`: the
        root, for log lines."""
        self.where = where
        self._tree = tree
        self.rows = tier.rows
        self.rows_address = rows_address
        self._tier = tier
        self._work = work
        self._publisher = publisher
        self._errors = errors
        self._file_bytes = PAGE_BYTES + tier.rows.row_bytes
        flags = os.O_DIRECT if is_direct else 0
        # O_NONBLOCK: opening a pipe in place of a block must not wait for a writer.
        self._read_flags = os.O_RDONLY | os.O_NONBLOCK | flags
        self._write_flags = os.O_WRONLY | flags

    def note_error(self, error: int, is_write: bool) -> None:
        if error != errno.ENODATA or is_write:  # a short file is a damaged block, see `_end_load`
            self._errors.note(error, is_write)

    def _note(self, error: OSError, is_write: bool) -> None:
        self._errors.note(error.errno or errno.EIO, is_write, error.filename)

    # --- called by the lanes -------------------------------------------------------------------

    def begin(
        self, unit: _Unit, pages: Sequence[memoryview], payloads: Sequence[Payload]
    ) -> tuple[int, int]:
        ((_, key),) = unit.pieces
        transfer = _transfer_of(unit)
        if transfer.job.is_promotion:
            return self._open_to_read(transfer, key), 0
        if self._is_there(transfer, key):
            self._work.finish([(unit, unit.pieces, ())])
            raise CannotBegin  # nothing to write
        (page,), (payload,) = pages, payloads
        payload.collect()
        write_header(page, self._tier.seal_block(transfer.job, key, payload.memory))
        return self._open_to_write(transfer, key), 0

    def end(self, ended: Sequence[Ended[OffloadKey]]) -> None:
        outcomes: list[_Outcome] = []
        staged: list[StagedBlock[_Unit]] = []
        for each in ended:
            if each.unit.transfer.job.is_promotion:
                outcomes.append(self._end_load(each))
            else:
                block = self._end_store(each)
                if block is not None:
                    staged.append(block)
                else:
                    outcomes.append((each.unit, (), each.unit.pieces))
        if outcomes:
            self._work.finish(outcomes)
        if staged:
            self._publisher.publish_soon(staged)

    # --- load ----------------------------------------------------------------------------------

    def _open_to_read(self, transfer: FsTransfer, key: OffloadKey) -> int:
        try:
            return self._tree.open(block_path(transfer.namespace, key), self._read_flags)
        except FileNotFoundError:
            transfer.gone.append(key)
        except OSError as error:
            self._note(error, is_write=False)
        raise CannotBegin

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
                fingerprint = transfer.job.fingerprint
                keys = self._tier.seal_keys
                found = check_block(page, payload.memory, key, fingerprint, keys)
                if found is None:
                    payload.deliver()
                    return unit, unit.pieces, ()
                failure = found
            if not self._handle_damage(fd, block_path(transfer.namespace, key), failure):
                transfer.gone.append(key)
        finally:
            os.close(fd)
        return unit, (), unit.pieces

    def _handle_damage(self, fd: int, path: str, failure: seal.SealFailure) -> bool:
        """Count a damaged block, and have it removed, unless a newer release has written it. False
        if the block was evicted meanwhile: then a new block may have overwritten its file during
        the read."""
        try:
            found = self._tree.lstat(path)
            if not os.path.samestat(found, os.fstat(fd)):
                return False
        except OSError:
            return False
        self._tier.refuse_block(failure)
        if failure is not seal.SealFailure.FORMAT:
            self._publisher.damaged.add(BlockFile.of(path, found))
        return True

    # --- store ---------------------------------------------------------------------------------

    def _is_there(self, transfer: FsTransfer, key: OffloadKey) -> bool:
        """True if the block is in the root already and this engine has not found it damaged. Raises
        `CannotBegin` if something else has its path, or the path cannot be read: publishing would
        fail."""
        path = block_path(transfer.namespace, key)
        if path in self._publisher.damaged:
            return False
        try:
            status = self._tree.lstat(path)
            if not stat.S_ISREG(status.st_mode):
                raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST), path)
        except FileNotFoundError:
            return False
        except OSError as error:
            self._note(error, is_write=True)
            raise CannotBegin from None
        self._publisher.changes.add([(transfer.namespace, key)], Change.SEEN)
        return True

    def _open_to_write(self, transfer: FsTransfer, key: OffloadKey) -> int:
        try:
            reservation = transfer.reservations[key] = self._publisher.pool.take()
        except NoSpace:
            transfer.refused.append(key)
            raise CannotBegin from None
        except (StoresSuspended, PresenceLost):
            raise CannotBegin from None
        fd = -1
        try:
            if not reservation.is_new:
                return self._tree.open(reservation.path, self._write_flags)
            fd = self._tree.open(reservation.path, self._write_flags | os.O_CREAT | os.O_EXCL)
            # An asynchronous write that extends the file would block in the kernel.
            os.ftruncate(fd, self._file_bytes)
        except OSError as error:
            self._note(error, is_write=True)
            if fd >= 0:
                os.close(fd)
            self._publisher.return_reservation(reservation)
            raise CannotBegin from None
        return fd

    def _end_store(self, ended: Ended[OffloadKey]) -> StagedBlock[_Unit] | None:
        ((_, key),) = ended.unit.pieces
        transfer = _transfer_of(ended.unit)
        reservation = transfer.reservations.pop(key)
        try:
            if not ended.error:
                # The mtime is the time of the last use.
                stamp = transfer.stamp_of(key)
                os.utime(ended.fd, ns=(stamp, stamp))
                # Overwriting a file does not change its size on the disk.
                num_bytes = reservation.charge - NAME_BYTES
                if reservation.is_new:
                    num_bytes = bytes_taken(os.fstat(ended.fd))
                final = block_path(transfer.namespace, key)
                return StagedBlock(
                    ended.unit, key, reservation, transfer.namespace, final, num_bytes
                )
        except OSError as error:
            self._note(error, is_write=True)
        finally:
            os.close(ended.fd)
        self._publisher.return_reservation(reservation)
        return None

    def published(self, results: Sequence[tuple[StagedBlock[_Unit], bool]]) -> None:
        """Called on the publisher's thread, with True for each staged block that is in the root
        now, and False for each that failed."""
        self._work.finish(
            [
                (block.what, block.what.pieces, ())
                if is_there
                else (block.what, (), block.what.pieces)
                for block, is_there in results
            ]
        )
