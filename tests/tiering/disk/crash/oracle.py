"""Knows what every life has done to a slab, and so what the next one must find in it."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

from tests.tiering.disk.crash.nursery import Report
from tests.tiering.disk.crash.orders import Orders
from tests.tiering.sagas import Violation


@dataclass(frozen=True, slots=True)
class _Put:
    number: int
    """Of the key."""
    fingerprint: str
    epoch: int

    @property
    def place(self) -> tuple[str, int]:
        """What it is a generation of: a key in a namespace."""
        return self.fingerprint, self.number


class Oracle:
    """Follows the reports of one life after the other."""

    def __init__(self) -> None:
        self.tally: Counter[str] = Counter()
        self._puts: dict[int, _Put] = {}
        """By generation, everything that was ever given to the tier."""
        self._durable: set[int] = set()
        """Generations that must be there, whatever happens now."""
        self._newest_durable: dict[tuple[str, int], int] = {}
        """By namespace and key, the newest generation that was ever durable."""
        self._acked: set[int] = set()
        """What this life has acknowledged, and neither removed nor overwritten since."""
        self._being_written: set[int] = set()
        self._is_placing = False
        """Something is being evicted, and we have not been told what."""
        self._fingerprint = ""
        self._epoch = 0
        self._epoch_starts: dict[int, int] = {}
        """By epoch, its cut."""
        self._first_live_epoch = 0
        self._begun_epoch = 0
        self._epoch_at_last_write = 0
        self._slab = ""
        """The slab's own name, another one whenever it is made anew."""
        self._clocks: dict[str, int] = {}
        """By slab, a number that is larger than all that were given to its blocks."""
        self._found: set[int] = set()

    # --- what a life reports -------------------------------------------------------------------

    def follow(self, report: Report) -> None:
        """Take note of a report. Raises `Violation`."""
        match report:
            case ["opened", fingerprint, seconds, _, _]:
                self._fingerprint = fingerprint
                self._found = set()
                self._is_placing = False
                # Blocks of another namespace give way, and nobody is told.
                self._durable = {
                    generation
                    for generation in self._durable
                    if self._puts[generation].fingerprint == fingerprint
                }
                if seconds > 10:
                    raise Violation(f"it took {seconds:.1f} s to open the slab")
            case ["clock", slab, first_seq]:
                self._slab = slab
                if first_seq < self._clocks.get(slab, 0):
                    raise Violation(f"sequence numbers begin with {first_seq}, as they did before")
            case ["found", generations]:
                for generation in generations:
                    self._check_found(generation)
                self._found.update(generations)
            case ["inspected"]:
                self._check_complete()
            case ["put", pairs]:
                self._is_placing = True
                for number, generation in pairs:
                    self._puts[generation] = _Put(number, self._fingerprint, self._epoch)
            case ["placed", evicted, next_seq]:
                self._clocks[self._slab] = next_seq
                self._is_placing = False
                self._forget(evicted)
            case ["acked", generations]:
                self._acked.update(generations)
            case ["epoch", cut, fingerprint]:
                self._epoch += 1
                self._epoch_starts[self._epoch] = cut
                self._fingerprint = fingerprint
                self._forget_all()
            case ["epoch has begun"]:
                self._begun_epoch = self._epoch
            case ["cut", cut]:
                passed = [epoch for epoch, start in self._epoch_starts.items() if start <= cut]
                self._first_live_epoch = max([self._first_live_epoch, *passed])
            case ["index begins"]:
                # The cut is made before, unless the round began before the epoch.
                self._first_live_epoch = max(self._first_live_epoch, self._epoch_at_last_write)
                self._epoch_at_last_write = self._begun_epoch
                self._being_written = set(self._acked)
            case ["index ends"]:
                self._note_durable(self._being_written & self._acked)
            case ["at", point]:
                self.tally[f"killed: {point}"] += 1
            case ["shut down"]:
                self.tally["clean ends"] += 1
                # An epoch of an earlier life, killed before its cut was written, has no cut.
                self._first_live_epoch = max(self._first_live_epoch, self._begun_epoch)
                self._note_durable(self._acked)
            case ["wrong", text]:
                raise Violation(text)
            case ["ended", status]:
                self._end(status)

    def _check_found(self, generation: int) -> None:
        put = self._puts.get(generation)
        if put is None or put.fingerprint != self._fingerprint:
            raise Violation(f"generation {generation} was found, and was never stored here: {put}")
        if put.epoch < self._first_live_epoch:
            raise Violation(
                f"{put} was found, and is from before epoch {self._first_live_epoch}, whose cut "
                "was in the file"
            )
        newest = self._newest_durable.get(put.place, 0)
        if generation < newest:
            raise Violation(f"{put} was found as generation {generation}; {newest} was there once")
        self.tally["blocks found"] += 1

    def _check_complete(self) -> None:
        newest: dict[tuple[str, int], int] = {}
        for generation in self._found:
            put = self._puts[generation]
            newest[put.place] = max(newest.get(put.place, 0), generation)
        # A newer one in its place, written and not acknowledged when a life ended, is as good.
        lost = {
            generation
            for generation in self._durable
            if newest.get(self._puts[generation].place, 0) < generation
        }
        if lost:
            named = {generation: self._puts[generation] for generation in sorted(lost)}
            raise Violation(
                f"{len(lost)} of {len(self._durable)} blocks that were in the index are gone: "
                f"{named}"
            )
        self.tally["durable blocks found"] += len(self._durable)
        self.tally["inspections"] += 1
        self._acked = set(self._found)
        self._durable = set()
        self._note_durable(self._found)

    def _note_durable(self, generations: set[int]) -> None:
        self._durable |= generations
        for generation in generations:
            put = self._puts[generation]
            newest = self._newest_durable.get(put.place, 0)
            self._newest_durable[put.place] = max(newest, generation)

    def _forget(self, generations: list[int]) -> None:
        self._durable.difference_update(generations)
        self._acked.difference_update(generations)
        self.tally["evictions"] += len(generations)

    def _forget_all(self) -> None:
        self._durable.clear()
        self._acked.clear()

    def _end(self, status: int) -> None:
        if status not in (0, -9):
            raise Violation(f"a life has ended with status {status}")
        self.tally["kills"] += status == -9
        if self._is_placing:
            self.tally["deaths during an eviction"] += 1
            self._durable.clear()
        self._is_placing = False
        self._acked.clear()
        self._epoch_starts.clear()
        self._begun_epoch = self._epoch_at_last_write = 0  # the next life does not make up for it

    # --- between two lives ---------------------------------------------------------------------

    def expect_nothing(self) -> None:
        """Writes were lost: any block may be gone, and an older copy of it be back in its slot. Key
        and namespace being the same, that copy has the bytes that belong there, too."""
        self._durable.clear()
        self._newest_durable.clear()

    def expect_after(self, former: Orders, next_one: Orders) -> None:
        """Which blocks the next life need not find."""
        is_smaller = next_one.max_bytes < former.max_bytes
        if is_smaller or next_one.row_bytes != former.row_bytes:
            self._durable.clear()
