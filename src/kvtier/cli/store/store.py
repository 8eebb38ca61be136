"""What `kvtier store` asks of a store, whatever it is kept in."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from enum import StrEnum
from pathlib import Path
from types import TracebackType
from typing import Any, Protocol, Self

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
    num_bytes: int = 0
    """So many were read."""
    total_bytes: int = 0
    """So many were to be read."""
    is_complete: bool = True
    """False: the user has ended it. What looked damaged until then was not looked at again."""
    seconds: float = 0.0
    damaged: list[Damage] = field(default_factory=list)
    remarks: list[str] = field(default_factory=list)
    """Damage to the store rather than to a block of it."""

    @property
    def is_sound(self) -> bool:
        return self.is_complete and not self.damaged and not self.remarks

    def reasons(self) -> Counter[str]:
        return Counter(damage.reason for damage in self.damaged)


@dataclass(frozen=True, slots=True)
class Clearing:
    """How a store was cleared."""

    num_blocks: int
    by_engine: bool
    """Whether the engine that has the store open did it."""
    seconds: float


class Store(Protocol):
    """A place where a tier keeps blocks. An engine may be at work on it. A context manager.

    Every call may wait for the disk, and raise `StoreRefused` or `OSError`.
    """

    path: Path
    kind: str
    """What it is, in a word."""
    place_name: str
    """What the place of a block is called."""

    def __enter__(self) -> Self: ...

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None: ...

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

    def clear(self, patience_s: float) -> Clearing:
        """Forget every block. Waits for the engine, if there is one, no longer than this."""
