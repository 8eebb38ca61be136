"""The contract behind `kvtier store`: how a tier shows its storage to people, without an engine.

A tier that keeps blocks where they outlive the process offers a `TierInspector`: it lists the
blocks, counts them, verifies, clears and tidies up. `kvtier store` finds the inspector by asking
every registered and installed tier whether it owns the location, and prints what the inspector
answers. The command has no code for any tier, so a tier from another package gets the command for
free.

Everything here runs in the process of the command, on its main thread, and may wait for storage.
Engines may use the same storage at the same time.
"""

from __future__ import annotations

import logging
import re
import signal
import threading
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import UTC, datetime
from enum import StrEnum
from pathlib import Path
from types import FrameType, TracebackType
from typing import TYPE_CHECKING, Any, Self, TypeVar

from kvtier.base import OffloadKey
from kvtier.config import ConfigError
from kvtier.tiering.factory import SecondaryTierFactory

if TYPE_CHECKING:
    from kvtier.tiering.base import SecondaryTierManager

__all__ = [
    "WHAT_TO_GIVE",
    "Damage",
    "GarbageCollection",
    "InspectionRefused",
    "InspectionTimedOut",
    "Listing",
    "Order",
    "Progress",
    "Report",
    "Scrub",
    "StoredBlock",
    "TierInspector",
    "as_age",
    "as_time",
    "deferred_interrupts",
    "init_storage",
    "local_path",
    "matching_namespaces",
    "open_inspector",
]

logger = logging.getLogger(__name__)

T = TypeVar("T")

Progress = Callable[[int, int], None]
"""Called with the amount that is done and the total, in bytes or blocks."""

WHAT_TO_GIVE = (
    "give the path of a slab file, the `path` of a disk tier, or the `root_dir` of an fs tier"
)
_URL = re.compile(r"[A-Za-z][A-Za-z0-9+.-]*://")
_AGES = ((86_400, "d"), (3_600, "h"), (60, "min"), (1, "s"))


class InspectionRefused(Exception):
    """The operation is impossible. The message says why, and the remedy."""


class InspectionTimedOut(Exception):
    """An engine did not respond or release its lock in time. The message says what happens next."""


# --- what an inspector answers -----------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Report:
    """The result of one operation, for programs and for people."""

    document: Mapping[str, Any]
    """Printed as JSON by `--json`."""
    lines: Sequence[str] = ()
    """Printed otherwise. Empty: one line for each key of the document."""
    is_complete: bool = True
    """False if Ctrl-C ended the operation early."""

    def text(self) -> Iterable[str]:
        """The lines for people."""
        return self.lines or [f"{key:<12}{value}" for key, value in self.document.items()]


class Order(StrEnum):
    """The order in which blocks are listed."""

    RECENT = "recent"
    """Most recently used first."""
    OLDEST = "oldest"
    """Least recently used first."""
    PLACE = "place"
    """By position in the storage."""


@dataclass(frozen=True, slots=True)
class StoredBlock:
    """A block that an engine would find."""

    key: OffloadKey
    namespace: str
    """The fingerprint in hexadecimal, or as many leading digits as are known."""
    place: int | str
    """Where the block is: a slot number, a file name."""
    num_bytes: int
    stored_ns: int | None
    """When it was stored, in nanoseconds since 1970. None if unknown."""
    rank: int
    """Position by last use among all blocks; 1 is the most recent."""
    used_ns: int | None = None
    """When it was last used, in nanoseconds since 1970. None if only the rank is known."""


@dataclass(frozen=True, slots=True)
class Listing:
    """Blocks of a storage."""

    num_blocks: int
    """Number of blocks that match, without the limit."""
    blocks: Iterator[StoredBlock]
    """Read lazily. A block that leaves in the meantime may be missing."""


@dataclass(frozen=True, slots=True)
class Damage:
    """A block that no engine would accept."""

    place: int | str
    key: OffloadKey | None
    """None if the block cannot be identified."""
    reason: str


