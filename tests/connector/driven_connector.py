"""A connector over a real CPU manager, and requests to drive it with."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from hashlib import blake2b
from typing import Any

from kvtier.base import (
    BlockIDsLoadStoreSpec,
    CanonicalKVCaches,
    OffloadingManager,
    OffloadingSpec,
    OffloadingWorker,
    TransferResult,
)
from kvtier.config import OffloadingCacheConfig, OffloadingGroupConfig, OffloadingParallelConfig
from kvtier.connector.common import (
    ConnectorMetadata,
    LoadedRequest,
    ScheduledRequest,
    StepPlan,
    WorkerOutput,
)
from kvtier.connector.scheduler import OffloadingConnectorScheduler
from kvtier.cpu.manager import CPUOffloadingManager
from tests.config.sample import make_config

TOKENS_PER_HASH = 4


@dataclass
class Request:
    """A request with tokens and hashes, as an engine has it."""

    request_id: str
    token_ids: Sequence[int]
    num_prompt_tokens: int
    kv_transfer_params: Mapping[str, Any] | None = None

    @property
    def num_tokens(self) -> int:
        return len(self.token_ids)

    @property
    def block_hashes(self) -> list[bytes]:
        hashes, parent = [], b""
        for end in range(TOKENS_PER_HASH, len(self.token_ids) + 1, TOKENS_PER_HASH):
            tokens = bytes(self.token_ids[end - TOKENS_PER_HASH : end])
            parent = blake2b(parent + tokens, digest_size=32).digest()
            hashes.append(parent)
        return hashes


class ManagerSpec(OffloadingSpec):
    def __init__(self, config: Any, manager: OffloadingManager) -> None:
        super().__init__(config)
        self._manager = manager

    def get_manager(self) -> OffloadingManager:
        return self._manager

    def get_worker(self, kv_caches: CanonicalKVCaches) -> OffloadingWorker:
        raise NotImplementedError


class DrivenConnector:
    """A connector without a device: the test decides the result of each transfer."""

    def __init__(
        self,
        groups: Sequence[OffloadingGroupConfig] = (OffloadingGroupConfig(4, ("a",)),),
        *,
        num_blocks: int = 64,
        blocks_per_chunk: int = 1,
        world_size: int = 1,
        manager: OffloadingManager | None = None,
        **extra: Any,
    ) -> None:
        self.config = make_config(
            extra,
            groups=tuple(groups),
            cache=OffloadingCacheConfig(TOKENS_PER_HASH, blocks_per_chunk),
            parallel=OffloadingParallelConfig(world_size=world_size, tp_size=world_size),
            enable_kv_cache_events=True,
        )
        self.world_size = world_size
        manager = manager or CPUOffloadingManager(num_blocks, enable_events=True)
        self.connector = OffloadingConnectorScheduler(ManagerSpec(self.config, manager))
        self.next_block = 100

    def request(self, name: str, num_prompt: int, first: int = 0, **params: Any) -> Request:
        request = Request(
            name, [(first + i) % 251 for i in range(num_prompt)], num_prompt, params or None
        )
        self.connector.on_new_request(request)
        return request

    def table(self, num_tokens: int) -> tuple[list[int], ...]:
        """New device blocks for this number of tokens, in every group."""
        tables = []
        for group in self.config.groups:
            num_blocks = -(-num_tokens // group.tokens_per_block)
            tables.append(list(range(self.next_block, self.next_block + num_blocks)))
            self.next_block += num_blocks
        return tuple(tables)

    def run(
        self, *scheduled: ScheduledRequest, allocated: tuple[list[int], ...] = (), **plan: Any
    ) -> ConnectorMetadata:
        return self.connector.build_connector_meta(
            StepPlan(scheduled, allocated_block_ids=allocated, **plan)
        )

    def end(self, metadata: ConnectorMetadata, success: bool = True) -> list[LoadedRequest]:
        """All ranks report all transfers of a step."""
        results = [
            TransferResult(order.job_id, success) for order in (*metadata.stores, *metadata.loads)
        ]
        outputs = [WorkerOutput(rank, results) for rank in range(self.world_size)]
        return self.connector.update_connector_output(outputs)

    def serve(self, request: Request, num_computed: int | None = None) -> tuple[list[int], ...]:
        """Compute, store and end a request. Returns its device blocks."""
        tables = self.table(request.num_tokens)
        computed = request.num_tokens if num_computed is None else num_computed
        self.end(self.run(ScheduledRequest(request.request_id, tables, computed)))
        self.connector.request_finished(request.request_id)
        return tables


def slots(spec: object) -> list[int]:
    assert isinstance(spec, BlockIDsLoadStoreSpec)
    return [int(slot) for slot in spec.block_ids]
