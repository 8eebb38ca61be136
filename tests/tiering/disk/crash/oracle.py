"""The oracle of the disk tier: from what every life did to a slab, what the next one must find."""

from __future__ import annotations

from dataclasses import dataclass

from tests.tiering.crash.oracle import ReportFollower, Violation
from tests.tiering.disk.crash.orders import Orders


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


class Oracle(ReportFollower):
    """Follows the reports of one life after the other."""

    def __init__(self) -> None:
        super().__init__()
        self._puts: dict[int, _Put] = {}
        """Everything that was ever given to the tier, by generation."""
        self._durable: set[int] = set()
        """Generations that must survive a kill at any moment."""
        self._newest_durable: dict[tuple[str, int], int] = {}
        """The newest generation that was ever durable, by namespace and key."""
        self._acked: set[int] = set()
        """Generations that this life has stored and not evicted since."""
        self._being_written: set[int] = set()
        self._is_placing = False
        """True while the tier may be evicting blocks that it has not reported yet."""
        self._fingerprint = ""
        self._epoch = 0
        self._epoch_starts: dict[int, int] = {}
        """The cut of each epoch."""
        self._first_live_epoch = 0
        self._begun_epoch = 0
        self._epoch_at_last_write = 0
        self._slab = ""
        """The slab's uuid, which changes when it is formatted."""
        self._clocks: dict[str, int] = {}
        """By slab, a number larger than all sequence numbers of its blocks."""
        self._found: set[int] = set()

    # --- what a life reports -------------------------------------------------------------------

    def on_opened(
        self, number: int, fingerprint: str, seconds: float, size: int, allocated: int
    ) -> None:
        self._fingerprint = fingerprint
        self._found = set()
        self._is_placing = False
        # Blocks of another namespace may be overwritten without a report.
        self._durable = {
            generation
            for generation in self._durable
            if self._puts[generation].fingerprint == fingerprint
        }
        if seconds > 10:
            raise Violation(f"it took {seconds:.1f} s to open the slab")

    def on_clock(self, number: int, slab: str, first_seq: int) -> None:
        self._slab = slab
        if first_seq < self._clocks.get(slab, 0):
            raise Violation(f"sequence numbers begin with {first_seq}, as they did before")

    def on_found(self, number: int, generations: list[int]) -> None:
        for generation in generations:
            self._check_found(generation)
        self._found.update(generations)

    def on_inspected(self, number: int) -> None:
        self._check_complete()

    def on_put(self, number: int, pairs: list[tuple[int, int]]) -> None:
        self._is_placing = True
        for key, generation in pairs:
            self._puts[generation] = _Put(key, self._fingerprint, self._epoch)

    def on_placed(self, number: int, evicted: list[int], next_seq: int) -> None:
        self._clocks[self._slab] = next_seq
        self._is_placing = False
        self._forget(evicted)

    def on_acked(self, number: int, generations: list[int]) -> None:
        self._acked.update(generations)

    def on_epoch(self, number: int, cut: int, fingerprint: str) -> None:
        self._epoch += 1
        self._epoch_starts[self._epoch] = cut
        self._fingerprint = fingerprint
        self._durable.clear()
        self._acked.clear()

    def on_epoch_has_begun(self, number: int) -> None:
        self._begun_epoch = self._epoch

    def on_cut(self, number: int, cut: int) -> None:
        passed = [epoch for epoch, start in self._epoch_starts.items() if start <= cut]
        self._first_live_epoch = max([self._first_live_epoch, *passed])

    def on_index_begins(self, number: int) -> None:
        # The flusher writes the cut before the index, unless its round began before the epoch.
        self._first_live_epoch = max(self._first_live_epoch, self._epoch_at_last_write)
        self._epoch_at_last_write = self._begun_epoch
        self._being_written = set(self._acked)

    def on_index_ends(self, number: int) -> None:
        self._note_durable(self._being_written & self._acked)

    def on_shut_down(self, number: int) -> None:
        super().on_shut_down(number)
        # If an earlier life was killed before it wrote the cut of an epoch, there is no such cut.
        self._first_live_epoch = max(self._first_live_epoch, self._begun_epoch)
        self._note_durable(self._acked)

    def on_ended(self, number: int, status: int) -> None:
        super().on_ended(number, status)
        if self._is_placing:
            self.tally["deaths during an eviction"] += 1
            self._durable.clear()
        self._is_placing = False
        self._acked.clear()
        self._epoch_starts.clear()
        self._begun_epoch = self._epoch_at_last_write = 0  # the next life does not write that cut

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
        # A newer generation, written but not acknowledged when a life ended, is as good.
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

    # --- between two lives ---------------------------------------------------------------------

    def expect_nothing(self) -> None:
        """Writes were lost: any block may be gone, or an older generation of it may be back, which
        is just as valid for the same key and namespace."""
        self._durable.clear()
        self._newest_durable.clear()

    def expect_after(self, former: Orders, next_one: Orders) -> None:
        """Forget blocks that the next life need not find, because the slab changes its size."""
        is_smaller = next_one.max_bytes < former.max_bytes
        if is_smaller or next_one.row_bytes != former.row_bytes:
            self._durable.clear()
