"""`kvtier store verify` on a slab: reads and checks every block, while an engine may be writing."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence

import numpy as np

from kvtier.tiering.disk.reader import SlabReader, Snapshot, check_slot
from kvtier.tiering.inspection import Progress, Scrub
from kvtier.tiering.scrubber import UNREADABLE, Scrubber, Verdict

__all__ = ["SlabScrubber"]

_RUN_BYTES = 1 << 20
"""Neighbouring slots are read together, up to this size or to the bytes allowed per second,
whichever is smaller."""
_PATIENCE_S = 3.0
"""An engine finishes writing a slot and its index page within this time."""
_PAUSE_S = 0.1


class SlabScrubber(Scrubber):
    """One pass over a slab. Checks damaged slots again until no engine can have been writing
    them."""

    def __init__(
        self,
        reader: SlabReader,
        tags: Sequence[int] | None,
        max_rate: int | None,
        on_progress: Progress,
    ) -> None:
        """`tags`: the namespaces to check, as `namespace_tag` shortens them. None: all. `max_rate`:
        bytes per second; None: no limit."""
        super().__init__(max_rate, on_progress)
        self._reader = reader
        self._tags = tags
        self._run_bytes = min(_RUN_BYTES, max_rate or _RUN_BYTES)

    def run(self, snapshot: Snapshot) -> Scrub:
        """Check the blocks of `snapshot`. Raises `SlabUnreadable` or `OSError`."""
        first_revision = self._reader.superblock.revision
        slots = self._slots_of(snapshot)
        scrub = self._judge_all(
            len(slots) * snapshot.geometry.slot_bytes,
            self._check(snapshot, slots),
            lambda suspects: self._look_again(suspects, first_revision),
        )
        scrub.is_certain = scrub.is_complete
        self._remark(snapshot)
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
                f"{geometry.file_bytes}: it was truncated"
            )
        intact = self._reader.num_intact_superblocks()
        if intact < 2:
            self._scrub.remarks.append(
                "one of two copies of the superblock is damaged: an engine that starts repairs it"
            )

    # --- second look ---------------------------------------------------------------------------

    def _look_again(self, suspects: list[Verdict], first_revision: int) -> list[Verdict]:
        """Check damaged slots again, with a new snapshot of the index, because an engine writes a
        slot before its index entry. Repeats this for `_PATIENCE_S` if an engine has the slab
        open, or has changed the superblock since the pass began. Returns the slots that are still
        damaged."""
        began = time.monotonic()
        while suspects:
            is_alone = (
                not self._reader.is_held()
                and self._reader.read_superblock().revision == first_revision
            )
            snapshot = self._reader.snapshot()
            # In place: if Ctrl-C ends the next round, the caller has the result of this one.
            suspects[:] = self._still_damaged(
                snapshot, [int(verdict.place) for verdict in suspects]
            )
            if is_alone or time.monotonic() - began > _PATIENCE_S:
                break
            time.sleep(_PAUSE_S)
        return suspects

    def _still_damaged(self, snapshot: Snapshot, slots: list[int]) -> list[Verdict]:
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

    def _check(self, snapshot: Snapshot, slots: Sequence[int]) -> Iterator[Verdict]:
        """Read and check these slots, which are in ascending order."""
        slot_bytes = snapshot.geometry.slot_bytes
        return self._read_all(
            _runs(slots, max(1, self._run_bytes // slot_bytes)),
            lambda run: len(run) * slot_bytes,
            lambda run: self._check_run(snapshot, run),
        )

    def _check_run(self, snapshot: Snapshot, run: range) -> list[Verdict]:
        """Read and check neighbouring slots. Runs on one of the scrubber's threads."""
        slot_bytes = snapshot.geometry.slot_bytes
        offset = snapshot.geometry.slot_offset(run[0])
        # If not even the first slot is complete in the file, allocate no memory for the run.
        if offset + slot_bytes > self._reader.file.size:
            return [_unreadable(snapshot, slot) for slot in run]
        memory = self._buffer(len(run) * slot_bytes)
        try:
            num_read = self._reader.read_into(offset, memory)
        except OSError:
            if len(run) > 1:  # find out which slot fails
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


def _judge(snapshot: Snapshot, slot: int, block: memoryview) -> Verdict:
    entry = snapshot.entry(slot)
    checked = check_slot(block, snapshot.superblock, slot, entry)
    is_empty = checked.key is None and checked.failure is None
    key = checked.key if entry is None or entry.key is None else entry.key
    return Verdict(slot, key, checked.failure, is_empty)


def _unreadable(snapshot: Snapshot, slot: int) -> Verdict:
    entry = snapshot.entry(slot)
    return Verdict(slot, None if entry is None else entry.key, UNREADABLE)


def _runs(slots: Sequence[int], most: int) -> Iterator[range]:
    """Consecutive slots as ranges, each of at most `most` slots."""
    start = 0
    while start < len(slots):
        end = start + 1
        while end < len(slots) and end - start < most and slots[end] == slots[end - 1] + 1:
            end += 1
        yield range(slots[start], slots[start] + end - start)
        start = end
