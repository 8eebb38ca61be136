"""Moves blocks between the slots of a slab and the rows of the primary tier, on lanes.

A row is the memory of one slot of the primary tier; a lane is an I/O thread. A store seals a block
and writes it. A load reads a block, verifies its seal and its stamp (slab, slot and sequence
number), and reports it as done only if its row holds the verified bytes.
"""

from __future__ import annotations

import errno
import logging
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeAlias

from kvtier import seal
from kvtier.tiering.disk.index import namespace_tag
from kvtier.tiering.disk.layout import encode_stamp, has_stamp, write_slot_header
from kvtier.tiering.disk.slab import Slab
from kvtier.tiering.disk.slots import SlabBlock
from kvtier.tiering.io.buffers import Payload, Routes
from kvtier.tiering.io.lane import LARGE_BLOCK_BYTES, Ended, Lane, depth_for, may_have_buffers
from kvtier.tiering.io.metrics import ErrorLog
from kvtier.tiering.io.page import is_intact
from kvtier.tiering.io.queue import Piece, Transfer, Unit, WorkQueue

if TYPE_CHECKING:
    from kvtier.cpu.policies.tenants import Tenancy
    from kvtier.tiering.base import SecondaryTierManager, TransferJob

__all__ = ["SlabMover", "SlabTransfer"]

logger = logging.getLogger(__name__)

_ALONE_BYTES = 256 << 10
"""Slots of this size or more are read and written one by one: combining them gains nothing."""
_UNIT_BYTES = 1 << 20
"""Smaller neighbouring slots are read or written with one call of up to this size, which takes less
processor time."""
_MAX_PIECES = 16
"""Most slots in one read or write."""
_LOADS_IN_FLIGHT, _STORES_IN_FLIGHT = 16 << 20, 24 << 20
"""Bytes that all lanes together keep in flight. That keeps the disk busy while lanes wait for the
interpreter lock. More would make some disks slower, because transfers then use more memory."""
_THREADS_FOR_LARGE, _THREADS_FOR_SMALL = 4, 2
"""Default number of lanes. With large blocks, four keep the disk busy while lanes wait for the
interpreter lock. With small blocks the lanes themselves are busy, and more than two would delay the
scheduler."""

_Outcome: TypeAlias = tuple[Unit[SlabBlock], Sequence[Piece[SlabBlock]], Sequence[Piece[SlabBlock]]]
"""A unit, the pieces of it that were moved, and those that failed."""

_REMEDIES = {
    errno.EIO: "look at the disk (dmesg)",
    errno.ENOSPC: "make room on its file system",
    errno.EDQUOT: "make room, or raise the quota of the engine's user",
    errno.EROFS: "see why its file system is read-only (dmesg), mount it for writing, and restart "
    "the engine",
    errno.EMFILE: "let this process have more files open (ulimit -n)",
    errno.EACCES: "let the engine's user read and write there",
    errno.ENODATA: "something has truncated the file: find out what, and restart the engine",
    errno.ENOENT: "see what removes files there",
    errno.ESTALE: "see whether the server of its file system is up",
    errno.ETIMEDOUT: "see whether the server of its file system is up",
}


def _remedy_for(error: int) -> str:
    return _REMEDIES.get(error, "fix that, or give another path")


@dataclass(slots=True, eq=False, kw_only=True)
class SlabTransfer(Transfer[SlabBlock]):
    """A transfer whose pieces are in ascending order of slots. Pieces in neighbouring slots form
    one unit, which one read or write moves."""

    num_declined: int = 0
    """Stores only: blocks that the eviction policy did not want."""

    def _unit_end(self, first: int, last: int) -> int:
        pieces = self.pieces
        end = first + 1
        expected = pieces[first][1].block_id + 1
        while end < last and pieces[end][1].block_id == expected:
            end += 1
            expected += 1
        return end


