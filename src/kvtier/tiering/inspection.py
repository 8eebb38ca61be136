"""The contract behind `kvtier store`: how a tier shows its storage to people, without an engine.

A tier whose blocks outlive the process offers a `TierInspector`, which lists, counts, verifies and
clears the blocks, and removes garbage. `kvtier store` asks the registered and installed tiers in
turn until one owns the location, and prints what its inspector returns. The command has no code for
any single tier, so it works with tiers from other packages, too.

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
    from kvtier.config import NamespaceDescription
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
    "UnknownNamespace",
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
"""Called with the amount done and the total amount, both in bytes or both in blocks."""

WHAT_TO_GIVE = (
    "give the path of a slab file, the `path` of a disk tier, the `root_dir` of an fs tier, or the "
    "`url` of a valkey or obj tier, or mooncake:// and the `master` of a mooncake tier"
)
_URL = re.compile(r"[A-Za-z][A-Za-z0-9+.-]*://")
_AGES = ((86_400, "d"), (3_600, "h"), (60, "min"), (1, "s"))


class InspectionRefused(Exception):
    """The operation is impossible. The message names the reason and the remedy."""


class UnknownNamespace(InspectionRefused):
    """No block is in the namespace that was asked for."""


class InspectionTimedOut(Exception):
    """An engine did not respond or release its lock in time. The message says what happens next."""


# --- what an inspector returns -----------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Report:
    """The result of one operation, for programs and for people."""

    document: Mapping[str, Any]
    """What the command prints as JSON with `--json`."""
    lines: Sequence[str] = ()
    """What the command prints without `--json`. Empty: one line for each key of `document`."""
    is_complete: bool = True
    """False if Ctrl-C ended the operation early."""

    def text(self) -> Iterable[str]:
        """The lines to print without `--json`."""
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
    """The fingerprint in hexadecimal, or its first digits if the rest is unknown."""
    place: int | str
    """Where the block is: a slot number, or a file's path below the location."""
    num_bytes: int
    stored_ns: int | None
    """When it was stored, in nanoseconds since 1970. None if unknown."""
    rank: int
    """Position among all blocks of the storage by last use; 1 is the most recently used."""
    used_ns: int | None = None
    """When it was last used, in nanoseconds since 1970. None if only the rank is known."""


@dataclass(frozen=True, slots=True)
class Listing:
    """The blocks that `TierInspector.blocks` has found."""

    num_blocks: int
    """Number of matching blocks, including those beyond the limit."""
    blocks: Iterator[StoredBlock]
    """Read lazily. Blocks that are evicted or removed meanwhile may be missing."""


@dataclass(frozen=True, slots=True)
class Damage:
    """A block that no engine would accept."""

    place: int | str
    """As in `StoredBlock`."""
    key: OffloadKey | None
    """None if the block cannot be identified."""
    reason: str


@dataclass(slots=True)
class Scrub:
    """The result of verifying every block."""

    num_good: int = 0
    num_gone: int = 0
    """Blocks that were removed or overwritten during the scrub."""
    num_forbidden: int = 0
    """Blocks that this user may not read. An engine that runs as another user may."""
    num_bytes: int = 0
    """Bytes read."""
    total_bytes: int = 0
    """Total of bytes to read."""
    is_complete: bool = True
    """False if Ctrl-C ended the scrub early."""
    is_certain: bool = True
    """False if damaged blocks were not checked a second time. An engine may then have been writing
    some of them when they were read, so those may be good."""
    seconds: float = 0.0
    damaged: list[Damage] = field(default_factory=list)
    remarks: list[str] = field(default_factory=list)
    """Sentences that describe damage to the storage itself rather than to one block."""

    @property
    def is_sound(self) -> bool:
        """True if every block was read and is good."""
        return self.is_complete and not self.is_damaged and not self.num_forbidden

    @property
    def is_damaged(self) -> bool:
        """True if a block or the storage itself is damaged."""
        return bool(self.damaged or self.remarks)

    def reasons(self) -> Counter[str]:
        """Number of damaged blocks for each reason."""
        return Counter(damage.reason for damage in self.damaged)


