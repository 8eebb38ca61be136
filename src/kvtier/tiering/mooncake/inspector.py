"""`kvtier store` on a Mooncake pool."""

from __future__ import annotations

import mmap
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import islice
from typing import Any, TypeVar
from urllib.parse import parse_qsl, urlsplit

import numpy as np

from kvtier.base import OffloadKey
from kvtier.config import ConfigError
from kvtier.seal import SEAL_BYTES
from kvtier.tiering.base import TierRefused
from kvtier.tiering.inspection import InspectionRefused
from kvtier.tiering.mooncake.admin import MasterAdmin
from kvtier.tiering.mooncake.mover import GONE, require_answers, stored_sizes
from kvtier.tiering.mooncake.namespaces import BLOCK_NAME, description_in, description_name
from kvtier.tiering.mooncake.options import MooncakeOptions, Protocol
from kvtier.tiering.mooncake.pool import (
    Client,
    load_library,
    new_client,
    require_devices,
    require_master,
    require_private_network,
)
from kvtier.tiering.remote.errors import FailureKind, ServerFailure
from kvtier.tiering.remote.inspector import RemoteBlock, RemoteInspector, RemoteStorage

__all__ = ["SCHEME", "open_pool", "plain_client"]

T = TypeVar("T")

SCHEME = "mooncake://"
_IN_QUERY = ("metadata", "hostname", "protocol", "devices", "admin", "allow_public")
_AT_ONCE = 500
_LARGEST_READ = (1 << 30) + SEAL_BYTES
"""No block is longer. Something else that has the name of a block is not read."""


def open_pool(location: str) -> RemoteInspector | None:
    """The inspector of a pool, `mooncake://HOST:PORT?admin=HOST:PORT&metadata=URL`."""
    if not location.startswith(SCHEME):
        return None
    parts = urlsplit(location)
    keys: dict[str, Any] = {"master": parts.netloc}
    if parts.path.strip("/"):
        raise InspectionRefused(f"{location}: leave out {parts.path}: a pool has no paths")
    for name, value in parse_qsl(parts.query):
        if name not in _IN_QUERY:
            raise InspectionRefused(
                f"{location}: there is no {name}. After the ?, write any of {', '.join(_IN_QUERY)}"
            )
        keys[name] = value == "true" if name == "allow_public" else value
    try:
        options = MooncakeOptions.parse(keys)
        options.require_fitting()
        require_private_network(options)
        require_devices(options)
        load_library()
    except (ConfigError, TierRefused) as refused:
        raise InspectionRefused(str(refused)) from None
    return RemoteInspector("mooncake", options.where, _Storage(options))


@contextmanager
def plain_client(options: MooncakeOptions) -> Iterator[Client]:
    """A client that lends nothing, for a command. Raises `ServerFailure`."""
    own_address = require_master(options)
    own = options.hostname or own_address
    client, code = new_client(load_library(), options, own, segment_bytes=0)
    if code:
        raise ServerFailure(
            FailureKind.REFUSED,
            f"the pool does not take this machine as {own} (error {code}). Give the metadata "
            "server that the pool's hosts use: metadata=URL",
        )
    try:
        yield client
    finally:
        client.close()


class _Storage(RemoteStorage):
    """Connects when it is first used."""

    facts_in_bytes = frozenset(("pool_used", "pool_capacity"))

    def __init__(self, options: MooncakeOptions) -> None:
        self._options = options
        self._admin = MasterAdmin.of(options)
        self._connection: Any = None
        self._connected: Client | None = None
        self._sizes: dict[str, int] = {}

    @property
    def _client(self) -> Client:
        if self._connected is None:
            self._connection = plain_client(self._options)
            self._connected = self._connection.__enter__()
        return self._connected

    def _known_admin(self) -> MasterAdmin:
        if self._admin is None:
            raise ServerFailure(
                FailureKind.REFUSED, "the leading master is not known. Give admin=HOST:PORT"
            )
        return self._admin

    def scan(self) -> Iterator[RemoteBlock]:
        # Its answer is not needed for an empty pool, whose list may be that of another master.
        require_master(self._options)
        names = filter(BLOCK_NAME.fullmatch, self._known_admin().object_names())
        while some := list(islice(names, _AT_ONCE)):
            yield from self._described(some)

    def _described(self, names: Sequence[str]) -> Iterator[RemoteBlock]:
        sizes = stored_sizes(self._client, names)
        if not sizes:  # all have been evicted, or the master has not answered
            require_answers(self._client.batch_is_exist(names))
        for name in names:
            found = BLOCK_NAME.fullmatch(name)
            if found is None or name not in sizes:
                continue  # it has been evicted
            self._sizes[name] = size = sizes[name][0]
            yield RemoteBlock(
                place=name,
                namespace=found["namespace"],
                key=OffloadKey(bytes.fromhex(found["key"])),
                num_bytes=size,
                used_ns=None,
                is_private=False,
            )

    def read(self, place: str, num_bytes: int) -> memoryview | None:
        # The client reads objects as a whole.
        size = self._sizes.get(place, num_bytes)
        if size > _LARGEST_READ:
            raise ServerFailure(FailureKind.GARBAGE, "it is longer than any block")
        memory = np.frombuffer(mmap.mmap(-1, max(size, 1)), np.uint8)
        pointer = int(memory.ctypes.data)
        is_registered = self._options.protocol is Protocol.RDMA
        if is_registered and self._client.register_buffer(pointer, size):
            raise ServerFailure(FailureKind.REFUSED, "memory cannot be registered")
        try:
            (code,) = self._client.batch_get_into([place], [pointer], [size])
        finally:
            if is_registered:
                self._client.unregister_buffer(pointer)
        if code < 0:
            if code in GONE:
                return None
            raise ServerFailure(FailureKind.UNREACHABLE, f"it cannot be read (error {code})")
        return memory.data[: min(code, num_bytes)]

    def remove(self, places: Sequence[str]) -> None:
        require_answers(self._client.batch_remove(list(places), True))

    def description(self, namespace: str) -> bytes | None:
        return description_in(self._client, namespace)

    def remove_descriptions(self, namespaces: Sequence[str]) -> None:
        if namespaces:
            self._client.batch_remove([description_name(each) for each in namespaces], True)

    def facts(self) -> Mapping[str, Any]:
        use = self._known_admin().use()
        return {
            "segments": use.num_segments,
            "pool_used": use.used_bytes,
            "pool_capacity": use.capacity_bytes,
            "pool_objects": use.num_objects,
        }

    def close(self) -> None:
        if self._connected is not None:
            self._connection.__exit__(None, None, None)
            self._connected = None
