"""The adapter between vLLM's connector and a kvtier manager: it maps the types of one to the other.

The classes in `manager_state` hold what is kept between two calls. vLLM's connector calls the
adapter on the scheduler thread. It calls `lookup` for every block of every waiting request at every
step, so `lookup` does as little as possible.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any

from kvtier.base import (
    LoadStoreSpec,
    Locality,
    LookupResult,
    Medium,
    MetricDefinition,
    OffloadingManager,
    OffloadingSpec,
    OffloadKey,
    OffloadPolicy,
    ReqContext,
    ScheduleEndContext,
)
from kvtier.cpu.common import CPULoadStoreSpec
from kvtier.cpu.manager import CPUOffloadingManager
from kvtier.cpu.notice_board import NoticeBoard
from kvtier.hints import HintReader
from kvtier.integrations.vllm import vllm_api
from kvtier.integrations.vllm.manager_state import (
    LoadSources,
    RequestState,
    RequestStates,
    StoreFailures,
    prefix_answers,
)
from kvtier.integrations.vllm.metrics import BLOCK_BYTES, FAILED_LOADS, MetricReporter, VllmMetrics
from kvtier.tiering.manager import TieringOffloadingManager

# A global of this module takes less time to look up than an attribute of an enum class.
_HIT = LookupResult.HIT
_MISS = LookupResult.MISS
_VLLM_HIT = vllm_api.LookupResult.HIT
_VLLM_MISS = vllm_api.LookupResult.MISS
_VLLM_UNDECIDED = {
    LookupResult.HIT_PENDING: vllm_api.LookupResult.HIT_PENDING,
    LookupResult.RETRY: vllm_api.LookupResult.RETRY,
}
_VLLM_POLICIES = {
    OffloadPolicy.BLOCK_LEVEL: vllm_api.BLOCK_LEVEL_POLICY,
    OffloadPolicy.REQUEST_LEVEL: vllm_api.OffloadPolicy.REQUEST_LEVEL,
}
_VLLM_LOCALITIES = {
    None: None,
    Locality.LOCAL: vllm_api.Locality.LOCAL,
    Locality.REMOTE: vllm_api.Locality.REMOTE,
}


class ManagerAdapter(vllm_api.OffloadingManager):
    """A kvtier manager with the interface of vLLM's. Scheduler thread only."""

    def __init__(
        self,
        manager: CPUOffloadingManager | TieringOffloadingManager,
        board: NoticeBoard,
        metrics: Mapping[str, MetricDefinition],
        block_bytes: int,
        hints: HintReader,
        *,
        spec: OffloadingSpec | None = None,
        vllm_metrics: VllmMetrics | None = None,
        has_groups: bool = False,
        check_hashes: Callable[[], bool] | None = None,
    ) -> None:
        """`board`: where the ranks record failed stores. `metrics`: all metrics of the manager and
        of this adapter. `spec`: kvtier's own, for `KVTierConnector`. `has_groups`: the model has
        more than one KV-cache group. `check_hashes`: called from `has_pending_work` and before each
        new request, until it has returned True once. It may raise."""
        self._manager = manager
        self._lookup = manager.lookup  # bound once, for the hot path
        self._tiering = manager if isinstance(manager, TieringOffloadingManager) else None
        primary = manager.primary_tier if isinstance(manager, TieringOffloadingManager) else manager
        self.spec = spec
        self._has_groups = has_groups
        self._names_tiers = spec is not None and spec.config.options.name_tier_in_events
        self._check_hashes = check_hashes
        hints.note_ignored = manager.note_ignored_hints
        self._states = RequestStates(hints)
        self.state_of = self._states.of
        self.expect_salt = self._states.expect_salt
        self._requests: dict[str, RequestState] = {}
        """The requests that have not finished."""
        self._hits: Iterator[OffloadKey] | None = None
        self._others: Iterator[vllm_api.LookupResult] | None = None
        """`_hits` and `_others`: the two fields of the `PrefixAnswers` for the prefix that vLLM is
        looking up. While `_hits` is None, `lookup` asks the manager."""
        self._sources = LoadSources()
        self._store_failures = StoreFailures(board, primary.slots_of)
        self._vllm_metrics = vllm_metrics
        self._metrics = MetricReporter(manager, metrics, {BLOCK_BYTES: block_bytes}, vllm_metrics)

    @property
    def inner(self) -> OffloadingManager:
        """The kvtier manager."""
        return self._manager

    # --- called by KVTierConnector alone ----------------------------------------------------------

    def expect_prompt(self, req_id: str, num_tokens: int) -> None:
        """Note the number of prompt tokens of a new request."""
        self._requests[req_id].context.num_prompt_tokens = num_tokens

    def on_request_queued(
        self, req_id: str, find_blocks: Callable[[], Sequence[OffloadKey]], priority: int
    ) -> None:
        """A new request waits in vLLM's queue. See `OffloadingManager.on_request_queued`."""
        state = self._requests[req_id]
        context = state.load_context
        if context is None:
            return
        if state.namespace is not None:
            find_blocks = partial(_private_blocks, find_blocks, state)
        self._manager.on_request_queued(context, find_blocks, priority=priority)

    def note_prompt(
        self, req_id: str, keys: Sequence[OffloadKey], num_prompt_tokens: int, num_tokens: int
    ) -> None:
        """Report the blocks of a request that is about to end. `num_tokens`: with the answer."""
        state = self._requests.get(req_id)
        if state is not None and state.may_store:
            num_output = num_tokens - num_prompt_tokens
            if state.namespace is not None:
                keys = [state.private_key(key) for key in keys]
            self._manager.note_prompt(keys, state.context, num_prompt_tokens, num_output)

    def note_first_token(self, req_id: str, num_prompt_tokens: int) -> None:
        """Report that a request has produced its first token."""
        state = self._requests.get(req_id)
        if state is not None and not state.context.is_prefetch:
            seconds = time.monotonic() - state.context.created_s
            self._manager.note_first_token(state.context, num_prompt_tokens, seconds)

    def note_match(self, req_id: str, num_on_device: int) -> None:
        """vLLM looks up a request, of which it has this many tokens on the device."""
        state = self._requests.get(req_id)
        if state is not None and not state.has_started:
            state.num_on_device = num_on_device

    def note_start(self, req_id: str, num_prompt_tokens: int, num_loaded_tokens: int) -> None:
        """vLLM starts a request, or starts it again."""
        state = self._requests.get(req_id)
        if state is not None and not state.has_started:
            state.has_started = True
            self._metrics.has_news = True
            self._manager.note_start(
                state.context, num_prompt_tokens, state.num_on_device, num_loaded_tokens
            )

    def give_up_loading(self, req_id: str) -> None:
        """Answer MISS to all further lookups of a request, because a load of it has failed.
        Otherwise it would load the same blocks again, and might never end."""
        state = self._requests.get(req_id)
        if state is not None:
            self._manager.note_failed_load(state.context)
        if state is None or state.load_context is not None:  # count once, even if many ranks fail
            self._metrics.count(FAILED_LOADS, 1)
        if state is not None:
            state.load_context = None

    def begin_prefix(self, keys: list[OffloadKey], req_context: vllm_api.ReqContext) -> None:
        """Prepare the answers for these keys. vLLM then looks the keys up one by one, up to the
        first miss, and `end_prefix` follows."""
        state = self.state_of(req_context)
        context = state.load_context
        if keys and context is not None:
            self._hits, self._others = prefix_answers(self._manager, keys, state, context)

    def end_prefix(self) -> None:
        """Drop the prepared answers: from now on, every lookup asks the manager."""
        self._hits = self._others = None

    # --- called by vLLM's connector ---------------------------------------------------------------

    def lookup(self, key: OffloadKey, req_context: vllm_api.ReqContext) -> vllm_api.LookupResult:
        hits = self._hits
        if hits is not None:
            if next(hits, None) is key:
                return _VLLM_HIT
            if self._others is not None:
                return next(self._others)
            self._hits = None
        try:
            state = req_context.kvtier
        except AttributeError:
            state = self.state_of(req_context)
        context = state.load_context
        if context is None:
            return _VLLM_MISS
        if state.namespace is not None:
            key = state.private_key(key)
        result = self._lookup(key, context)
        if result is _HIT:
            return _VLLM_HIT
        if result is _MISS:
            return _VLLM_MISS
        return _VLLM_UNDECIDED[result]

    def get_load_source(self, key: OffloadKey, req_context: vllm_api.ReqContext) -> Any:
        """vLLM's name for the place from which this block came. vLLM calls this for all blocks of
        a load, one by one, when it prepares the load."""
        source = vllm_api.CacheHitSource
        if self._tiering is None:
            return source.HOST
        sources = self._sources
        if req_context is not sources.req_context:
            sources.req_context = req_context
            sources.tiers = self._tiering.tiers_of(self._context(req_context))
        state = self.state_of(req_context)
        tier = sources.tiers.get(key if state.namespace is None else state.private_key(key))
        if tier is not None and tier.locality is Locality.REMOTE:
            return source.EXTERNAL_UNSPECIFIED
        return source.HOST if tier is None or tier.medium is Medium.CPU else source.DISK

    def prepare_load(
        self, keys: Collection[OffloadKey], req_context: vllm_api.ReqContext
    ) -> object:
        """Prepare a load. If it does not begin at the start of the prompt, also report the prompt's
        blocks as used, unless that was done before."""
        self._metrics.has_news = True
        state = self.state_of(req_context)
        self._report_head(state, keys, req_context)
        return self._manager.prepare_load(state.in_namespace(keys), state.context)

    def complete_load(self, keys: Collection[OffloadKey], req_context: vllm_api.ReqContext) -> None:
        self._metrics.has_news = True
        state = self.state_of(req_context)
        self._manager.complete_load(state.in_namespace(keys), state.context)

    def prepare_store(
        self, keys: Collection[OffloadKey], req_context: vllm_api.ReqContext
    ) -> vllm_api.PrepareStoreOutput | None:
        self._metrics.has_news = True
        state = self.state_of(req_context)
        if not state.may_store:
            return vllm_api.PrepareStoreOutput([], CPULoadStoreSpec(()), [])
        if not state.head_is_reported and vllm_api.begins_prompt(keys, req_context):
            state.head_is_reported = True
        ordered = vllm_api.in_prompt_order(keys, req_context) if self._has_groups else keys
        output = self._manager.prepare_store(state.in_namespace(ordered), state.context)
        if output is None:
            return None
        keys_to_store, spec = output.keys_to_store, output.store_spec
        if state.namespace is not None:
            chosen = set(keys_to_store)
            keys_to_store = [key for key in ordered if state.private_key(key) in chosen]
        if self._has_groups:
            # vLLM gives the keys group by group, and expects the answer in the same order.
            slots = dict(zip(keys_to_store, _slots_of(spec), strict=True))
            keys_to_store = [key for key in keys if key in slots]
            spec = CPULoadStoreSpec([slots[key] for key in keys_to_store])
        self._store_failures.begin(len(keys_to_store))
        if self._vllm_metrics is not None:
            self._vllm_metrics.note_allocation(len(keys_to_store))
        return vllm_api.PrepareStoreOutput(keys_to_store, spec, output.evicted_keys)

    def complete_store(
        self,
        keys: Collection[OffloadKey],
        req_context: vllm_api.ReqContext,
        success: bool = True,
    ) -> None:
        self._metrics.has_news = True
        state = self.state_of(req_context)
        context, keys = state.context, state.in_namespace(keys)
        failed = self._store_failures.end(keys, success)
        if failed:
            self._manager.complete_store(failed, context, False)
            keys = [key for key in keys if key not in failed]
            if not keys:
                return
        self._manager.complete_store(keys, context, success)

    def touch(self, keys: Collection[OffloadKey], req_context: vllm_api.ReqContext) -> None:
        state = self.state_of(req_context)
        self._manager.touch(state.in_namespace(keys), state.context)

    def on_new_request(self, req_context: vllm_api.ReqContext) -> vllm_api.RequestOffloadingContext:
        self._require_shared_hashes()
        state = self._requests[req_context.req_id] = self._states.new(req_context)
        may_load, may_store = self._manager.serves(req_context.req_id)
        state.context.may_load, state.context.is_served = may_load, may_load or may_store
        if not may_load:
            state.load_context = None
        state.may_store = state.may_store and may_store
        answer = self._manager.on_new_request(state.context)
        return vllm_api.RequestOffloadingContext(policy=_VLLM_POLICIES[answer.policy])

    def on_request_finished(self, req_context: vllm_api.ReqContext) -> None:
        """Report the request's blocks as used, unless that was done earlier or this release of vLLM
        does it by calling `touch`. Then report the request's end."""
        self._metrics.has_news = True
        state = self.state_of(req_context)
        self._requests.pop(req_context.req_id, None)
        self._report_head(state, (), req_context)
        self._manager.on_request_finished(state.context)

    def on_schedule_end(self, context: vllm_api.ScheduleEndContext) -> None:
        self._manager.on_schedule_end(
            ScheduleEndContext(context.new_req_ids, context.preempted_req_ids)
        )
        if self._tiering is not None:
            self._metrics.note_tier_jobs(self._tiering.job_count)

    def has_pending_work(self) -> bool:
        # Check here, too, because vLLM's server calls this right after the start of the engine,
        # before the first request.
        self._require_shared_hashes()
        if self._manager.has_pending_work():
            return True
        # Request one more step, so that vLLM's metrics show the end of the last jobs.
        return self._tiering is not None and self._metrics.lacks(self._tiering.job_count)

    def take_events(self) -> Iterable[vllm_api.OffloadingEvent]:
        """Only if the connector is vLLM's own: `KVTierConnector` takes the manager's events."""
        return [
            vllm_api.OffloadingEvent(
                keys=event.keys,
                medium=vllm_api.MEDIA[event.medium],
                removed=event.removed,
                locality=_VLLM_LOCALITIES[event.locality],
                **vllm_api.owner_in_event(event.tier if self._names_tiers else None),
            )
            for event in self._manager.take_events()
        ]

    def reset_cache(self) -> None:
        self._metrics.has_news = True
        self._store_failures.reset()
        self._manager.reset_cache()

    def get_stats(self) -> vllm_api.OffloadingConnectorStats | None:
        return self._metrics.report()

    def shutdown(self) -> None:
        self._manager.shutdown()
        self._store_failures.close()

    # --- shared by these calls --------------------------------------------------------------------

    def _context(self, req_context: vllm_api.ReqContext) -> ReqContext:
        return self.state_of(req_context).context

    def _report_head(
        self,
        state: RequestState,
        keys: Collection[OffloadKey],
        req_context: vllm_api.ReqContext,
    ) -> None:
        """Report all blocks of the request as used, once for each request. Does nothing if `keys`,
        the blocks that the request uses now, begin the prompt."""
        if not state.head_is_reported:
            head = state.head_to_report(keys, req_context)
            if head:
                self._manager.touch(state.in_namespace(head), state.context)

    def _require_shared_hashes(self) -> None:
        if self._check_hashes is not None and self._check_hashes():
            self._check_hashes = None


def _private_blocks(
    find_blocks: Callable[[], Sequence[OffloadKey]], state: RequestState
) -> list[OffloadKey]:
    return [state.private_key(key) for key in find_blocks()]


def _slots_of(spec: LoadStoreSpec) -> list[int]:
    assert isinstance(spec, CPULoadStoreSpec)
    slots: list[int] = spec.block_ids.tolist()
    return slots
