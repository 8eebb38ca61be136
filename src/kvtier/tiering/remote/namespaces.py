"""Keeps the description of this engine's namespace on a server, and says at the start why the
engine will find nothing there."""

from __future__ import annotations

import threading
from abc import ABC, abstractmethod
from collections.abc import Sequence

from kvtier.config import NamespaceDescription
from kvtier.tiering.namespaces import (
    FoundNamespace,
    StartLook,
    by_closeness,
    explain_cold_start,
    explain_other_root,
)

__all__ = ["NamespaceKeeper", "NamespaceStorage"]

_WRITE_EVERY_S = 600.0
_MOST_DESCRIBED = 64
"""Namespaces whose descriptions are read."""


class NamespaceStorage(ABC):
    """What a server has for each namespace. Every method makes a bounded number of requests, is
    called on the keeper's thread, and may raise `ServerFailure`."""

    @abstractmethod
    def count_blocks(self, namespace: str) -> tuple[int, bool]:
        """Number of blocks that other engines find, up to a limit; and whether these are all."""

    @abstractmethod
    def namespaces(self) -> Sequence[str]:
        """Namespaces with blocks; not all, if there are many."""

    @abstractmethod
    def read_description(self, namespace: str) -> bytes | None:
        """A description, or whatever else has its place; None if there is nothing, or something
        too long."""

    @abstractmethod
    def write_description(self, namespace: str, content: bytes) -> None:
        """Replace the description. The server drops it some time after the last block that was
        stored before, as far as it drops blocks by itself."""


class NamespaceKeeper(StartLook):
    """A thread that looks once, and then writes the description: with the first block, and from
    time to time while blocks are stored or loaded, since the server may drop it."""

    def __init__(
        self, name: str, where: str, storage: NamespaceStorage, own: NamespaceDescription
    ) -> None:
        """`where`: the storage, without secrets."""
        super().__init__(name)
        self._where = where
        self._storage = storage
        self._own = own
        self._is_used = threading.Event()

    def note_use(self, namespace: str) -> None:
        """Blocks of a namespace were stored or loaded. Scheduler thread."""
        if namespace == self._own.namespace and not self._is_used.is_set():
            self._is_used.set()

    def stop(self) -> None:
        self._stopped.set()
        self._is_used.set()
        super().stop()

    def _run(self) -> None:
        self._try(self.look)
        while self._is_used.wait() and not self.is_stopping:
            self._is_used.clear()
            self._try(self._write)
            self._stopped.wait(_WRITE_EVERY_S)

    def _write(self) -> None:
        self._storage.write_description(self._own.namespace, self._own.encode())

    def look(self) -> None:
        where, own, storage = self._where, self._own, self._storage
        num_own, _ = storage.count_blocks(own.namespace)
        if num_own:
            kept = self._described(own.namespace)
            self.remark = explain_other_root(where, own, kept, num_own)
            return
        names = [name for name in storage.namespaces() if name != own.namespace]
        others = [
            FoundNamespace(name, 0, self._described(name))
            for name in names[:_MOST_DESCRIBED]
            if not self.is_stopping
        ]
        for other in by_closeness(own, others)[:1]:
            count, is_whole = storage.count_blocks(other.name)
            if count:
                closest = other._replace(num_blocks=count, is_counted=is_whole)
                self.remark = explain_cold_start(where, own, closest)

    def _described(self, namespace: str) -> NamespaceDescription | None:
        content = self._storage.read_description(namespace)
        return None if content is None else NamespaceDescription.decode(content, namespace)
