"""Places in the code at which an engine's life can end: around every change of the root.

Nothing in the tier knows of them. They are put around its methods, in a process that will be
killed. A point is named by what is being done, and by the call that is about to be made or has
been made: "evict: rename after" is between two of the renames of an eviction, or after the last.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import kvtier.tiering.fs.sweeper as sweeper_module
from kvtier.tiering.fs.books import Books
from kvtier.tiering.fs.clerk import Clerk
from kvtier.tiering.fs.ledger import Ledger
from kvtier.tiering.fs.seat import StrangeSeat
from tests.tiering.disk.crash.planting import plant
from tests.tiering.disk.crash.points import Points

_DEEDS: dict[str, tuple[Any, str]] = {
    "open": (Books, "__init__"),
    "sit down": (Books, "_sit_down"),
    "make namespace": (Books, "make_namespace"),
    "count again": (Books, "_count_again"),
    "transact": (Clerk, "_transact"),
    "publish": (Books, "publish"),
    "evict": (Books, "evict"),
    "recycle": (Clerk, "_recycle"),
    "give back": (Clerk, "_give_back"),
    "clear": (sweeper_module, "remove_namespace"),
    "reclaim": (Books, "reclaim"),
    "remove seat": (StrangeSeat, "remove"),
    "close": (Books, "close"),
}
_CALLS = ("link", "rename", "mkdir", "unlink", "rmdir")

_AROUND = ("before", "after")
_WRITE = ("before", "half", "after")
AT_OPENING = (
    *(f"open: save {when}" for when in _WRITE),
    *(f"sit down: mkdir {when}" for when in _AROUND),
)
AT_MAKING = tuple(f"make namespace: {call} after" for call in ("save", "mkdir"))
AT_RECOUNTING = tuple(f"count again: {when}" for when in _AROUND)
AT_CLOSING = (
    *(f"close: save {when}" for when in _WRITE),
    *(f"close: {call} {when}" for call in ("unlink", "rmdir") for when in _AROUND),
)
AT_CLEARING = tuple(f"clear: {call} after" for call in ("save", "rmdir"))
AT_REST = tuple(f"give back: {call} {when}" for call in ("unlink", "save") for when in _AROUND)
AT_RECLAIMING = (
    *(f"reclaim: save {when}" for when in _WRITE),
    *(f"remove seat: {call} {when}" for call in ("unlink", "rmdir") for when in _AROUND),
)
AT_WORK = (
    *(f"transact: save {when}" for when in _WRITE),
    *(f"publish: save {when}" for when in _WRITE),
    *(f"publish: link {when}" for when in _AROUND),
    *(f"evict: rename {when}" for when in _AROUND),
    *(f"recycle: unlink {when}" for when in _AROUND),
    *(f"slot {when}" for when in ("before", "half", "after", "written")),
)
POINTS = (
    *AT_OPENING,
    *AT_MAKING,
    *AT_RECOUNTING,
    *AT_WORK,
    *AT_REST,
    *AT_CLEARING,
    *AT_RECLAIMING,
    *AT_CLOSING,
)


class FsPoints(Points):
    """Counts arrivals, and ends the process at the one that was chosen. Any thread."""

    def plant(self) -> None:
        """From now on, this process can end at every point."""
        self._deeds = threading.local()
        for deed, (owner, name) in _DEEDS.items():
            plant(owner, **{name: self._as_deed(deed, getattr(owner, name))})
        for name in _CALLS:
            plant(os, **{name: self._as_call(name, getattr(os, name))})
        self._plant_in_save()
        self._plant_in_aio()

    def _as_deed(self, deed: str, real: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            with self._doing(deed):
                self.arrive(f"{deed}: before")
                answer = real(*args, **kwargs)
                self.arrive(f"{deed}: after")
            return answer

        return call

    @contextmanager
    def _doing(self, deed: str) -> Iterator[None]:
        before = getattr(self._deeds, "now", None)
        self._deeds.now = deed
        try:
            yield
        finally:
            self._deeds.now = before

    def _as_call(self, name: str, real: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            deed = getattr(self._deeds, "now", None)
            if deed is None:
                return real(*args, **kwargs)
            self.arrive(f"{deed}: {name} before")
            answer = real(*args, **kwargs)
            self.arrive(f"{deed}: {name} after")
            return answer

        return call

    def _plant_in_save(self) -> None:
        real = Ledger.save

        def save(ledger: Ledger, balance: Any) -> None:
            deed = getattr(self._deeds, "now", None)
            self.arrive(f"{deed}: save before")
            self.arrive(f"{deed}: save half", lambda: _save_half(ledger, balance, real))
            real(ledger, balance)
            self.arrive(f"{deed}: save after")

        plant(Ledger, save=save)


def _save_half(ledger: Ledger, balance: Any, save: Callable[[Ledger, Any], None]) -> None:
    """As the ledger does it, but for the second half of the bytes."""
    real = os.pwrite

    def pwrite_half(fd: int, data: bytes, offset: int) -> int:
        return real(fd, data[: len(data) // 2], offset)

    plant(os, pwrite=pwrite_half)
    save(ledger, balance)
