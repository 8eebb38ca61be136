"""The connector's half beside the engine's scheduler: what to load, what to store, and when."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
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
from kvtier.connector.geometry import Geometry
from kvtier.connector.jobs import ConnectorJob
from kvtier.connector.matching import Matcher, device_range
from kvtier.connector.request_state import RequestGroupState, RequestOffloadState
from kvtier.connector.storing import prepare_store, take_offers
from kvtier.misuse import MisuseLog

if TYPE_CHECKING:
    from kvtier.base import OffloadingManager, OffloadingSpec, OffloadingStats, OffloadKey
    from kvtier.connector.common import EngineRequest
    from kvtier.connector.events import KVCacheEvent

__all__ = ["OffloadingConnectorScheduler", "RequestGroupState", "RequestOffloadState"]


class OffloadingConnectorScheduler:
    """Turns what an engine schedules into loads and stores. The engine's scheduler thread only.

    The order of calls in one step:

    1. `on_new_request` for each request that has arrived;
    2. `get_num_new_matched_tokens` for a waiting request, and, if the engine takes it in,
       `update_state_after_alloc` at once, before another request is asked for;
    3. `build_connector_meta`, once, also in a step without requests. The workers carry it out
       before the model runs;
    4. the model runs, and the workers report: `note_model_run` and `update_connector_output`;
    5. `request_finished` for each request that has ended, before its blocks are given away.

    Guarantees. A block is stored only when all of it has been computed, from the blocks the request
    has at that moment; if those are given to someone else, the transfer is waited for first. A
    block is loaded into the blocks given with `update_state_after_alloc`; the engine keeps them
    until the load is reported. A job is done when every rank has reported it. A failed load leaves
    the request with what it had before; a failed store leaves no block. Nothing raises for it.
    """

    def __init__(self, spec: OffloadingSpec) -> None:
        config = spec.config
        self.manager: OffloadingManager = spec.get_manager()
        self._geometry = Geometry(config)
        self._matcher = Matcher(self.manager, self._geometry)
        self._world_size = config.parallel.world_size
        self._prompt_only = config.options.offload_prompt_only
        self._events = EventTranslator(
            config.enable_kv_cache_events and config.options.self_describing_kv_events
        )
        self._events_taken: list[KVCacheEvent] = []
        """Of the time before a reset."""
        self._tells_resets = (
            config.enable_kv_cache_events and config.options.reset_scope is ResetScope.ALL
        )
        self._states: dict[str, RequestOffloadState] = {}
        self._jobs: dict[int, ConnectorJob] = {}
        self._last_job_id = 0
        self._metadata = ConnectorMetadata()
        """What is gathered for the next step."""
        self._readers: dict[int, set[int]] = {}
        """Stores under way, by the device blocks they read."""
        self._reset_req_ids: list[str] = []
        """Requests that were waiting at the last reset, until the manager was told."""
        self._dropped: list[LoadedRequest] = []
        """Loads that a reset has ended before they began."""
        self._misuse = MisuseLog("connector")
        self._loading: Counter[OffloadKey] = Counter()
        """Blocks on their way to the device."""

    # --- requests -------------------------------------------------------------------------------

    def on_new_request(self, request: EngineRequest) -> None:
        """A request has arrived. Before any other call for it.

        Raises `ValueError` for an id whose last load was not reported yet: its end would be taken
        for the new request's.
        """
        former = self._states.get(request.request_id)
        if former is not None and former.is_loading:
            raise ValueError(
                f"request_id={request.request_id!r} belongs to a request whose load has not been "
                "reported: use another id, or wait for its LoadedRequest"
            )
        state = RequestOffloadState(request, self._geometry)
        self._states[request.request_id] = state
        answer = self.manager.on_new_request(state.req_context)
        state.stores_hits = answer.policy is OffloadPolicy.REQUEST_LEVEL

    def get_num_new_matched_tokens(
        self, request: EngineRequest, num_computed_tokens: int
    ) -> PrefixMatch:
        """How many tokens behind the computed ones can be loaded.

        `num_computed_tokens`: what the device's own cache has of the request, in whole device
        blocks of every group.
        """
        state = self._announced(request.request_id)
        if state is None or state.hints.skip or state.has_failed_load:
            return PrefixMatch(0, is_pending=False)
        self._update_keys(state)
        start = num_computed_tokens
        end, is_pending = self._matcher.match(state, start, request.num_tokens - 1)
        if is_pending:
            return PrefixMatch(0, is_pending=True)
        if end <= start:
            return PrefixMatch(0, is_pending=False)
        if self._is_being_loaded(state, start, end):
            # Soon the device's own cache has it.
            return PrefixMatch(0, is_pending=True)
        return PrefixMatch(end - start, is_pending=False)

    def _announced(self, request_id: str) -> RequestOffloadState | None:
        """What is known of a request; None, and reported, if it was never announced."""
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

    def _is_being_loaded(self, state: RequestOffloadState, start: int, end: int) -> bool:
        return bool(self._loading) and any(
            key in self._loading
            for group in state.group_states
            for key in device_range(group, start, end).keys
        )

    def update_state_after_alloc(
        self,
        request: EngineRequest,
        block_ids: tuple[Sequence[int], ...],
        num_computed_tokens: int,
        num_external_tokens: int,
    ) -> None:
        """The engine has taken a request in, with device blocks for all of its computed and matched
        tokens. `block_ids`: as in `ScheduledRequest`."""
        state = self._announced(request.request_id)
        if state is None:
            if num_external_tokens:  # the engine waits for the end of this load
                self._dropped.append(LoadedRequest(request.request_id, num_computed_tokens))
            return
        state.is_on_device = True
        if not num_external_tokens:
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
        assert isinstance(offloaded, BlockIDsLoadStoreSpec)
        job = self._begin(state, keys, is_store=False, device_blocks=blocks)
        job.tokens_before, job.tokens_after = num_computed_tokens, end
        state.is_loading = True
        self._loading.update(keys)
        device = GPULoadStoreSpec(blocks, sizes, first_blocks)
        self._metadata.loads.append(TransferOrder(job.job_id, device, offloaded))

    def request_finished(self, request_id: str, last: ScheduledRequest | None = None) -> None:
        """A request has ended, or was aborted. Before its device blocks are given away.

        `last`: what it has on the device now. Without it, what it has computed in its last step is
        not stored.
        """
        state = self._states.get(request_id)
        if state is None:
            return
        if last is not None:
            self._offer(state, last)
        state.is_finished = True
        self.manager.on_request_finished(state.req_context)
        self._forget_if_done(state)

    # --- steps ----------------------------------------------------------------------------------

    def build_connector_meta(self, plan: StepPlan) -> ConnectorMetadata:
        """What the workers have to do before the model runs. Once in a step."""
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
        # What was waiting at a reset has nothing from before it on the device, either.
        preempted = {*plan.preempted_req_ids, *self._reset_req_ids}
        self._reset_req_ids = []
        self.manager.on_schedule_end(ScheduleEndContext(plan.new_req_ids, preempted))
        metadata, self._metadata = self._metadata, ConnectorMetadata()
        return metadata

    def _offer(self, state: RequestOffloadState, scheduled: ScheduledRequest) -> None:
        """Store what the request has computed, and not offered yet."""
        if state.hints.skip:
            return
        self._update_keys(state)
        offers, num_offered = take_offers(state, scheduled, self._store_limit(state))
        if offers:
            store = prepare_store(self.manager, offers, state)
            if store is None:
                return  # the same again in the next step
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
        """Wait for stores that still read device blocks which someone else has been given."""
        waiting: dict[int, None] = {}
        for blocks in plan.allocated_block_ids:
            for block in blocks:
                for job_id in self._readers.get(block, ()):
                    waiting[job_id] = None
        self._metadata.wait_for += waiting

    def update_connector_output(self, outputs: Iterable[WorkerOutput]) -> list[LoadedRequest]:
        """What the workers have reported since the last time. Returns the loads that have ended."""
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
        """The model has run, for `seconds`, and has computed these tokens. After each run.

        Without it, the manager guesses from its stores what computing a prompt costs, and then
        whether loading a prefix is worth the wait.
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
            state.has_failed_load = state.has_failed_load or job.has_failed
            state.loads(job.tokens_before, tokens)
            loaded.append(LoadedRequest(state.req.request_id, tokens))
        self._forget_if_done(state)

    def _forget_if_done(self, state: RequestOffloadState) -> None:
        request_id = state.req.request_id
        if state.is_finished and not state.num_jobs and self._states.get(request_id) is state:
            del self._states[request_id]

    # --- the whole cache ------------------------------------------------------------------------

    def reset_cache(self) -> None:
        """Nothing computed before is valid any more. Never waits: what is under way is waited for
        at the beginning of the next step, and what it brings is not used.

        What running requests have on the device was computed before, and is not stored. The engine
        preempts them (`StepPlan.preempted_req_ids`), or lets them end with what they have.
        """
        unsent = [order.job_id for order in (*self._metadata.stores, *self._metadata.loads)]
        for job in self._jobs.values():
            job.is_stale = True
        for job_id in unsent:  # not to be copied at all; but an engine waits for its loads
            self._end(self._jobs[job_id], self._dropped)
        self._metadata = ConnectorMetadata(flush=list(self._jobs))
        self._loading.clear()
        self._reset_req_ids = [
            request_id for request_id, state in self._states.items() if not state.is_on_device
        ]
        self.manager.reset_cache()
        self._events_taken += self._events.translate(self.manager.take_events())
        if self._tells_resets and not (
            self._events_taken and isinstance(self._events_taken[-1], AllBlocksCleared)
        ):
            self._events_taken.append(AllBlocksCleared())

    def take_events(self) -> Iterable[KVCacheEvent]:
        """What appeared in, and disappeared from, each medium since the last call."""
        events = self._events_taken + self._events.translate(self.manager.take_events())
        self._events_taken = []
        return events

    def get_stats(self) -> OffloadingStats | None:
        """The manager's figures since the last call."""
        return self.manager.get_stats()

    def has_pending_push_work(self) -> bool:
        """Whether the engine must keep stepping for transfers, also without requests."""
        # A job that was not sent yet is among the jobs.
        return bool(self._jobs or self._dropped) or self.manager.has_pending_work()

    def shutdown(self) -> None:
        """Release everything. After the workers have been shut down."""
        self.manager.shutdown()
