"""The bytes that the obj tier keeps, for tests to damage."""

from __future__ import annotations

import obstore
from obstore.store import ObjectStore

from kvtier.base import OffloadKey
from kvtier.tiering.obj.manager import ObjSecondaryTierManager
from kvtier.tiering.obj.objects import object_name
from kvtier.tiering.obj.runs import Run
from kvtier.tiering.obj.server import ObjServer
from kvtier.tiering.remote.manager import namespace_of

__all__ = ["ObjBacking"]


class ObjBacking:
    """`BackingBytes` of an obj tier."""

    def __init__(self, tier: ObjSecondaryTierManager, store: ObjectStore) -> None:
        assert isinstance(tier._server, ObjServer)
        self._server = tier._server
        self._store = store

    def name_of(self, fingerprint: bytes, key: OffloadKey) -> str:
        """The object with this block."""
        return object_name(self._folder(fingerprint), self._run_of(fingerprint, key)[0])

    def _folder(self, fingerprint: bytes) -> str:
        return self._server.folder_of(namespace_of(fingerprint))

    def _run_of(self, fingerprint: bytes, key: OffloadKey) -> tuple[OffloadKey, Run | None]:
        """The block that names the object, and the object's header."""
        reader = self._server._reader
        if reader is None:
            return key, None
        folder = self._folder(fingerprint)
        first = reader.index.first_of(folder, key)
        run = reader.read(folder, first)
        return first, run if isinstance(run, Run) and key in run.keys else None

    def _content(self, name: str, key: OffloadKey) -> bytes:
        try:
            return bytes(obstore.get(self._store, name).bytes())
        except FileNotFoundError:
            raise KeyError(key) from None

    def read(self, fingerprint: bytes, key: OffloadKey) -> bytes:
        first, run = self._run_of(fingerprint, key)
        content = self._content(object_name(self._folder(fingerprint), first), key)
        if run is None:
            return content
        start = run.start_of(run.keys.index(key))
        return content[start : start + run.block_bytes]

    def write(self, fingerprint: bytes, key: OffloadKey, block: bytes) -> None:
        first, run = self._run_of(fingerprint, key)
        name = object_name(self._folder(fingerprint), first)
        content = self._content(name, key)
        if run is not None:
            start = run.start_of(run.keys.index(key))
            padded = block.ljust(run.block_bytes, b"\0")[: run.block_bytes]
            block = content[:start] + padded + content[start + run.block_bytes :]
        obstore.put(self._store, name, block)