class SlabMover:
    """Owns the work queue and its lanes, and seals, verifies and indexes blocks for them."""

    def __init__(
        self,
        tier: SecondaryTierManager,
        slab: Slab,
        rows_address: int,
        io_threads: int | None,
        tenancy: Tenancy | None,
    ) -> None:
        """`tier`: has the rows, seals and verifies blocks, and counts the refused ones.
        `io_threads`: number of lanes; None: the default for the block size. `tenancy`: the tenants
        that are charged for blocks."""
        self._tenancy = tenancy
        self.rows = tier.rows
        self.rows_address = rows_address
        self._tier = tier
        self._slab = slab
        self._uuid = slab.superblock.uuid
        self.where = slab.file.path
        self.errors = ErrorLog(self.where, _remedy_for)
        """Counts failed reads and writes."""
        geometry = slab.geometry
        if io_threads is None:
            is_large = geometry.payload_bytes >= LARGE_BLOCK_BYTES
            io_threads = _THREADS_FOR_LARGE if is_large else _THREADS_FOR_SMALL
        max_pieces = 1
        if geometry.slot_bytes < _ALONE_BYTES:
            max_pieces = min(_UNIT_BYTES // geometry.slot_bytes, _MAX_PIECES)
        unit_bytes = max_pieces * geometry.slot_bytes
        max_loads = depth_for(_LOADS_IN_FLIGHT // io_threads, unit_bytes)
        max_stores = depth_for(_STORES_IN_FLIGHT, unit_bytes)
        self.work: WorkQueue[SlabBlock] = WorkQueue(max_pieces)
        """Transfers that wait or are under way, and those that have ended."""
        self.lanes: list[Lane[SlabBlock]] = []
        routes = Routes.of(self.where)
        # One lane stores. It is fast enough for a disk, and each further one would take turns of
        # the interpreter lock from the engine. If the file system blocks writes, loads go on.
        stores_of_lanes = [0] * (io_threads - 1) + [max_stores]
        sum_of_depths = io_threads * max_loads + sum(stores_of_lanes)
        has_buffers = may_have_buffers(sum_of_depths, unit_bytes)
        try:
            for number, stores in enumerate(stores_of_lanes):
                self.lanes.append(
                    Lane(
                        name=f"kvtier-{tier.tier_type}-{number}",
                        work=self.work,
                        mover=self,
                        routes=routes,
                        depth=max_loads + stores,
                        max_loads=max_loads,
                        max_stores=stores,
                        max_pieces=max_pieces,
                        payload_bytes=geometry.payload_bytes,
                        has_buffers=has_buffers,
                    )
                )
        except BaseException:
            self.stop()
            raise

    def stop(self) -> None:
        """Fail all pieces that no lane has taken, and wait until the lanes have ended."""
        self.work.stop()
        for lane in self.lanes:
            lane.join()

    # --- called by lanes (`Mover`) -------------------------------------------------------------

    def begin(
        self,
        unit: Unit[SlabBlock],
        pages: Sequence[memoryview],
        payloads: Sequence[Payload],
    ) -> tuple[int, int]:
        transfer, pieces = unit
        if not transfer.job.is_promotion:
            for (_, block), page, payload in zip(pieces, pages, payloads, strict=True):
                self._seal(transfer.job, block, page, payload)
        slab = self._slab
        return slab.file.fd, slab.geometry.slot_offset(pieces[0][1].block_id)

    def end(self, ended: Sequence[Ended[SlabBlock]]) -> None:
        self.work.finish([self._outcome(each) for each in ended])

    def note_error(self, error: int, is_write: bool) -> None:
        self.errors.note(error, is_write)

    def _outcome(self, ended: Ended[SlabBlock]) -> _Outcome:
        unit, _, pages, payloads, error = ended
        transfer, pieces = unit
        if error:
            return unit, (), pieces
        try:
            if not transfer.job.is_promotion:
                self._enter_in_index(transfer.job, pieces)
                return unit, pieces, ()
            done: list[Piece[SlabBlock]] = []
            failed: list[Piece[SlabBlock]] = []
            for piece, page, payload in zip(pieces, pages, payloads, strict=True):
                if self._is_valid(transfer.job, piece[1], page, payload.memory):
                    payload.deliver()
                    done.append(piece)
                else:
                    failed.append(piece)
        except Exception:
            logger.exception(
                "%s: a read or write could not be finished, and its blocks fail", self.where
            )
            return unit, (), pieces
        return unit, done, failed

    # --- one block of a store ------------------------------------------------------------------

    def _seal(
        self, job: TransferJob, block: SlabBlock, header: memoryview, payload: Payload
    ) -> None:
        self._slab.index.clear(block.block_id)  # the former block is about to be overwritten
        payload.collect()
        block_seal = self._tier.seal_block(job, block.key, payload.memory)
        describer = self._tier.offloading_spec.describer
        description = None if describer is None else describer.describe(block.key)
        owner = self._owner_of(job)
        write_slot_header(header, block_seal, self._stamp_of(block), description, owner)

    def _enter_in_index(self, job: TransferJob, pieces: Sequence[Piece[SlabBlock]]) -> None:
        tag, owner = namespace_tag(job.fingerprint), self._owner_of(job)
        for _, block in pieces:
            self._slab.index.put(block.block_id, block.generation, tag, block.key, owner)

    def _owner_of(self, job: TransferJob) -> int:
        return 0 if self._tenancy is None else self._tenancy.tag_of(job.req_context)

    # --- one block of a load -------------------------------------------------------------------

    def _is_valid(
        self, job: TransferJob, block: SlabBlock, header: memoryview, payload: memoryview
    ) -> bool:
        if not is_intact(header):
            self._tier.refuse_block(_what_is_wrong(header))
        elif not self._tier.verify_block(job, block.key, header, payload):
            pass  # `verify_block` has counted the failure
        elif not has_stamp(header, self._stamp_of(block)):
            self._tier.refuse_block(seal.SealFailure.STALE)
        else:
            return True
        self._slab.index.clear(block.block_id)
        return False

    def _stamp_of(self, block: SlabBlock) -> bytes:
        return encode_stamp(self._uuid, block.block_id, block.generation)


def _what_is_wrong(header: memoryview) -> seal.SealFailure:
    try:
        seal.read(header[: seal.SEAL_BYTES])
    except seal.SealError as error:
        return error.failure
    return seal.SealFailure.HEADER
