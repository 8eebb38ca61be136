"""The bytes that the valkey tier keeps, for tests to damage."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

from kvtier.base import OffloadKey
from kvtier.tiering.remote.manager import namespace_of
from kvtier.tiering.valkey.servers import block_key

__all__ = ["ValkeyBacking"]


class ValkeyBacking:
    """`BackingBytes` of a server."""

    def __init__(self, connect: Callable[[], AbstractContextManager[Any]]) -> None:
        """`connect`: returns a client."""
        self._connect = connect

    def read(self, fingerprint: bytes, key: OffloadKey) -> bytes:
        with self._connect() as client:
            found = client.get(block_key(namespace_of(fingerprint), key))
        if found is None:
            raise KeyError(key)
        assert isinstance(found, bytes)
        return found

    def write(self, fingerprint: bytes, key: OffloadKey, block: bytes) -> None:
        self.read(fingerprint, key)
        with self._connect() as client:
            client.set(block_key(namespace_of(fingerprint), key), block)
