"""The storage of a simulated tier."""

from __future__ import annotations

from kvtier import seal
from kvtier.base import Locality, Medium, OffloadingEvent, OffloadKey
from tests.tiering.simulation.corruption import Kept, corrupted
from tests.tiering.simulation.faults import Faults
from tests.tiering.simulation.world import World


class Backing:
    """Sealed blocks by namespace and key; the oldest leave first."""

    def __init__(
        self, world: World, capacity: int, faults: Faults, locality: Locality | None
    ) -> None:
        self._world = world
        self._capacity = capacity
        self._faults = faults
        self._locality = locality
        self._kept: dict[tuple[bytes, OffloadKey], Kept] = {}
        self._events: list[OffloadingEvent] = []
        self.has_evicted = False

    def __len__(self) -> int:
        return len(self._kept)

    def has(self, fingerprint: bytes, key: OffloadKey) -> bool:
        """True if a block is kept, intact or not."""
        return self._place(fingerprint, key) in self._kept

    def fetch(self, fingerprint: bytes, key: OffloadKey) -> Kept | None:
        """A block, if it is still there."""
        place = self._place(fingerprint, key)
        if self._world.happens(self._faults.vanishes):
            self._forget(place)
        return self._kept.get(place)

    def keep(self, fingerprint: bytes, key: OffloadKey, kept: Kept) -> None:
        """Store a block, perhaps corrupted."""
        if not self._capacity:
            return
        place = self._place(fingerprint, key)
        if self._world.happens(self._faults.corrupts):
            another = next(iter(self._kept.values()), None)
            kept = corrupted(kept, key, another, self._world.rng)
        if place not in self._kept:
            while len(self._kept) >= self._capacity:
                self.has_evicted = True
                self._forget(next(iter(self._kept)))
            self._announce(key, removed=False)
        self._kept[place] = kept

    def receive(self, key: OffloadKey) -> None:
        """Another engine with the same weights has stored a block here."""
        payload = self._world.expected(key)
        fingerprint = self._world.fingerprint()
        header = seal.make(key, memoryview(payload), fingerprint, "another engine")
        self.keep(fingerprint, key, Kept(header, payload))

    def take_events(self) -> list[OffloadingEvent]:
        """The events since the last call."""
        events, self._events = self._events, []
        return events

    def _place(self, fingerprint: bytes, key: OffloadKey) -> tuple[bytes, OffloadKey]:
        return (b"" if self._faults.forgets_epochs else fingerprint, key)

    def _forget(self, place: tuple[bytes, OffloadKey]) -> None:
        if self._kept.pop(place, None) is not None:
            self._announce(place[1], removed=True)

    def _announce(self, key: OffloadKey, removed: bool) -> None:
        self._events.append(OffloadingEvent([key], Medium.STORAGE, removed, self._locality))
