"""Reads every block of a slab and checks it, while an engine may be at work."""

from __future__ import annotations

import mmap
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass

import numpy as np

from kvtier.base import OffloadKey
from kvtier.cli.store.rate_limit import RateLimit
from kvtier.cli.store.store import Damage, Scrub
from kvtier.tiering.disk.reader import SlabReader, Snapshot, check_slot

__all__ = ["SlabScrubber"]

_NUM_THREADS = 4
_RUN_BYTES = 1 << 20
"""Neighbouring slots are read together up to this size, or to what may be read in a second."""
_PATIENCE_S = 3.0
"""A slot that an engine is writing is written by then, and its index, too."""
_PAUSE_S = 0.1
_UNREADABLE = "unreadable"


@dataclass(frozen=True, slots=True)
class _Verdict:
    slot: int
    key: OffloadKey | None
    """Of the block that should be there, or is; None: it cannot be said which."""
    reason: str | None = None
    """Why it is damaged."""
    is_empty: bool = False


class SlabScrubber:
    """One pass over a slab. What looks damaged is looked at again until it is certain that no
    engine was just writing it."""

    def __init__(
        self,
        reader: SlabReader,
        tags: Sequence[int] | None,
        max_rate: int | None,
        on_progress: Callable[[int, int], None],
    ) -> None:
        """`tags`: of the namespaces to read; None: everything."""
        self._reader = reader
        self._tags = tags
        self._limit = RateLimit(max_rate)
        self._run_bytes = min(_RUN_BYTES, max_rate or _RUN_BYTES)
        self._on_progress = on_progress
        self._scrub = Scrub()
        self._buffers = threading.local()

    def run(self, snapshot: Snapshot) -> Scrub:
        """Raises `SlabUnreadable` or `OSError`."""
        started = time.monotonic()
        scrub = self._scrub
        first_revision = self._reader.superblock.revision
        slots = self._slots_of(snapshot)
        scrub.total_bytes = len(slots) * snapshot.geometry.slot_bytes
        suspects: list[_Verdict] = []
        try:
            self._on_progress(0, scrub.total_bytes)
            for verdict in self._check(snapshot, slots):
                if verdict.reason is not None:
                    suspects.append(verdict)
                elif not verdict.is_empty:
                    scrub.num_good += 1
                self._on_progress(scrub.num_bytes, scrub.total_bytes)
            suspects = self._look_again(suspects, first_revision)
        except KeyboardInterrupt:
            scrub.is_complete = False
        for verdict in suspects:
            assert verdict.reason is not None
            scrub.damaged.append(Damage(verdict.slot, verdict.key, verdict.reason))
        self._remark(snapshot)
        scrub.seconds = time.monotonic() - started
        return scrub

    def _slots_of(self, snapshot: Snapshot) -> list[int]:
        live = snapshot.live_slots()
        if self._tags is not None:
            live = live[np.isin(snapshot.entries["tag"][live], self._tags)]
            return live.tolist()  # type: ignore[no-any-return]
        return sorted(live.tolist() + snapshot.unknown_slots())

    def _remark(self, snapshot: Snapshot) -> None:
        damaged, geometry = len(snapshot.damaged_pages), snapshot.geometry
        if damaged:
            self._scrub.remarks.append(
                f"{damaged} of {geometry.num_index_pages} pages of the index are damaged: an "
                "engine that starts reads the slots instead"
            )
        if self._reader.file.size < geometry.file_bytes:
            self._scrub.remarks.append(
                f"the file has {self._reader.file.size} bytes and should have "
                f"{geometry.file_bytes}: it was cut off"
            )
        intact = self._reader.num_intact_superblocks()
        if intact < 2:
            self._scrub.remarks.append(
                "one of two copies of the superblock is damaged: an engine that starts mends it"
            )

    # --- once more -----------------------------------------------------------------------------

    def _look_again(self, suspects: list[_Verdict], first_revision: int) -> list[_Verdict]:
        """Those that are still damaged when an engine, if there is one, has had time to finish what
        it was writing. The index in the file comes after the slots."""
        began = time.monotonic()
        while suspects:
            is_alone = (
                not self._reader.is_held()
                and self._reader.read_superblock().revision == first_revision
            )
            snapshot = self._reader.snapshot()
            suspects = self._still_damaged(snapshot, [verdict.slot for verdict in suspects])
            if is_alone or time.monotonic() - began > _PATIENCE_S:
                break
            time.sleep(_PAUSE_S)
        return suspects

    def _still_damaged(self, snapshot: Snapshot, slots: list[int]) -> list[_Verdict]:
        unknown = set(snapshot.unknown_slots())
        there = [
            slot
            for slot in slots
            if slot < snapshot.geometry.num_slots
            and (slot in unknown or snapshot.entry(slot) is not None)
        ]
        verdicts = list(self._check(snapshot, there))
        still = [verdict for verdict in verdicts if verdict.reason is not None]
        num_empty = sum(verdict.is_empty for verdict in verdicts)
        self._scrub.num_gone += len(slots) - len(there) + num_empty
        self._scrub.num_good += len(there) - len(still) - num_empty
        return still

    # --- reading -------------------------------------------------------------------------------

    def _check(self, snapshot: Snapshot, slots: Sequence[int]) -> Iterator[_Verdict]:
        """Read and judge these slots, in ascending order."""
        under_way: deque[Future[list[_Verdict]]] = deque()
        slot_bytes = snapshot.geometry.slot_bytes
        with ThreadPoolExecutor(_NUM_THREADS, "kvtier-scrub") as pool:
            try:
                for run in _runs(slots, max(1, self._run_bytes // slot_bytes)):
                    self._limit.wait_for(len(run) * slot_bytes)
                    under_way.append(pool.submit(self._check_run, snapshot, run))
                    if len(under_way) >= 2 * _NUM_THREADS:
                        yield from self._counted(under_way.popleft().result(), slot_bytes)
                while under_way:
                    yield from self._counted(under_way.popleft().result(), slot_bytes)
            finally:
                for future in under_way:
                    future.cancel()

    def _counted(self, verdicts: list[_Verdict], slot_bytes: int) -> list[_Verdict]:
        self._scrub.num_bytes += len(verdicts) * slot_bytes
        return verdicts

    def _check_run(self, snapshot: Snapshot, run: range) -> list[_Verdict]:
        """On a thread of the pool."""
        slot_bytes = snapshot.geometry.slot_bytes
        offset = snapshot.geometry.slot_offset(run[0])
        if offset + slot_bytes > self._reader.file.size:  # before memory is taken for it
            return [_unreadable(snapshot, slot) for slot in run]
        memory = self._buffer(len(run) * slot_bytes)
        try:
            num_read = self._reader.read_into(offset, memory)
        except OSError:
            if len(run) > 1:  # one of them, perhaps
                return [v for slot in run for v in self._check_run(snapshot, range(slot, slot + 1))]
            num_read = 0
        verdicts = []
        for position, slot in enumerate(run):
            start = position * slot_bytes
            if start + slot_bytes > num_read:
                verdicts.append(_unreadable(snapshot, slot))
            else:
                verdicts.append(_judge(snapshot, slot, memory[start : start + slot_bytes]))
        return verdicts

    def _buffer(self, num_bytes: int) -> memoryview:
        """Page-aligned memory of the calling thread."""
        memory: memoryview | None = getattr(self._buffers, "memory", None)
        if memory is None or len(memory) < num_bytes:
            memory = self._buffers.memory = memoryview(mmap.mmap(-1, num_bytes))
        return memory[:num_bytes]


def _judge(snapshot: Snapshot, slot: int, block: memoryview) -> _Verdict:
    entry = snapshot.entry(slot)
    checked = check_slot(block, snapshot.superblock, slot, entry)
    is_empty = checked.key is None and checked.failure is None
    key = checked.key if entry is None or entry.key is None else entry.key
    return _Verdict(slot, key, checked.failure, is_empty)


def _unreadable(snapshot: Snapshot, slot: int) -> _Verdict:
    entry = snapshot.entry(slot)
    return _Verdict(slot, None if entry is None else entry.key, _UNREADABLE)


def _runs(slots: Sequence[int], most: int) -> Iterator[range]:
    """Neighbours together, `most` of them at most."""
    start = 0
    while start < len(slots):
        end = start + 1
        while end < len(slots) and end - start < most and slots[end] == slots[end - 1] + 1:
            end += 1
        yield range(slots[start], slots[start] + end - start)
        start = end
