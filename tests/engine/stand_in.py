"""A connector that keeps blocks in a dictionary, with delays and failures.

Copies happen as late as they may: a store when it is waited for or its delay is over, a load when
its delay is over. So an engine that reuses a block too early, or does not say that it reuses it,
ends up with wrong bytes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from random import Random
from typing import Any

import numpy as np

from kvtier.base import CanonicalKVCaches, GPULoadStoreSpec, TransferResult
from kvtier.connector.common import (
    NO_DEVICE_BLOCK,
    ComputedTokens,
    ConnectorMetadata,
    EngineRequest,
    LoadedRequest,
    PrefixMatch,
    ScheduledRequest,
    StepPlan,
    TransferOrder,
    WorkerOutput,
)
from kvtier.cpu.common import CPULoadStoreSpec
from kvtier.engine import Connector, EngineConfig, ModelConfig

Key = tuple[int, bytes]
"""Group and hash."""


@dataclass
class Job:
    job_id: int
    is_store: bool
    blocks: list[tuple[Key, int]]
    steps_left: int
    request_id: str
    tokens_after: int = 0
    num_failing: int = 0
    """How many of the last blocks a load fails to bring."""
    is_done: bool = False


@dataclass
class Behaviour:
    max_delay: int = 0
    """Steps that a lookup or a transfer takes at most."""
    failing: float = 0.0
    """Share of the loads that fail, wholly or in part."""
    seed: int = 0
    holds: bool = False
    """True if no transfer ends before it is waited for."""


@dataclass
class StandIn:
    """Both halves in one; `connector` shows them apart."""

    model: ModelConfig
    engine: EngineConfig
    behaviour: Behaviour = field(default_factory=Behaviour)
    shelf: dict[Key, list[list[bytes]]] = field(default_factory=dict)
    """For each block, the pages of every rank."""
    num_loads: int = 0
    num_failed_loads: int = 0

    def __post_init__(self) -> None:
        self.random = Random(self.behaviour.seed)
        self.caches: dict[int, CanonicalKVCaches] = {}
        self.jobs: dict[int, Job] = {}
        self.alive: dict[str, EngineRequest] = {}
        self.num_offered: dict[str, list[int]] = {}
        self.asks_left: dict[str, int] = {}
        self.failed: set[str] = set()
        self.preempted: list[str] = []
        self.metadata = ConnectorMetadata()
        self.last_job_id = 0
        self.computed: list[ComputedTokens] = []
        self.is_shut_down = False

    @property
    def connector(self) -> Connector:
        workers = [_StandInWorker(self, rank) for rank in range(self.engine.world_size)]
        return Connector(self, workers)

    # --- the scheduler's half -------------------------------------------------------------------

    def note_first_token(self, request_id: str) -> None:
        assert request_id in self.alive

    def on_new_request(
        self, request: EngineRequest, count_cached: Callable[[], int] | None = None
    ) -> None:
        assert request.request_id not in self.alive
        self.alive[request.request_id] = request
        self.num_offered[request.request_id] = [0] * len(self.model.groups)
        self.asks_left[request.request_id] = self.random.randint(0, self.behaviour.max_delay)

    def _key(self, request: EngineRequest, group: int, index: int) -> Key:
        per_block = self.engine.block_tokens[group] // self.engine.tokens_per_hash
        return group, request.block_hashes[(index + 1) * per_block - 1]

    def _range(self, group: int, start: int, end: int) -> range:
        """The blocks of a group that a load from `start` to `end` needs."""
        tokens = self.engine.block_tokens[group]
        first = max(start, self.model.groups[group].first_needed_token(end)) // tokens
        return range(first, end // tokens)

    def get_num_new_matched_tokens(
        self, request: EngineRequest, num_computed_tokens: int
    ) -> PrefixMatch:
        assert num_computed_tokens % self.engine.alignment == 0
        if self.asks_left[request.request_id]:
            self.asks_left[request.request_id] -= 1
            return PrefixMatch(0, is_pending=True)
        if request.request_id in self.failed:
            return PrefixMatch(0, is_pending=False)
        step = self.engine.alignment
        last = (request.num_tokens - 1) // step * step
        for end in range(last, num_computed_tokens, -step):
            if all(
                self._key(request, group, index) in self.shelf
                for group in range(len(self.model.groups))
                for index in self._range(group, num_computed_tokens, end)
            ):
                return PrefixMatch(end - num_computed_tokens, is_pending=False)
        return PrefixMatch(0, is_pending=False)

    def update_state_after_alloc(
        self,
        request: EngineRequest,
        block_ids: tuple[Sequence[int], ...],
        num_computed_tokens: int,
        num_external_tokens: int,
    ) -> None:
        if not num_external_tokens:
            return
        end = num_computed_tokens + num_external_tokens
        blocks = [
            (self._key(request, group, index), block_ids[group][index])
            for group in range(len(block_ids))
            for index in self._range(group, num_computed_tokens, end)
        ]
        assert all(block != NO_DEVICE_BLOCK for _, block in blocks)
        job = self._begin(False, blocks, request.request_id)
        job.tokens_after = end
        self.num_loads += 1
        if self.random.random() < self.behaviour.failing:
            self.num_failed_loads += 1
            job.num_failing = self.random.randint(1, len(blocks))
            job.tokens_after = num_computed_tokens
            if len(block_ids) == 1:  # then the blocks before those that fail are a prefix
                job.tokens_after = end - job.num_failing * self.engine.block_tokens[0]
            self.failed.add(request.request_id)
        self.metadata.loads.append(self._order(job))

    def _begin(self, is_store: bool, blocks: list[tuple[Key, int]], request_id: str) -> Job:
        self.last_job_id += 1
        delay = self.random.randint(0, self.behaviour.max_delay)
        job = Job(self.last_job_id, is_store, blocks, delay, request_id)
        self.jobs[job.job_id] = job
        return job

    @staticmethod
    def _order(job: Job) -> TransferOrder:
        return TransferOrder(job.job_id, GPULoadStoreSpec([], [], []), CPULoadStoreSpec([]))

    def build_connector_meta(self, plan: StepPlan) -> ConnectorMetadata:
        self.preempted += plan.preempted_req_ids
        for request_id in plan.preempted_req_ids:
            if request_id in self.alive:
                self.num_offered[request_id] = [0] * len(self.model.groups)
        for scheduled in plan.scheduled:
            self._offer(scheduled)
        given_away = [set(blocks) for blocks in plan.allocated_block_ids]
        for job in self.jobs.values():
            overlap = any(block in given_away[key[0]] for key, block in job.blocks)
            if job.is_store and overlap:
                self.metadata.wait_for.append(job.job_id)
            elif overlap:
                # Only the request's own blocks, in the step that allocated them.
                assert job.job_id in [order.job_id for order in self.metadata.loads]
        metadata, self.metadata = self.metadata, ConnectorMetadata()
        return metadata

    def _offer(self, scheduled: ScheduledRequest) -> None:
        request = self.alive[scheduled.request_id]
        offered = self.num_offered[scheduled.request_id]
        blocks = []
        for group, tokens in enumerate(self.engine.block_tokens):
            num_full = scheduled.num_computed_tokens // tokens
            for index in range(offered[group], num_full):
                block = scheduled.block_ids[group][index]
                key = self._key(request, group, index)
                if block != NO_DEVICE_BLOCK and key not in self.shelf:
                    blocks.append((key, block))
            offered[group] = max(offered[group], num_full)
        if blocks:
            self.metadata.stores.append(self._order(self._begin(True, blocks, request.request_id)))

    def update_connector_output(self, outputs: Sequence[WorkerOutput]) -> list[LoadedRequest]:
        assert [output.rank for output in outputs] == list(range(self.engine.world_size))
        loaded = []
        for result in outputs[0].finished:
            job = self.jobs.pop(result.job_id)
            if not job.is_store:
                loaded.append(LoadedRequest(job.request_id, job.tokens_after))
        return loaded

    def note_model_run(self, computed: Iterable[ComputedTokens], seconds: float) -> None:
        assert seconds > 0
        self.computed += computed

    def request_finished(self, request_id: str, last: ScheduledRequest | None = None) -> None:
        if last is not None:
            self._offer(last)
        del self.alive[request_id]

    def has_pending_push_work(self) -> bool:
        return bool(self.jobs)

    def take_events(self) -> Iterable[Any]:
        return ()

    def reset_cache(self) -> None:
        self.shelf.clear()
        for job in self.jobs.values():  # what they bring is not used
            if job.is_store:
                job.blocks.clear()
            else:
                job.tokens_after = 0

    def shutdown(self) -> None:
        self.is_shut_down = True

    # --- copies ---------------------------------------------------------------------------------

    def pages(self, rank: int, group: int, block: int) -> list[Any]:
        caches = self.caches[rank]
        return [
            caches.tensors[ref.tensor_idx].tensor[block, : ref.page_size_bytes]
            for ref in caches.group_data_refs[group]
        ]

    def copy(self, job: Job) -> None:
        if job.is_done:
            return
        job.is_done = True
        ranks = range(self.engine.world_size)
        num_good = len(job.blocks) - job.num_failing
        for place, ((group, block_hash), block) in enumerate(job.blocks):
            key = (group, block_hash)
            if job.is_store:
                self.shelf[key] = [
                    [page.tobytes() for page in self.pages(rank, group, block)] for rank in ranks
                ]
                continue
            kept = self.shelf.get(key) if place < num_good else None
            for rank in ranks:
                for layer, page in enumerate(self.pages(rank, group, block)):
                    # A load that fails may have written anything; here, NaN.
                    page[:] = np.frombuffer(kept[rank][layer], np.uint8) if kept else 255


@dataclass
class _StandInWorker:
    parent: StandIn
    rank: int
    started: list[int] = field(default_factory=list)

    def register_kv_caches(self, kv_caches: CanonicalKVCaches) -> None:
        self.parent.caches[self.rank] = kv_caches

    def start_kv_transfers(self, metadata: ConnectorMetadata) -> None:
        self.started += [order.job_id for order in (*metadata.stores, *metadata.loads)]
        for job_id in metadata.wait_for:
            self.parent.copy(self.parent.jobs[job_id])

    def get_finished(self) -> WorkerOutput:
        finished = []
        for job_id in list(self.started):
            job = self.parent.jobs[job_id]
            if self.rank == 0:
                job.steps_left -= 1
            if job.is_done or (job.steps_left < 0 and not self.parent.behaviour.holds):
                self.parent.copy(job)
                self.started.remove(job_id)
                finished.append(TransferResult(job_id, not job.num_failing))
        return WorkerOutput(self.rank, finished)

    def shutdown(self) -> None:
        self.started.clear()
