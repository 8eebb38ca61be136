"""Ways to move blocks between host memory and a Mooncake pool: kvtier's tier, the client's own
batch calls, and LMCache's backend for it.

All of them have a client of their own, and the same number of threads. The others neither seal nor
verify, and do not ask whether a block is there already.
"""

from __future__ import annotations

import json
import os
import threading
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from kvtier.base import OffloadKey
from kvtier.seal import SEAL_BYTES
from tests.bench.disk_subjects import LMCACHE, MOONCAKE, RAW_MOONCAKE, RAW_PARTS, Case, DiskSubject
from tests.bench.server_subjects import Client, DirectTier, Unit, name_of, spec_of, subject_of
from tests.tiering.processes import free_port

if TYPE_CHECKING:
    from kvtier.tiering.mooncake.manager import MooncakeSecondaryTierManager

CONNECTIONS = 2
"""Threads that load, and as many that store."""
_REMOVED_AT_ONCE = 2048


def keys_of(case: Case) -> dict[str, Any]:
    """The tier's keys, with an address of this process."""
    keys: dict[str, Any] = json.loads(case.server)
    return keys | {"hostname": f"127.0.0.1:{free_port()}"}


def open_tier(case: Case, view: memoryview) -> MooncakeSecondaryTierManager:
    from kvtier.tiering.mooncake.manager import MooncakeSecondaryTierManager

    return MooncakeSecondaryTierManager(spec_of(case, view), view, "mooncake", **keys_of(case))


def _kvtier(case: Case, view: memoryview) -> DiskSubject:
    from kvtier.tiering.mooncake.namespaces import block_name
    from kvtier.tiering.remote.manager import namespace_of

    tier = open_tier(case, view)
    space = namespace_of(tier.fingerprint)

    def remove(keys: list[OffloadKey]) -> None:
        names = [block_name(space, key) for key in keys]
        tier._pool_server.pool.ask(lambda client: client.batch_remove(names, True))

    return subject_of(tier, remove)


# --- the client's own calls ----------------------------------------------------------------------


def open_client(keys: dict[str, Any], view: memoryview) -> Any:
    """A client that lends as much as the tier would, and knows the rows."""
    from kvtier.tiering.mooncake.pool import load_library

    client = load_library().MooncakeDistributedStore()
    code = client.setup(
        keys["hostname"], keys["metadata"], keys["segment_bytes"], 0, "tcp", "", keys["master"]
    )
    assert code == 0, code
    client.register_buffer(_address_of(view), view.nbytes)
    return client


def _address_of(memory: Any) -> int:
    return int(np.frombuffer(memory, np.uint8).ctypes.data)


class _BareCalls(Client):
    """One call of the client for the blocks of a unit. For one thread."""

    def __init__(self, client: Any, base: int, row_bytes: int, with_seals: bool) -> None:
        """`with_seals`: move 256 bytes beside each row, as the tier does."""
        from mooncake.store import ReplicateConfig

        self._client = client
        self._base, self._row_bytes = base, row_bytes
        self._config = ReplicateConfig()
        self._config.preferred_segment = client.get_hostname()
        self._seals = bytearray(4096 * SEAL_BYTES) if with_seals else None

    def load(self, unit: Unit) -> None:
        names, rows = self._of(unit)
        if self._seals is None:
            codes = self._client.batch_get_into(names, rows, [self._row_bytes] * len(rows))
        else:
            codes = self._client.batch_get_into_multi_buffers(names, *self._parts(rows))
        assert min(codes) >= self._row_bytes, codes

    def store(self, unit: Unit) -> None:
        names, rows = self._of(unit)
        if self._seals is None:
            sizes = [self._row_bytes] * len(rows)
            codes = self._client.batch_put_from(names, rows, sizes, self._config)
        else:
            parts, sizes_of_parts = self._parts(rows)
            codes = self._client.batch_put_from_multi_buffers(
                names, parts, sizes_of_parts, self._config
            )
        assert not any(codes), codes

    def _of(self, unit: Unit) -> tuple[list[str], list[int]]:
        rows = [self._base + row * self._row_bytes for _, row in unit]
        return [name.hex() for name, _ in unit], rows

    def _parts(self, rows: Sequence[int]) -> tuple[list[list[int]], list[list[int]]]:
        seals = _address_of(self._seals)
        parts = [[seals + SEAL_BYTES * number, row] for number, row in enumerate(rows)]
        return parts, [[SEAL_BYTES, self._row_bytes]] * len(rows)


