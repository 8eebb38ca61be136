"""The scheduler half of the connector: what to load, what to store, and when.

The calls for one request: `on_new_request`, `get_num_new_matched_tokens` (a match, see `planning`),
`update_state_after_alloc` (starts a load), `build_connector_meta` (starts stores, and makes workers
wait for stores whose device blocks were given away), `update_connector_output` (transfers end),
`request_finished`.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Container, Iterable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING

from kvtier.base import (
    BlockIDsLoadStoreSpec,
    GPULoadStoreSpec,
    OffloadPolicy,
    ScheduleEndContext,
)
from kvtier.config.options import ResetScope
from kvtier.connector.common import (
    ComputedTokens,
    ConnectorMetadata,
    LoadedRequest,
    PrefixMatch,
    ScheduledRequest,
    StepPlan,
    TransferOrder,
    WorkerOutput,
    prefill_in,
)
from kvtier.connector.events import AllBlocksCleared, EventTranslator
from kvtier.connector.planning import (
    Geometry,
    Matcher,
    device_range,
    prepare_store,
    take_offers,
)
from kvtier.connector.request_state import RequestGroupState, RequestOffloadState
from kvtier.hints import HintReader
from kvtier.misuse import MisuseLog

if TYPE_CHECKING:
    from kvtier.base import OffloadingManager, OffloadingSpec, OffloadingStats, OffloadKey
    from kvtier.connector.common import EngineRequest
    from kvtier.connector.events import KVCacheEvent

__all__ = ["OffloadingConnectorScheduler", "RequestGroupState", "RequestOffloadState"]


@dataclass(slots=True, eq=False)
class ConnectorJob:
    """One transfer between device and host memory. It ends when every rank has reported it, and
    has failed if one rank failed."""

    job_id: int
    state: RequestOffloadState
    keys: list[OffloadKey]
    is_store: bool
    device_blocks: list[int]
    """Device blocks that the transfer reads or writes. One list for all groups, because groups may
    share one pool of blocks."""
    tokens_before: int = 0
    """Loads only: tokens on the device before the load."""
    tokens_after: int = 0
    """Loads only: tokens on the device after a load that succeeds."""
    ranks: set[int] = field(default_factory=set)
    """Ranks that have reported it."""
    has_failed: bool = False
    is_stale: bool = False
    """True for a job from before a reset: its result is not used."""


class OffloadingConnectorScheduler:
    """Turns what an engine schedules into loads and stores. Called on the engine's scheduler thread
    only.

    The order of calls in one step:

    1. `on_new_request` for each new request;
    2. `get_num_new_matched_tokens` for a waiting request and, if the engine admits it,
       `update_state_after_alloc` at once, before the next request is looked up;
    3. `build_connector_meta`, once, also in a step without requests. The workers carry out the
       returned metadata before the model runs;
    4. the model runs, and the workers report: `note_model_run` and `update_connector_output`;
    5. `request_finished` for each request that has ended, before its blocks are given away.

    Guarantees. A block is stored only when all of it has been computed, from the device blocks the
    request has at that moment. If the engine gives these device blocks to another request, the
    workers wait for the store before the model runs. A block is loaded into the device blocks given
    with `update_state_after_alloc`; the engine keeps them until the load is reported. A job ends
    when every rank has reported it. A failed load leaves the request with the tokens it had before,
    and a failed store leaves no block; neither raises.
    """

    def __init__(self, spec: OffloadingSpec) -> None:
        config = spec.config
        self._hints = HintReader(config.options)  # first: it may refuse the configuration
        self.manager: OffloadingManager = spec.get_manager()
        self._hints.note_ignored = self.manager.note_ignored_hints
        self._geometry = Geometry(config)
        self._matcher = Matcher(self.manager, self._geometry)
        self._world_size = config.parallel.world_size
        self._prompt_only = config.options.offload_prompt_only
        self._events = EventTranslator(spec, self.manager.media)
        self._pending_events: list[KVCacheEvent] = []
        """Events from before a reset, for the next `take_events`."""
        self._reports_resets = (
            config.enable_kv_cache_events and config.options.reset_scope is ResetScope.ALL
        )
        self._states: dict[str, RequestOffloadState] = {}
        self._jobs: dict[int, ConnectorJob] = {}
        self._last_job_id = 0
        self._metadata = ConnectorMetadata()
        """Transfers collected for the next step."""
        self._readers: dict[int, set[int]] = {}
        """Job ids of the stores under way, by the device block they read."""
        self._reset_req_ids: list[str] = []
        """Requests that were waiting at the last reset, for the next `on_schedule_end`."""
        self._dropped: list[LoadedRequest] = []
        """Loads that ended unsent, because of a reset or an unannounced request."""
        self._misuse = MisuseLog("connector")
        self._loading: Counter[OffloadKey] = Counter()
        """Number of loads under way for each block."""

    # --- requests -------------------------------------------------------------------------------

    def on_new_request(
        self, request: EngineRequest, count_cached: Callable[[], int] | None = None
    ) -> None:
        """Announce a request. Call it before any other method for this request.

        `count_cached`: returns the tokens of the request that the device's own cache has now, in
        whole device blocks of every group. If it is given, tiers may bring up the request's blocks
        while it waits for its turn. It is called at the end of steps, until the first lookup.

        Raises `ValueError` if the load of an earlier request with the same id was not reported yet.
        """
        former = self._states.get(request.request_id)
        if former is not None and former.is_loading:
            raise ValueError(
                f"request_id={request.request_id!r} belongs to a request whose load has not been "
                "reported: use another id, or wait for its LoadedRequest"
            )
        serves = self.manager.serves(request.request_id)
        state = RequestOffloadState(request, self._geometry, self._hints, *serves)
        self._states[request.request_id] = state
        answer = self.manager.on_new_request(state.req_context)
        state.stores_hits = answer.policy is OffloadPolicy.REQUEST_LEVEL
        if count_cached is not None and state.may_load and self._geometry.is_one_prefix:
            match = partial(self._matcher.blocks_to_match, state, count_cached)
            self.manager.on_request_queued(state.req_context, partial(match, self._update_keys))

    def get_num_new_matched_tokens(
        self, request: EngineRequest, num_computed_tokens: int
    ) -> PrefixMatch:
        """How many tokens after the computed ones can be loaded.

        `num_computed_tokens`: tokens of the request in the device's own cache, in whole device
        blocks of every group.
        """
        state = self._announced(request.request_id)
        if state is None or not state.may_load or state.has_failed_load:
            return PrefixMatch(0, is_pending=False)
        self._update_keys(state)
        start = num_computed_tokens
        end, is_pending = self._matcher.match(state, start, request.num_tokens - 1)
        if is_pending:
            return PrefixMatch(0, is_pending=True)
        if end <= start:
            return PrefixMatch(0, is_pending=False)
        if self._loading and _has_one_of(self._loading, state, start, end):
            # Another request is loading some of these blocks: soon the device's own cache has them.
            return PrefixMatch(0, is_pending=True)
        return PrefixMatch(end - start, is_pending=False)

    def _announced(self, request_id: str) -> RequestOffloadState | None:
        """The state of a request. If it was never announced: None, and the misuse is recorded."""
        state = self._states.get(request_id)
        if state is None:
            self._misuse.record(
                "a call for a request that was not announced",
                None,
                request_id,
                "call on_new_request when it arrives, before any other call for it. Until then "
                "nothing is loaded or stored for it",
            )
        return state

    def _update_keys(self, state: RequestOffloadState) -> None:
        state.update_keys()
        self._events.describe(state)

    def update_state_after_alloc(
        self,
        request: EngineRequest,
        block_ids: tuple[Sequence[int], ...],
        num_computed_tokens: int,
        num_external_tokens: int,
    ) -> None:
        """Start the load of a request that the engine has admitted. The request has device blocks
        for all of its computed and matched tokens. `block_ids`: as in `ScheduledRequest`."""
        state = self._announced(request.request_id)
        if state is None:
            if num_external_tokens:  # the engine waits for the end of this load
                self._dropped.append(LoadedRequest(request.request_id, num_computed_tokens))
            return
        if not num_external_tokens:
            state.start(self.manager, num_computed_tokens, 0)
            return
        end = num_computed_tokens + num_external_tokens
        state.loads(num_computed_tokens, end)
        keys: list[OffloadKey] = []
        blocks: list[int] = []
        sizes, first_blocks = [], []
        for place, group in enumerate(state.group_states):
            loaded = device_range(group, num_computed_tokens, end)
            its_blocks = list(block_ids[place][loaded.first_block : loaded.end_block])
            keys += loaded.keys
            blocks += its_blocks
            sizes.append(len(its_blocks))
            first_blocks.append(loaded.first_block)
        offloaded = self.manager.prepare_load(keys, state.req_context)
        state.start(self.manager, num_computed_tokens, num_external_tokens)
        assert isinstance(offloaded, BlockIDsLoadStoreSpec)
        job = self._begin(state, keys, is_store=False, device_blocks=blocks)
        job.tokens_before, job.tokens_after = num_computed_tokens, end
        state.is_loading = True
        self._loading.update(keys)
        device = GPULoadStoreSpec(blocks, sizes, first_blocks)
        self._metadata.loads.append(TransferOrder(job.job_id, device, offloaded))

    def request_finished(self, request_id: str, last: ScheduledRequest | None = None) -> None:
        """A request has ended or was aborted. Call it before its device blocks are given away.

        `last`: the request's device blocks now. Without it, blocks that were computed in the last
        step are not stored.
        """
        state = self._states.get(request_id)
        if state is None:
            return
        if last is not None:
            self._offer(state, last)
        state.is_finished = True
        state.report_to(self.manager)
        self.manager.on_request_finished(state.req_context)
        self._forget_if_done(state)

    # --- steps ----------------------------------------------------------------------------------

    def build_connector_meta(self, plan: StepPlan) -> ConnectorMetadata:
        """The transfers of this step, which the workers start before the model runs. Call it once
        per step."""
        for request_id in plan.preempted_req_ids:
            state = self._states.get(request_id)
            if state is not None:
                state.start_again()
        for scheduled in plan.scheduled:
            state = self._states.get(scheduled.request_id)
            if state is not None:
                state.is_on_device = True
                self._offer(state, scheduled)
        self._fence(plan)
        # A request that was waiting at a reset has no block from before the reset on the device. So
        # the manager may store its blocks again, like those of a preempted request.
        preempted = {*plan.preempted_req_ids, *self._reset_req_ids}
        self._reset_req_ids = []
        self.manager.on_schedule_end(ScheduleEndContext(plan.new_req_ids, preempted))
        metadata, self._metadata = self._metadata, ConnectorMetadata()
        return metadata

    def _offer(self, state: RequestOffloadState, scheduled: ScheduledRequest) -> None:
        """Start a store of the blocks that the request has computed since the last call."""
        if not state.may_store:
            return
        self._update_keys(state)
        offers, num_offered = take_offers(state, scheduled, self._store_limit(state))
        if offers:
            store = prepare_store(self.manager, offers, state)
            if store is None:
                return  # offered again in the next step
            if store.keys:
                job = self._begin(state, store.keys, True, store.device_blocks)
                for block in store.device_blocks:
                    self._readers.setdefault(block, set()).add(job.job_id)
                self._metadata.stores.append(
                    TransferOrder(job.job_id, store.device, store.offloaded)
                )
        for group, n in zip(state.group_states, num_offered, strict=True):
            group.num_offered = n

    def _store_limit(self, state: RequestOffloadState) -> int:
        limit = state.req.num_prompt_tokens if self._prompt_only else state.req.num_tokens
        most = state.hints.max_offload_tokens
        return limit if most is None else min(limit, most)

    def _fence(self, plan: StepPlan) -> None:
        """Make the workers wait for stores that read device blocks which were given to another
        request."""
        waiting: dict[int, None] = {}
        for blocks in plan.allocated_block_ids:
            for block in blocks:
                for job_id in self._readers.get(block, ()):
                    waiting[job_id] = None
        self._metadata.wait_for += waiting

    def update_connector_output(self, outputs: Iterable[WorkerOutput]) -> list[LoadedRequest]:
        """Record what the workers report, and return the loads that have ended on all ranks."""
        loaded, self._dropped = self._dropped, []
        for output in outputs:
            for result in output.finished:
                job = self._jobs.get(result.job_id)
                if job is None:
                    continue
                job.ranks.add(output.rank)
                job.has_failed = job.has_failed or not result.success
                if len(job.ranks) == self._world_size:
                    self._end(job, loaded)
        return loaded

    def note_model_run(self, computed: Iterable[ComputedTokens], seconds: float) -> None:
        """The model has computed these tokens in `seconds`. Call it after each run of the model.

        The manager uses it to decide whether loading a prefix is faster than computing it. Without
        these calls, the manager estimates the cost of computing from the rate of stores.
        """
        prefill = prefill_in(computed)
        if prefill is not None:
            self.manager.note_prefill(prefill.num_tokens, prefill.mean_position, seconds)

    def _begin(
        self,
        state: RequestOffloadState,
        keys: list[OffloadKey],
        is_store: bool,
        device_blocks: list[int],
    ) -> ConnectorJob:
        self._last_job_id += 1
        job = ConnectorJob(self._last_job_id, state, keys, is_store, device_blocks)
        self._jobs[job.job_id] = job
        state.num_jobs += 1
        return job

    def _end(self, job: ConnectorJob, loaded: list[LoadedRequest]) -> None:
        del self._jobs[job.job_id]
        state = job.state
        state.num_jobs -= 1
        if job.is_store:
            for block in job.device_blocks:
                readers = self._readers[block]
                readers.discard(job.job_id)
                if not readers:
                    del self._readers[block]
            if not job.is_stale:
                self.manager.complete_store(job.keys, state.req_context, not job.has_failed)
        else:
            state.is_loading = False
            tokens = job.tokens_before if job.has_failed else job.tokens_after
            if job.is_stale:
                tokens = 0
            else:
                self._loading -= Counter(job.keys)
                self.manager.complete_load(job.keys, state.req_context)
            if job.has_failed:
                state.has_lost_load(self.manager)
            state.loads(job.tokens_before, tokens)
            loaded.append(LoadedRequest(state.req.request_id, tokens))
        self._forget_if_done(state)

    def _forget_if_done(self, state: RequestOffloadState) -> None:
        request_id = state.req.request_id
        if state.is_finished and not state.num_jobs and self._states.get(request_id) is state:
            del self._states[request_id]

    # --- the whole cache ------------------------------------------------------------------------

    def reset_cache(self) -> None:
        """Forget all blocks, because nothing that was computed before is valid any more. Does not
        wait: the workers wait at the next step for transfers under way, whose results are not used.

        Blocks that running requests have on the device are not stored. The engine preempts these
        requests (`StepPlan.preempted_req_ids`), or lets them end with the blocks they have.
        """
        unsent = [order.job_id for order in (*self._metadata.stores, *self._metadata.loads)]
        for job in self._jobs.values():
            job.is_stale = True
        for job_id in unsent:  # never sent to the workers; the engine still waits for the loads
            self._end(self._jobs[job_id], self._dropped)
        self._metadata = ConnectorMetadata(flush=list(self._jobs))
        self._loading.clear()
        self._reset_req_ids = [
            request_id for request_id, state in self._states.items() if not state.is_on_device
        ]
        self.manager.reset_cache()
        self._pending_events += self._events.translate(self.manager.take_events())
        if self._reports_resets and not (
            self._pending_events and isinstance(self._pending_events[-1], AllBlocksCleared)
        ):
            self._events.clear()
            self._pending_events.append(AllBlocksCleared())

    def take_events(self) -> Iterable[KVCacheEvent]:
        """Blocks that were stored in, and removed from, each medium since the last call."""
        events = self._pending_events + self._events.translate(self.manager.take_events())
        self._pending_events = []
        return events

    def note_first_token(self, request_id: str) -> None:
        """A request has produced its first token. Call it before `request_finished`."""
        if (state := self._states.get(request_id)) is not None:
            state.report_first_token(self.manager)

    def get_stats(self) -> OffloadingStats | None:
        """The manager's statistics since the last call."""
        return self.manager.get_stats()

    def has_pending_push_work(self) -> bool:
        """True while the engine must keep stepping for transfers, even without requests."""
        return bool(self._jobs or self._dropped) or self.manager.has_pending_work()

    def shutdown(self) -> None:
        """Release all memory and tiers. Call it after the workers have been shut down."""
        self.manager.shutdown()


def _has_one_of(
    keys: Container[OffloadKey], state: RequestOffloadState, start: int, end: int
) -> bool:
    """True if a block of the request between these tokens is among `keys`."""
    return any(
        key in keys for group in state.group_states for key in device_range(group, start, end).keys
    )