@dataclass(slots=True)
class Scrub:
    """The result of verifying every block."""

    num_good: int = 0
    num_gone: int = 0
    """Blocks that left or were overwritten during the scrub."""
    num_forbidden: int = 0
    """Blocks that this user may not read. An engine of another user may."""
    num_bytes: int = 0
    """Bytes read."""
    total_bytes: int = 0
    """Bytes to read in all."""
    is_complete: bool = True
    """False if Ctrl-C ended the scrub early."""
    is_certain: bool = True
    """False if damaged blocks were not checked a second time; an engine may have been writing
    them."""
    seconds: float = 0.0
    damaged: list[Damage] = field(default_factory=list)
    remarks: list[str] = field(default_factory=list)
    """Damage to the storage itself rather than to one block."""

    @property
    def is_sound(self) -> bool:
        """True if every block was read and is good."""
        return self.is_complete and not self.is_damaged and not self.num_forbidden

    @property
    def is_damaged(self) -> bool:
        return bool(self.damaged or self.remarks)

    def reasons(self) -> Counter[str]:
        """Number of damaged blocks for each reason."""
        return Counter(damage.reason for damage in self.damaged)


class GarbageCollection(ABC):
    """One run of `kvtier store gc`, made by `TierInspector.find_garbage`.

    The command calls `tidy_up`, asks the user `question` unless `--yes` was given, then calls
    `remove` or `keep`, and finally `report`. A dry run calls `report` alone.
    """

    question: str | None = None
    """Asks the user to confirm the removal. None: there is nothing to remove."""
    is_complete: bool = True
    """False once Ctrl-C has ended the run early."""

    @abstractmethod
    def candidate_lines(self) -> Iterable[str]:
        """Shown before the question: what would be removed, what is kept, and why."""

    @abstractmethod
    def tidy_up(self) -> None:
        """Repair what needs no confirmation. Raises `InspectionRefused` or `InspectionTimedOut`."""

    @abstractmethod
    def remove(self, on_progress: Progress) -> None:
        """Remove the candidates. Reports blocks to `on_progress`. Raises `InspectionRefused` or
        `InspectionTimedOut`."""

    @abstractmethod
    def keep(self, *, is_interrupted: bool) -> None:
        """Keep all candidates: the user declined, or pressed Ctrl-C at the question."""

    @abstractmethod
    def report(self) -> Report:
        """What was found and done."""


# --- the contract ------------------------------------------------------------------------------


class TierInspector(ABC):
    """One tier's storage at one location. A context manager; used by one thread.

    A subclass implements `figures` and `blocks`, and of the other operations those that make sense
    for its storage; the rest are refused. Every operation may raise `InspectionRefused` or
    `OSError`. Ctrl-C arrives as `KeyboardInterrupt`; an operation that must finish a step first
    uses `deferred_interrupts`.
    """

    kind: str
    """One word for this kind of storage: `kind` in JSON documents."""
    location: str
    """The location as it is printed."""
    place_name: str = "place"
    """What a block's `place` is called: a column heading and a key in JSON documents."""
    is_place_short: bool = True
    """True if places fit into a table. Otherwise the table shows the last use instead."""

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()

    def close(self) -> None:
        """Release files and connections."""
        return

    @abstractmethod
    def figures(self) -> Report:
        """What the storage is, how full it is, and which engines use it."""

    @abstractmethod
    def blocks(self, namespace: str | None, order: Order, limit: int | None) -> Listing:
        """The blocks that an engine would find. `namespace`: the first hexadecimal digits of a
        fingerprint, or None for all. `limit`: the number of blocks to return, or None for all."""

    def verify(self, namespace: str | None, max_rate: int | None, on_progress: Progress) -> Scrub:
        """Read every block and check its seal. `max_rate`: bytes per second. Reports bytes to
        `on_progress`. Ctrl-C ends it early with a partial result. `kvtier.tiering.scrubber` has
        a base class for this."""
        raise self._unsupported("be verified")

    def count_engines(self) -> int:
        """Number of live engines that use the storage, as far as is known."""
        return 0

    def count(self, namespace: str | None) -> int:
        """Number of blocks that `clear` would remove."""
        raise self._unsupported("be cleared")

    def clear(self, namespace: str | None, patience_s: float, on_progress: Progress) -> Report:
        """Make every block, or those of one namespace, unfindable for current and later engines.
        Waits at most `patience_s` seconds for engines, then raises `InspectionTimedOut`. Reports
        blocks to `on_progress`."""
        raise self._unsupported("be cleared")

    def find_garbage(self, namespaces: Sequence[str], older_than_s: int) -> GarbageCollection:
        """Find what engines left behind and no longer use. Changes nothing. `namespaces`: consider
        only fingerprints that begin with one of these; empty: all. `older_than_s`: consider only
        what was not used for this many seconds."""
        raise self._unsupported("be garbage-collected")

    def _unsupported(self, operation: str) -> InspectionRefused:
        return InspectionRefused(
            f"{self.location} cannot {operation}: its tier, of kind {self.kind}, does not offer it"
        )