class _Bare(DirectTier):
    """The client's own calls, by as many threads as the tier has."""

    def __init__(self, case: Case, view: memoryview, with_seals: bool) -> None:
        self._client = open_client(keys_of(case), view)
        base = _address_of(view)
        super().__init__(
            view,
            lambda: _BareCalls(self._client, base, case.block_bytes, with_seals),
            (CONNECTIONS, CONNECTIONS),
            case.job_blocks,
        )

    def _row(self, row: int) -> Any:
        return row

    def remove(self, keys: list[OffloadKey]) -> None:
        self._client.batch_remove([name_of(key).hex() for key in keys], True)

    def shutdown(self) -> None:
        super().shutdown()
        self._client.close()


def _bare(with_seals: bool) -> Callable[[Case, memoryview], DiskSubject]:
    def make(case: Case, view: memoryview) -> DiskSubject:
        tier = _Bare(case, view, with_seals)
        return subject_of(tier, tier.remove)

    return make


# --- LMCache -------------------------------------------------------------------------------------


class _LMCacheCalls(Client):
    """LMCache's connector, which moves blocks between the pool and memory of its own. For one
    thread. Its stores are of blocks that are in that memory already."""

    def __init__(self, tier: _LMCache) -> None:
        self._tier = tier
        self._stored = [tier.allocate() for _ in range(tier.unit)]

    def load(self, unit: Unit) -> None:
        loaded = self._tier.wait_for(
            self._tier.connector.batched_get([self._tier.key_of(name) for name, _ in unit])
        )
        for each in loaded:
            each.ref_count_down()

    def store(self, unit: Unit) -> None:
        keys = [self._tier.key_of(name) for name, _ in unit]
        self._tier.wait_for(self._tier.connector.batched_put(keys, self._stored[: len(keys)]))


class _LMCache(DirectTier):
    """LMCache's backend for Mooncake, without metadata in the pool, which is its fastest way."""

    def __init__(self, case: Case, view: memoryview) -> None:
        import asyncio

        import torch
        from lmcache.v1.config import LMCacheEngineConfig
        from lmcache.v1.metadata import LMCacheMetadata
        from lmcache.v1.storage_backend.connector.mooncakestore_connector import (
            MooncakestoreConnector,
        )
        from lmcache.v1.storage_backend.local_cpu_backend import LocalCPUBackend

        keys = keys_of(case)
        config = LMCacheEngineConfig.from_dict(
            {
                "chunk_size": 16,
                "local_cpu": False,
                "max_local_cpu_size": 1.0,
                "extra_config": {
                    "save_chunk_meta": False,
                    "local_hostname": keys["hostname"],
                    "metadata_server": keys["metadata"],
                    "global_segment_size": str(keys["segment_bytes"]),
                    "local_buffer_size": str(64 << 20),
                    "protocol": "tcp",
                    "mooncake_master_server_addr": keys["master"],
                    "transfer_timeout": 60,
                    "mooncake_prefer_local_alloc": True,
                },
            }
        )
        # Keys and values of one layer, 16 tokens, two bytes a number.
        shape = (1, 2, 16, 1, case.block_bytes // 64)
        metadata = LMCacheMetadata(
            "bench", 1, 1, 0, 0, torch.bfloat16, shape, chunk_size=16, role="worker"
        )
        self._memory = LocalCPUBackend(config, metadata)
        self._loop = asyncio.new_event_loop()
        threading.Thread(target=self._loop.run_forever, daemon=True).start()
        self.connector = MooncakestoreConnector(self._loop, self._memory, config)
        self.unit = case.job_blocks
        super().__init__(
            view, lambda: _LMCacheCalls(self), (CONNECTIONS, CONNECTIONS), case.job_blocks
        )

    def allocate(self) -> Any:
        memory = self._memory.allocate(
            self.connector.meta_shapes, self.connector.meta_dtypes, self.connector.meta_fmt
        )
        assert memory is not None
        return memory

    def key_of(self, name: bytes) -> Any:
        import torch
        from lmcache.utils import CacheEngineKey

        number = int.from_bytes(name[-16:], "big")
        return CacheEngineKey("bench", 1, os.getpid(), number, torch.bfloat16)

    def wait_for(self, called: Any) -> Any:
        import asyncio

        return asyncio.run_coroutine_threadsafe(called, self._loop).result()

    def remove(self, keys: list[OffloadKey]) -> None:
        names = [self.key_of(name_of(key)).to_string() for key in keys]
        self.connector.store.batch_remove(names, True)

    def shutdown(self) -> None:
        super().shutdown()
        self.wait_for(self.connector.close())


def _lmcache(case: Case, view: memoryview) -> DiskSubject:
    tier = _LMCache(case, view)
    return subject_of(tier, tier.remove)


MAKERS: dict[str, Callable[[Case, memoryview], DiskSubject]] = {
    MOONCAKE: _kvtier,
    RAW_MOONCAKE: _bare(with_seals=False),
    RAW_PARTS: _bare(with_seals=True),
    LMCACHE: _lmcache,
}
