"""What `kvtier store` asks of a store, whatever it is kept in."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from enum import StrEnum
from pathlib import Path
from typing import Any, Protocol

from kvtier.base import OffloadKey

__all__ = ["Clearing", "Damage", "Figures", "Listing", "Order", "Scrub", "Store", "StoredBlock"]


class Order(StrEnum):
    """How blocks are listed."""

    RECENT = "recent"
    """Those that were used last come first."""
    OLDEST = "oldest"
    PLACE = "place"
    """As they lie in the store."""


@dataclass(frozen=True, slots=True)
class StoredBlock:
    """A block that an engine would find."""

    key: OffloadKey
    namespace: str
    """The fingerprint as hex digits; only the start of it where that is all that is known."""
    place: int | str
    num_bytes: int
    stored_ns: int | None
    """When it was stored, in nanoseconds since 1970; None: not known."""
    rank: int
    """1: of all blocks, it was used last."""
    used_ns: int | None = None
    """When it was used last, in nanoseconds since 1970; None: the rank is all that is known."""


@dataclass(frozen=True, slots=True)
class Listing:
    num_blocks: int
    """As many as were asked for, had there been no limit."""
    blocks: Iterator[StoredBlock]
    """Read as they are taken. A block that leaves meanwhile may be left out."""


class Figures(Protocol):
    """What there is to know about a store as a whole."""

    @property
    def num_blocks(self) -> int: ...

    def as_json(self) -> dict[str, Any]:
        """For programs."""

    def lines(self) -> Iterator[str]:
        """For people."""


@dataclass(frozen=True, slots=True)
class Damage:
    """A block that no engine would accept."""

    place: int | str
    key: OffloadKey | None
    """None: it cannot be said which block it was."""
    reason: str


@dataclass(slots=True)
class Scrub:
    """What came of verifying."""

    num_good: int = 0
    num_gone: int = 0
    """They left, or were overwritten, while this ran."""
    num_forbidden: int = 0
    """We may not read them; an engine may."""
    num_bytes: int = 0
    """So many were read."""
    total_bytes: int = 0
    """So many were to be read."""
    is_complete: bool = True
    """False: the user has ended it."""
    is_certain: bool = True
    """False: what looked damaged was not looked at again, and may be sound."""
    seconds: float = 0.0
    damaged: list[Damage] = field(default_factory=list)
    remarks: list[str] = field(default_factory=list)
    """Damage to the store rather than to a block of it."""

    @property
    def is_sound(self) -> bool:
        return self.is_complete and not self.is_damaged and not self.num_forbidden

    @property
    def is_damaged(self) -> bool:
        return bool(self.damaged or self.remarks)

    def reasons(self) -> Counter[str]:
        return Counter(damage.reason for damage in self.damaged)


class Clearing(Protocol):
    """How a store was cleared."""

    @property
    def is_complete(self) -> bool:
        """False: the user has ended it."""

    def as_json(self) -> dict[str, Any]:
        """For programs."""

    def lines(self) -> Iterator[str]:
        """For people."""


class Store(Protocol):
    """A place where a tier keeps blocks. An engine may be at work on it.

    Every call may wait for the disk, and raise `StoreRefused` or `OSError`.
    """

    path: Path
    kind: str
    """What it is, in a word."""
    place_name: str
    """What the place of a block is called."""
    is_place_short: bool
    """Whether it fits into a table."""

    def figures(self) -> Figures: ...

    def blocks(self, namespace: str | None, order: Order, limit: int | None) -> Listing:
        """`namespace`: the start of a fingerprint, as hex digits; None: all blocks."""

    def verify(
        self,
        namespace: str | None,
        max_rate: int | None,
        on_progress: Callable[[int, int], None],
    ) -> Scrub:
        """Read every block and check it. `max_rate`: bytes per second. `on_progress` is told how
        many bytes have been read, and how many there are to read. Ctrl-C ends it early, with what
        was found until then."""

    def count_engines(self) -> int:
        """How many have it open."""

    def count(self, namespace: str | None) -> int:
        """How many blocks `clear` would forget."""

    def clear(
        self,
        namespace: str | None,
        patience_s: float,
        on_progress: Callable[[int, int], None],
    ) -> Clearing:
        """Forget every block, or those of some namespaces. Waits for engines, if there are any, no
        longer than this. `on_progress` is told how many blocks have left, and of how many."""