class GarbageCollection(ABC):
    """One run of `kvtier store gc`, made by `TierInspector.find_garbage`.

    The command calls `tidy_up`. If there is a `question`, it prints `candidate_lines`, asks the
    user, and calls `remove` or `keep`; with `--yes` it calls `remove` without asking. Finally it
    calls `report`. A dry run calls only `report`.
    """

    question: str | None = None
    """Asks the user to confirm the removal. None: there is nothing to remove."""
    is_complete: bool = True
    """False if Ctrl-C has ended the run early."""

    @abstractmethod
    def candidate_lines(self) -> Iterable[str]:
        """The lines to print before the question: what would be removed, what is kept, and why."""

    @abstractmethod
    def tidy_up(self) -> None:
        """Repair what needs no confirmation. Raises `InspectionRefused` or `InspectionTimedOut`."""

    @abstractmethod
    def remove(self, on_progress: Progress) -> None:
        """Remove the candidates. Calls `on_progress` with numbers of blocks. Raises
        `InspectionRefused` or `InspectionTimedOut`."""

    @abstractmethod
    def keep(self, *, is_interrupted: bool) -> None:
        """Keep all candidates, because the user declined. `is_interrupted`: the user pressed Ctrl-C
        instead."""

    @abstractmethod
    def report(self) -> Report:
        """What was found and done."""


# --- the contract ------------------------------------------------------------------------------


