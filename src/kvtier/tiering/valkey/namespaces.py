"""What a Valkey or Redis server has for each namespace."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Sequence
from typing import TYPE_CHECKING

from kvtier.config.namespace import DESCRIPTION_BYTES
from kvtier.tiering.remote.namespaces import NamespaceStorage
from kvtier.tiering.valkey.servers import Servers, description_key, failure_of
from kvtier.tiering.valkey.wire import Refusal, TooLong, Wire, command

if TYPE_CHECKING:
    from kvtier.tiering.valkey.mover import Wires

__all__ = ["ValkeyNamespaces"]

_BLOCK = re.compile(rb"kvtier:1:([0-9a-f]{32}):")
_KEYS_AT_ONCE = 1000
_MOST_CALLS = 20
"""Calls of SCAN, to each server. One takes the server less than a millisecond."""
_OUTLIVES_MS = 3_600_000
"""Descriptions of blocks that expire stay longer than these by more than the time in which they are
written again."""


class ValkeyNamespaces(NamespaceStorage):
    """The namespaces of all servers, by a sample of their keys if there are many."""

    def __init__(self, servers: Servers, wires: Wires, ttl_ms: int | None) -> None:
        """`wires`: those of the keeper's thread. `ttl_ms`: after how long blocks expire."""
        self._servers = servers
        self._wires = wires
        self._ttl_ms = ttl_ms
        self._sizes: Counter[str] | None = None
        self._is_whole = True

    def count_blocks(self, namespace: str) -> tuple[int, bool]:
        return self._sampled()[namespace], self._is_whole

    def namespaces(self) -> Sequence[str]:
        return [name for name, _ in self._sampled().most_common()]

    def read_description(self, namespace: str) -> bytes | None:
        key = description_key(namespace)
        buffer = memoryview(bytearray(DESCRIPTION_BYTES))
        with self._wires.recovering():
            wire = self._wires.to(self._servers.node_of(key))
            wire.send([command(b"GET", key)])
            try:
                length = wire.read_into(buffer)
            except Refusal:  # a value of another type
                return None
            except TooLong:
                self._wires.close()
                return None
        return None if length is None else bytes(buffer[:length])

    def write_description(self, namespace: str, content: bytes) -> None:
        key = description_key(namespace)
        words = [b"SET", key, content]
        if self._ttl_ms is not None:
            words += [b"PX", b"%d" % (self._ttl_ms + _OUTLIVES_MS)]
        with self._wires.recovering():
            wire = self._wires.to(self._servers.node_of(key))
            wire.send([command(*words)])
            try:
                wire.read()
            except Refusal as refusal:
                raise failure_of(refusal) from None

    def _sampled(self) -> Counter[str]:
        """Blocks of each namespace, among the keys that were looked at."""
        if self._sizes is None:
            sizes: Counter[str] = Counter()
            with self._wires.recovering():
                for node in self._servers.nodes():
                    self._scan(self._wires.to(node), sizes)
            self._sizes = sizes
        return self._sizes

    def _scan(self, wire: Wire, sizes: Counter[str]) -> None:
        cursor = b"0"
        for _ in range(_MOST_CALLS):
            count = b"%d" % _KEYS_AT_ONCE
            wire.expect_answers()
            wire.send([command(b"SCAN", cursor, b"MATCH", b"kvtier:1:*", b"COUNT", count)])
            try:
                answer = wire.read_list()
            except Refusal as refusal:
                raise failure_of(refusal) from None
            match answer:
                case [bytes(cursor), list(names)]:
                    found = (_BLOCK.match(name) for name in names if isinstance(name, bytes))
                    sizes.update(each[1].decode() for each in found if each is not None)
                case _:
                    return
            if cursor == b"0":
                return
        self._is_whole = False
