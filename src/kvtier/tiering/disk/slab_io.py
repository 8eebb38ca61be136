"""Moves blocks between the slots of a slab and the rows of the primary tier, sealed and checked."""

from __future__ import annotations

import errno
import logging
import os
import threading
from collections import Counter
from collections.abc import Sequence
from typing import TYPE_CHECKING

from kvtier import seal
from kvtier.tiering.disk.index import namespace_tag
from kvtier.tiering.disk.lane import Lane
from kvtier.tiering.disk.layout import encode_stamp, has_stamp, is_intact, write_slot_header
from kvtier.tiering.disk.slab import Slab
from kvtier.tiering.disk.transfer import Piece, SlabBlock, Transfer
from kvtier.tiering.disk.work import WorkQueue

if TYPE_CHECKING:
    from kvtier.tiering.base import SecondaryTierManager

__all__ = ["SlabIO"]

logger = logging.getLogger(__name__)

_LARGE_BYTES = 256 << 10
"""Blocks of this size are read and written one by one: putting them together gains nothing."""
_UNIT_BYTES = 1 << 20
"""Smaller ones that are neighbours go together up to this size: it costs less of us."""
_MAX_PIECES = 16
_IN_FLIGHT_BYTES = 32 << 20
"""How much one thread keeps under way. A load waits behind half of that in stores at most."""
_LEAST_DEPTH, _MOST_DEPTH = 4, 32


class SlabIO:
    """The lanes, threads with a kernel queue each, and what they do with a block.

    A store seals a block where it lies and writes it; a load reads it into its row and checks
    seal and stamp there. Nothing is copied.
    """

    def __init__(
        self, tier: SecondaryTierManager, slab: Slab, rows_address: int, io_threads: int
    ) -> None:
        """`tier`: whose rows are moved, and who counts what was refused."""
        self.rows = tier.rows
        self.rows_address = rows_address
        self._tier = tier
        self._slab = slab
        self._uuid = slab.superblock.uuid
        self._errors_lock = threading.Lock()
        self._errors: Counter[str] = Counter()
        self._told: set[int] = set()
        geometry = slab.geometry
        max_pieces = 1
        if geometry.slot_bytes < _LARGE_BYTES:
            max_pieces = min(_UNIT_BYTES // geometry.slot_bytes, _MAX_PIECES)
        unit_bytes = max_pieces * geometry.slot_bytes
        depth = min(max(_IN_FLIGHT_BYTES // unit_bytes, _LEAST_DEPTH), _MOST_DEPTH)
        self.work = WorkQueue(max_pieces)
        """What is to be moved, and what has been."""
        self.lanes: list[Lane] = []
        try:
            for number in range(io_threads):
                self.lanes.append(
                    Lane(
                        f"kvtier-{tier.tier_type}-{number}",
                        slab.file,
                        geometry,
                        self.work,
                        self,
                        depth=depth,
                        # The first of several is for loads alone: file systems can make writes
                        # wait, and the thread with them.
                        max_stores=depth // 2 if number or io_threads == 1 else 0,
                        max_pieces=max_pieces,
                    )
                )
        except BaseException:
            self.stop()
            raise

    def stop(self) -> None:
        """Give up what has not been begun, and wait for the rest."""
        self.work.stop()
        for lane in self.lanes:
            lane.join()

    def take_errors(self) -> Counter[str]:
        """How many reads and writes have failed since the last call, by the name of the error."""
        with self._errors_lock:
            taken, self._errors = self._errors, Counter()
        return taken

    def note_error(self, error: int, is_write: bool) -> None:
        """Any thread."""
        kind = errno.errorcode.get(error, str(error))
        with self._errors_lock:
            self._errors[kind] += 1
            is_first = error not in self._told
            self._told.add(error)
        if is_first:
            logger.warning(
                "%s: a %s has failed: %s (%s). The engine computes such blocks itself; the tier "
                "is tried again. This is said once for each kind of error",
                self._slab.file.path,
                "write" if is_write else "read",
                os.strerror(error),
                kind,
            )

    # --- a block: on the lanes' threads --------------------------------------------------------

    def seal_piece(
        self, transfer: Transfer, block: SlabBlock, header: memoryview, payload: memoryview
    ) -> None:
        self._slab.index.clear(block.block_id)  # who was there is about to be overwritten
        block_seal = self._tier.seal_block(transfer.job, block.key, payload)
        write_slot_header(header, block_seal, self._stamp_of(block))

    def stored(self, transfer: Transfer, pieces: Sequence[Piece]) -> None:
        tag = namespace_tag(transfer.job.fingerprint)
        for _, block in pieces:
            self._slab.index.put(block.block_id, block.generation, tag, block.key)

    def is_valid(
        self, transfer: Transfer, block: SlabBlock, header: memoryview, payload: memoryview
    ) -> bool:
        if not is_intact(header):
            self._tier.refuse_block(_what_is_wrong(header))
        elif not self._tier.verify_block(transfer.job, block.key, header, payload):
            pass  # and it is counted
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
