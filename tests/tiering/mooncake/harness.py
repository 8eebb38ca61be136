"""Mooncake tiers for tests, driven by the harness of the conformance kit."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from kvtier.base import OffloadingSpec, OffloadKey
from kvtier.testing import TierHarness
from kvtier.tiering.base import SecondaryTierManager
from kvtier.tiering.mooncake.manager import MooncakeSecondaryTierManager
from kvtier.tiering.mooncake.namespaces import block_name
from kvtier.tiering.mooncake.pool import load_library
from kvtier.tiering.remote.manager import namespace_of
from tests.tiering.mooncake.pool import Master
from tests.tiering.patience import PATIENCE_S

__all__ = ["ROW_BYTES", "SEGMENT_BYTES", "MooncakeBacking", "mooncake_harness", "plain_client"]

ROW_BYTES = 8192
SEGMENT_BYTES = 64 << 20


def mooncake_harness(
    master: Master,
    *,
    namespace: str = "these weights",
    row_bytes: int = ROW_BYTES,
    num_slots: int = 96,
    **keys: Any,
) -> TierHarness:
    """An engine with a mooncake tier. Raises the errors of the tier's constructor."""

    def make_tier(spec: OffloadingSpec, view: memoryview) -> SecondaryTierManager:
        settings = {
            "master": master.address,
            "metadata": master.metadata_url,
            "segment_bytes": SEGMENT_BYTES,
        } | keys
        return MooncakeSecondaryTierManager(spec, view, "mooncake", **settings)

    return TierHarness(
        make_tier,
        row_bytes=row_bytes,
        num_slots=num_slots,
        patience_s=PATIENCE_S,
        namespace=namespace,
    )


@contextmanager
def plain_client(master: Master, metadata: str | None = None) -> Iterator[Any]:
    """A client that lends nothing, as any program in the network may have one. `metadata`: in place
    of the master's metadata server."""
    client = load_library().MooncakeDistributedStore()
    code = client.setup(
        "127.0.0.1", metadata or master.metadata_url, 0, 16 << 20, "tcp", "", master.address
    )
    assert code == 0, code
    try:
        yield client
    finally:
        client.close()


class MooncakeBacking:
    """`BackingBytes` of a pool: the bytes that it keeps, for tests to damage."""

    def __init__(self, client: Any, replicas: int = 1) -> None:
        self._client = client
        self._config = load_library().ReplicateConfig()
        self._config.replica_num = replicas

    def read(self, fingerprint: bytes, key: OffloadKey) -> bytes:
        found = self._client.get(block_name(namespace_of(fingerprint), key))
        if not found:
            raise KeyError(key)
        return bytes(found)

    def write(self, fingerprint: bytes, key: OffloadKey, block: bytes) -> None:
        self.read(fingerprint, key)
        name = block_name(namespace_of(fingerprint), key)
        code = self._client.upsert(name, block, self._config)
        assert code == 0, code
