"""The points at which a life of the fs tier can be killed: around every change of the root.

A point is named after the operation and the call: "evict: rename after" is after any of the renames
of an eviction.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import kvtier.tiering.fs.eviction as eviction_module
from kvtier.tiering.fs.ledger import Ledger
from kvtier.tiering.fs.presence import Peer
from kvtier.tiering.fs.publisher import Publisher
from kvtier.tiering.fs.quota import Quota
from kvtier.tiering.fs.root import RootSession
from kvtier.tiering.fs.transaction import Transaction
from tests.tiering.crash.points import KillPoints, plant

_OPERATIONS: dict[str, tuple[Any, str]] = {
    "open": (RootSession, "__init__"),
    "make presence": (RootSession, "_make_presence"),
    "make namespace": (Transaction, "make_namespace"),
    "count again": (Transaction, "count_again"),
    "transact": (Publisher, "_transact"),
    "publish": (Transaction, "publish"),
    "evict": (Transaction, "evict"),
    "recycle": (Publisher, "_recycle"),
    "give back": (Quota, "give_back"),
    "clear": (eviction_module, "remove_namespace"),
    "reclaim": (RootSession, "reclaim"),
    "remove presence": (Peer, "remove"),
    "close": (RootSession, "close"),
}
_CALLS = ("link", "rename", "mkdir", "unlink", "rmdir")

_AROUND = ("before", "after")
_WRITE = ("before", "half", "after")
AT_OPENING = (
    *(f"open: save {when}" for when in _WRITE),
    *(f"make presence: mkdir {when}" for when in _AROUND),
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
    *(f"remove presence: {call} {when}" for call in ("unlink", "rmdir") for when in _AROUND),
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


class RootPoints(KillPoints):
    """The points of the fs tier."""

    def plant(self) -> None:
        self._local = threading.local()
        for operation, (owner, name) in _OPERATIONS.items():
            plant(owner, **{name: self._as_operation(operation, getattr(owner, name))})
        for name in _CALLS:
            plant(os, **{name: self._as_call(name, getattr(os, name))})
        self._plant_in_save()
        self.plant_in_aio()

    def _as_operation(self, operation: str, real: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            with self._doing(operation):
                self.arrive(f"{operation}: before")
                answer = real(*args, **kwargs)
                self.arrive(f"{operation}: after")
            return answer

        return call

    @contextmanager
    def _doing(self, operation: str) -> Iterator[None]:
        before = getattr(self._local, "now", None)
        self._local.now = operation
        try:
            yield
        finally:
            self._local.now = before

    def _as_call(self, name: str, real: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            operation = getattr(self._local, "now", None)
            if operation is None:
                return real(*args, **kwargs)
            self.arrive(f"{operation}: {name} before")
            answer = real(*args, **kwargs)
            self.arrive(f"{operation}: {name} after")
            return answer

        return call

    def _plant_in_save(self) -> None:
        real = Ledger.save

        def save(ledger: Ledger, balance: Any) -> None:
            operation = getattr(self._local, "now", None)
            self.arrive(f"{operation}: save before")
            self.arrive(f"{operation}: save half", lambda: _save_half(ledger, balance, real))
            real(ledger, balance)
            self.arrive(f"{operation}: save after")

        plant(Ledger, save=save)


def _save_half(ledger: Ledger, balance: Any, save: Callable[[Ledger, Any], None]) -> None:
    """As the ledger does it, but for the second half of the bytes."""
    real = os.pwrite

    def pwrite_half(fd: int, data: bytes, offset: int) -> int:
        return real(fd, data[: len(data) // 2], offset)

    plant(os, pwrite=pwrite_half)
    save(ledger, balance)
