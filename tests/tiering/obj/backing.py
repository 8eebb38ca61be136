"""The bytes that the obj tier keeps, for tests to damage."""

from __future__ import annotations

import obstore
from obstore.store import ObjectStore

from kvtier.base import OffloadKey
from kvtier.tiering.obj.manager import ObjSecondaryTierManager
from kvtier.tiering.obj.mover import ObjServer, object_name
from kvtier.tiering.remote.manager import namespace_of

__all__ = ["ObjBacking"]


class ObjBacking:
    """`BackingBytes` of an obj tier."""

    def __init__(self, tier: ObjSecondaryTierManager, store: ObjectStore) -> None:
        assert isinstance(tier._server, ObjServer)
        self._server = tier._server
        self._store = store

    def name_of(self, fingerprint: bytes, key: OffloadKey) -> str:
        return object_name(self._server.folder_of(namespace_of(fingerprint)), key)

    def read(self, fingerprint: bytes, key: OffloadKey) -> bytes:
        try:
            found = obstore.get(self._store, self.name_of(fingerprint, key))
        except FileNotFoundError:
            raise KeyError(key) from None
        return bytes(found.bytes())

    def write(self, fingerprint: bytes, key: OffloadKey, block: bytes) -> None:
        self.read(fingerprint, key)
        obstore.put(self._store, self.name_of(fingerprint, key), block)