class TierInspector(ABC):
    """One tier's storage at one location. A context manager; used by one thread.

    A subclass implements `figures`, `blocks`, and those other operations that make sense for its
    storage. By default, `verify`, `count`, `clear` and `find_garbage` raise `InspectionRefused`.
    Every operation may raise `InspectionRefused` or `OSError`. Ctrl-C raises `KeyboardInterrupt`;
    an operation that must finish a step first uses `deferred_interrupts`.
    """

    kind: str
    """One word for this kind of storage, such as "slab": `kind` in JSON documents."""
    location: str
    """The location, as the command prints it."""
    place_name: str = "place"
    """Name of a block's `place`, such as "slot": a column heading, and a key in JSON documents."""
    is_place_short: bool = True
    """True if `ls` shows the place in its table. Otherwise it shows the last use instead."""

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
        fingerprint; None: all namespaces. `limit`: the most blocks to return; None: all."""

    def descriptions(self) -> Mapping[str, NamespaceDescription]:
        """What the namespaces are made of that have blocks, by their names as in
        `StoredBlock.namespace`. Leaves out namespaces without a description, or with a damaged one.
        Called after `figures` or `blocks`. The default knows none."""
        return {}

    def keys(self, namespace: str | None) -> Iterator[tuple[str, OffloadKey]]:
        """The namespace and the key of each of the blocks, in any order; nothing if there are none.
        `namespace`: as in `blocks`. Called again and again by `kvtier store serve`; override it if
        the names of blocks can be listed without reading the blocks."""
        try:
            listing = self.blocks(namespace, Order.PLACE, None)
        except UnknownNamespace:
            return
        for block in listing.blocks:
            yield block.namespace, block.key

    def verify(self, namespace: str | None, max_rate: int | None, on_progress: Progress) -> Scrub:
        """Read every block and check its seal. `max_rate`: bytes per second; None: no limit.
        Calls `on_progress` with numbers of bytes. Ctrl-C ends it early with a partial result.
        `kvtier.tiering.scrubber` has a base class for this."""
        raise self._unsupported("be verified")

    def count_engines(self) -> int:
        """Number of live engines that use the storage, as far as is known."""
        return 0

    def count(self, namespace: str | None) -> int:
        """Number of blocks that `clear` would remove."""
        raise self._unsupported("be cleared")

    def clear(self, namespace: str | None, patience_s: float, on_progress: Progress) -> Report:
        """Clear all blocks, or those of one namespace: no running or later engine finds them any
        more. Waits up to `patience_s` seconds for engines, then raises `InspectionTimedOut`.
        Calls `on_progress` with numbers of blocks."""
        raise self._unsupported("be cleared")

    def find_garbage(self, namespaces: Sequence[str], older_than_s: int) -> GarbageCollection:
        """Find what no live engine uses. Changes nothing. `namespaces`: consider only fingerprints
        that begin with one of these; empty: all. `older_than_s`: consider only namespaces that were
        not used for this many seconds."""
        raise self._unsupported("be garbage-collected")

    def _unsupported(self, operation: str) -> InspectionRefused:
        return InspectionRefused(
            f"{self.location} cannot {operation}: its tier, of kind {self.kind}, does not offer it"
        )


def open_inspector(location: str) -> TierInspector:
    """The inspector of the first tier that owns `location`. Built-in tiers are asked first, then
    those from entry points. If none owns it, raises the first `InspectionRefused` or `OSError` that
    a tier has raised, or else an `InspectionRefused`."""
    return _first_answer(
        location, lambda tier_cls: tier_cls.open_inspector(location), "no tier keeps blocks"
    )


def init_storage(location: str) -> Report:
    """Make storage at `location` with the first tier that can do so. Raises `InspectionRefused`,
    `InspectionTimedOut` or `OSError`."""
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
    """Yield the classes of all known tiers. Imports each one when it is reached."""
    for name in SecondaryTierFactory.known_types():
        try:
            tier_cls = SecondaryTierFactory.get_secondary_tier_cls({"type": name})
        except ConfigError as broken:
            logger.warning("The tier %r could not be loaded and is not asked. %s", name, broken)
        else:
            yield tier_cls


# --- for authors of inspectors -----------------------------------------------------------------


def local_path(location: str) -> Path | None:
    """`location` as a path on this machine; None if it is a URL."""
    return None if _URL.match(location) else Path(location)


def matching_namespaces(names: Sequence[str], wanted: str) -> list[str]:
    """The names that begin with `wanted`, which may be in upper case. Raises `InspectionRefused` if
    there is none."""
    found = [name for name in names if name.startswith(wanted.lower())]
    if not found:
        raise UnknownNamespace(
            f"no block is in a namespace that begins with {wanted}. There are: "
            f"{', '.join(names) or 'none'}"
        )
    return found


@contextmanager
def deferred_interrupts() -> Iterator[Callable[[], bool]]:
    """A context that records the first Ctrl-C instead of raising `KeyboardInterrupt`. Yields a
    function that returns True once Ctrl-C was pressed; call it between two steps. A second Ctrl-C
    raises at once. If SIGINT is ignored or has another handler, that stays. Main thread only."""
    is_pressed = threading.Event()

    def record(_number: int, _frame: FrameType | None) -> None:
        is_pressed.set()
        signal.signal(signal.SIGINT, signal.default_int_handler)

    before = signal.getsignal(signal.SIGINT)
    if before is not signal.default_int_handler:  # SIGINT is ignored, or has another handler
        yield is_pressed.is_set
        return
    signal.signal(signal.SIGINT, record)
    try:
        yield is_pressed.is_set
    finally:
        signal.signal(signal.SIGINT, before)


def as_age(seconds: float) -> str:
    """An age in the largest unit of which there are at least two: "47 h", but "2 d" for 48 h."""
    for length, unit in _AGES:
        if seconds >= 2 * length:
            return f"{int(seconds // length)} {unit}"
    return f"{max(0, int(seconds))} s"


def as_time(time_ns: int) -> str:
    """Nanoseconds since 1970 as a time in ISO 8601, in UTC, with milliseconds."""
    try:
        moment = datetime.fromtimestamp(time_ns / 1e9, UTC)
    except (OverflowError, ValueError, OSError):  # out of range: a damaged or foreign header
        return f"{time_ns} ns"
    return moment.isoformat(timespec="milliseconds").replace("+00:00", "Z")