def open_inspector(location: str) -> TierInspector:
    """The inspector of the tier that owns `location`. Built-in tiers are asked first, then those
    from entry points. Raises `InspectionRefused` or `OSError`, with the reason of the first tier
    that gave one."""
    return _first_answer(
        location, lambda tier_cls: tier_cls.open_inspector(location), "no tier keeps blocks"
    )


def init_storage(location: str) -> Report:
    """Make storage for a tier at `location`. The first tier that can, does. Raises
    `InspectionRefused`, `InspectionTimedOut` or `OSError`."""
    return _first_answer(
        location, lambda tier_cls: tier_cls.init_storage(location), "no tier can make storage"
    )


def _first_answer(
    location: str, ask: Callable[[type[SecondaryTierManager]], T | None], otherwise: str
) -> T:
    first_refusal: InspectionRefused | OSError | None = None
    for tier_cls in _tier_classes():
        try:
            answer = ask(tier_cls)
        except (InspectionRefused, OSError) as refusal:
            first_refusal = first_refusal or refusal
        else:
            if answer is not None:
                return answer
    raise first_refusal or InspectionRefused(f"{otherwise} at {location}: {WHAT_TO_GIVE}")


def _tier_classes() -> Iterator[type[SecondaryTierManager]]:
    """Yield the classes of all known tiers. Imports each only when it is needed."""
    for name in SecondaryTierFactory.known_types():
        try:
            tier_cls = SecondaryTierFactory.get_secondary_tier_cls({"type": name})
        except ConfigError as broken:
            logger.warning("The tier %r could not be loaded and is not asked. %s", name, broken)
        else:
            yield tier_cls


# --- for authors of inspectors -----------------------------------------------------------------


def local_path(location: str) -> Path | None:
    """`location` as a path of this machine's file systems; None if it is a URL."""
    return None if _URL.match(location) else Path(location)


def matching_namespaces(names: Sequence[str], wanted: str) -> list[str]:
    """The names that begin with `wanted`, in upper or lower case. Raises `InspectionRefused` if
    none does."""
    found = [name for name in names if name.startswith(wanted.lower())]
    if not found:
        raise InspectionRefused(
            f"no block is in a namespace that begins with {wanted}. There are: "
            f"{', '.join(names) or 'none'}"
        )
    return found


@contextmanager
def deferred_interrupts() -> Iterator[Callable[[], bool]]:
    """Record the first Ctrl-C instead of raising `KeyboardInterrupt`. Yields a function that
    returns True once Ctrl-C was pressed; call it between two steps. A second Ctrl-C interrupts at
    once. Changes nothing if the caller handles or ignores SIGINT. Main thread only."""
    is_pressed = threading.Event()

    def record(_number: int, _frame: FrameType | None) -> None:
        is_pressed.set()
        signal.signal(signal.SIGINT, signal.default_int_handler)

    before = signal.getsignal(signal.SIGINT)
    if before is not signal.default_int_handler:  # SIGINT is ignored or handled by the caller
        yield is_pressed.is_set
        return
    signal.signal(signal.SIGINT, record)
    try:
        yield is_pressed.is_set
    finally:
        signal.signal(signal.SIGINT, before)


def as_age(seconds: float) -> str:
    """An age in the largest unit that gives at least 2: "47 h", then "2 d"."""
    for length, unit in _AGES:
        if seconds >= 2 * length:
            return f"{int(seconds // length)} {unit}"
    return f"{max(0, int(seconds))} s"


def as_time(time_ns: int) -> str:
    """Nanoseconds since 1970 as ISO 8601 in UTC, to the millisecond."""
    try:
        moment = datetime.fromtimestamp(time_ns / 1e9, UTC)
    except (OverflowError, ValueError, OSError):  # out of range: a damaged or foreign header
        return f"{time_ns} ns"
    return moment.isoformat(timespec="milliseconds").replace("+00:00", "Z")
