"""Why a tier that is not empty has nothing for this engine: its blocks are in other namespaces.

A tier whose storage outlives the process keeps a description beside the blocks of each namespace
(`SecondaryTierManager.describe_namespace`). When it starts and finds no block of its own, it calls
`explain_cold_start` with the closest of the others, and the engine's log names what differs.
"""

from __future__ import annotations

import logging
import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple

from kvtier.config.namespace import NamespaceDescription

__all__ = [
    "FoundNamespace",
    "StartLook",
    "by_closeness",
    "cold_start_text",
    "difference_text",
    "explain_cold_start",
    "explain_other_root",
]

logger = logging.getLogger(__name__)

_NAME_DIGITS = 8


class FoundNamespace(NamedTuple):
    """A namespace in the storage."""

    name: str
    """The fingerprint in hexadecimal, or its first digits if the rest is unknown."""
    num_blocks: int
    description: NamespaceDescription | None
    """None if there is none, or it is damaged."""
    is_counted: bool = True
    """False if it may have more blocks."""


def by_closeness(
    own: NamespaceDescription, others: Iterable[FoundNamespace]
) -> list[FoundNamespace]:
    """First the namespace that has the most in common with this engine's; of several, the
    largest."""

    def closeness(other: FoundNamespace) -> tuple[bool, int, int, str]:
        found = other.description
        num_equal = 0 if found is None else found.num_equal(own)
        return found is not None, num_equal, other.num_blocks, other.name

    return sorted(others, key=closeness, reverse=True)


def explain_cold_start(where: str, own: NamespaceDescription, closest: FoundNamespace) -> str:
    """Log one line: which blocks are there, and in what their namespace differs from `own`, which
    has no block. Returns it. `where`: the storage, without secrets. `closest`: the first of
    `by_closeness` that has blocks."""
    found = closest.description
    # Another model is normal where several models share a storage.
    is_same_model = found is None or found.model == own.model
    level = logging.WARNING if is_same_model else logging.INFO
    text = cold_start_text(where, own, closest)
    logger.log(level, "%s", text)
    return text


def cold_start_text(where: str, own: NamespaceDescription, closest: FoundNamespace) -> str:
    """What `explain_cold_start` logs."""
    found = closest.description
    least = "" if closest.is_counted else "at least "
    head = f"{where} holds {least}{_blocks(closest.num_blocks)} of"
    if found is None:
        return (
            f"{head} another namespace, {closest.name[:_NAME_DIGITS]}, and none of this engine's. "
            "There is no description of what that namespace is made of: an earlier kvtier stored "
            "its blocks"
        )
    if found.model == own.model:
        head = f"{head} another namespace of the model {found.model}"
    else:
        head = f"{head} the model {found.model}, and this engine runs {own.model}"
    difference = found.difference(own) or "what its description leaves out"
    return f"{head}: this engine can use none of them. It differs in {difference}"


def difference_text(own: NamespaceDescription | None, found: Sequence[NamespaceDescription]) -> str:
    """A second sentence for a log line that says that blocks are lost: whose they were, and in what
    they differ. Empty if there is no description."""
    if own is None or not found:
        return ""
    closest = max(found, key=own.num_equal)
    return f". They were of the model {closest.model}; {closest.difference(own)}"


def explain_other_root(
    where: str, own: NamespaceDescription, kept: NamespaceDescription | None, num_blocks: int
) -> str:
    """Log if the blocks of this engine's own namespace were stored by an engine with another root
    of its block hashes, so that none of them will be found. Returns the line; empty if they will be
    found. `kept`: the description beside them."""
    if kept is None or not kept.hash_root or not own.hash_root or not num_blocks:
        return ""
    if kept.hash_root == own.hash_root:
        return ""
    text = (
        f"{where} holds {_blocks(num_blocks)} of this engine's namespace, but they were last "
        f"stored under another root of the block hashes: {kept.hash_root}, now {own.hash_root}. "
        "Such blocks are never found: start all engines with the same PYTHONHASHSEED and the same "
        "hash algorithm"
    )
    logger.warning("%s", text)
    return text


def _blocks(count: int) -> str:
    return "1 block" if count == 1 else f"{count} blocks"


class StartLook(ABC):
    """A thread that looks once, when the engine starts, why it will find nothing. For tiers whose
    storage is on a server or in a shared directory."""

    def __init__(self, name: str) -> None:
        self.remark = ""
        """What `look` has found and logged."""
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)

    def get_remark(self) -> str:
        """What `look` has found and logged so far. Any thread."""
        return self.remark

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        """End the thread, after the call that it has made. Does nothing before `start`."""
        self._stopped.set()
        if self._thread.ident is not None:
            self._thread.join()

    @property
    def is_stopping(self) -> bool:
        """True if `look` should end early."""
        return self._stopped.is_set()

    @abstractmethod
    def look(self) -> None:
        """Find out whether there are blocks of this engine's namespace, or else of others, and log
        that. Must end within a few seconds, however much there is."""

    def _run(self) -> None:
        self._try(self.look)

    def _try(self, act: Callable[[], None]) -> None:
        """Run one step. Nobody needs it, so a failure is no warning: the tier itself reports what
        is wrong with its storage."""
        try:
            act()
        except Exception as error:
            if not self.is_stopping:
                logger.debug("%s: %s", self._thread.name, error, exc_info=True)
