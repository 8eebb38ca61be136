"""Names of what kvtier keeps in a pool, and the descriptions of its namespaces there.

A pool cannot be listed through its client, so an object of its own has the names of namespaces.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from kvtier.base import OffloadKey
from kvtier.config.namespace import DESCRIPTION_BYTES
from kvtier.tiering.mooncake.pool import Client, Pool
from kvtier.tiering.remote.namespaces import NamespaceStorage

__all__ = [
    "BLOCK_NAME",
    "MooncakeNamespaces",
    "block_name",
    "block_names",
    "description_in",
    "description_name",
]

_PREFIX = "kvtier:1:"
"""The version of the stored format is part of each name, so that releases with another one neither
find nor touch these blocks."""
BLOCK_NAME = re.compile(r"kvtier:1:(?P<namespace>[0-9a-f]{32}):(?P<key>(?:[0-9a-f]{2})+)")
_INDEX = f"{_PREFIX}namespaces"
_NAMESPACE = re.compile(rb"[0-9a-f]{32}")
_MOST_LISTED = 64


def block_names(namespace: str, keys: Iterable[OffloadKey]) -> list[str]:
    """The names of blocks in the pool."""
    start = f"{_PREFIX}{namespace}:"
    return [start + key.hex() for key in keys]


def block_name(namespace: str, key: OffloadKey) -> str:
    """The name of a block in the pool."""
    return block_names(namespace, (key,))[0]


def description_name(namespace: str) -> str:
    """The name of a namespace's description."""
    return f"{_PREFIX}description:{namespace}"


def description_in(client: Client, namespace: str) -> bytes | None:
    """What has the place of a namespace's description; None if there is nothing, or something too
    long."""
    content = client.get(description_name(namespace))
    return content if 0 < len(content) <= DESCRIPTION_BYTES else None


class MooncakeNamespaces(NamespaceStorage):
    """The namespaces of which the pool has descriptions."""

    def __init__(self, pool: Pool, config: Callable[[], Any]) -> None:
        """`config`: makes the settings of a store, for this engine."""
        self._pool = pool
        self._config = config

    def count_blocks(self, namespace: str) -> tuple[int, bool]:
        # Blocks cannot be counted. Where a description is, there was a block a short time ago.
        return int(self.read_description(namespace) is not None), False

    def namespaces(self) -> Sequence[str]:
        return [name.decode() for name in self._listed()]

    def _listed(self) -> list[bytes]:
        content = self._pool.ask(lambda client: client.get(_INDEX))
        names = content[: _MOST_LISTED * 33].split(b"\n")
        return [name for name in names if _NAMESPACE.fullmatch(name)]

    def read_description(self, namespace: str) -> bytes | None:
        return self._pool.ask(lambda client: description_in(client, namespace))

    def write_description(self, namespace: str, content: bytes) -> None:
        # Two engines that write at once may lose a name. It is written again with later blocks.
        names = [namespace.encode(), *(n for n in self._listed() if n != namespace.encode())]
        index = b"\n".join(names[:_MOST_LISTED])

        def write(client: Client) -> None:
            client.upsert(description_name(namespace), content, self._config())
            client.upsert(_INDEX, index, self._config())

        self._pool.ask(write)
