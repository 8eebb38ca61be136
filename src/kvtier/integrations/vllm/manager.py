"""vLLM's scheduler on one side, a kvtier manager on the other: types are mapped, nothing else.

Called by vLLM's connector on the scheduler thread. `lookup` is called for every block of every
waiting request at every step, so it does as little as possible.
"""

from __future__ import annotations

import logging
from collections.abc import Collection, Iterable, Sequence

from kvtier.base import (
    LoadStoreSpec,
    Locality,
    LookupResult,
    Medium,
    OffloadingManager,
    OffloadKey,
    OffloadPolicy,
    ReqContext,
    ScheduleEndContext,
    TierFilter,
    TierMatcher,
)
from kvtier.cpu.common import CPULoadStoreSpec
from kvtier.integrations.vllm import vllm_api
from kvtier.integrations.vllm.block_hashes import tell_about

logger = logging.getLogger(__name__)

# Names of this module are cheaper to reach than attributes of an enum class.
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
_VLLM_MEDIA = {Medium.CPU: vllm_api.Medium.CPU, Medium.STORAGE: vllm_api.Medium.STORAGE}
_VLLM_LOCALITIES = {
    None: None,
    Locality.LOCAL: vllm_api.Locality.LOCAL,
    Locality.REMOTE: vllm_api.Locality.REMOTE,
}


def tier_filter_from_vllm(tier_filter: vllm_api.TierFilter) -> TierFilter:
    """The same filter in kvtier's terms."""
    if tier_filter is vllm_api.TierFilter.ALL:
        return TierFilter.ALL
    return TierFilter(
        tuple(
            TierMatcher(
                None if matcher.medium is None else Medium(matcher.medium.value),
                None if matcher.locality is None else Locality(matcher.locality.value),
            )
            for matcher in tier_filter.matchers
        )
    )


def _slots_of(spec: LoadStoreSpec) -> list[int]:
    assert isinstance(spec, CPULoadStoreSpec)
    slots: list[int] = spec.block_ids.tolist()
    return slots


class ManagerAdapter(vllm_api.OffloadingManager):
    """A kvtier manager, as vLLM's connector wants to see it. Scheduler thread only.

    One kvtier `ReqContext` is made per request, in `on_new_request`, and kept in the scratch space
    of vLLM's own.
    """

    def __init__(
        self,
        manager: OffloadingManager,
        metric_names: Collection[str] = (),
        *,
        has_groups: bool = False,
        lasting_tiers: Sequence[str] = (),
    ) -> None:
        """`has_groups`: the model has more than one KV-cache group. `lasting_tiers`: the types of
        those in which other processes look for this one's blocks."""
        self._manager = manager
        self._untold_tiers = list(lasting_tiers)
        self._has_groups = has_groups
        self._vllm_names = {name: vllm_api.METRIC_PREFIX + name for name in metric_names}
        self._undeclared: set[str] = set()
        # The hot path, without the attribute look-ups.
        self._lookup = manager.lookup

    @property
    def inner(self) -> OffloadingManager:
        """The kvtier manager."""
        return self._manager

    def _adopt(self, req_context: vllm_api.ReqContext) -> ReqContext:
        """Make kvtier's context for a request, and leave it where later calls find it."""
        context = ReqContext(
            req_context.req_id,
            req_context.kv_transfer_params,
            tier_filter_from_vllm(req_context.load_tier_filter),
        )
        req_context.set_state(context)
        return context

    def _context(self, req_context: vllm_api.ReqContext) -> ReqContext:
        return req_context.get_state(ReqContext) or self._adopt(req_context)

    def lookup(self, key: OffloadKey, req_context: vllm_api.ReqContext) -> vllm_api.LookupResult:
        context = req_context.get_state(ReqContext) or self._adopt(req_context)
        result = self._lookup(key, context)
        if result is _HIT:
            return _VLLM_HIT
        if result is _MISS:
            return _VLLM_MISS
        return _VLLM_UNDECIDED[result]

    def get_load_source(
        self, key: OffloadKey, req_context: vllm_api.ReqContext
    ) -> vllm_api.CacheHitSource:
        """Where a block that was a hit comes from: host memory, whatever tier it was in before."""
        return vllm_api.CacheHitSource.HOST

    def prepare_load(
        self, keys: Collection[OffloadKey], req_context: vllm_api.ReqContext
    ) -> object:
        """Load, and report the whole prompt as used.

        The head of it may be on the device, where vLLM finds it without asking. Not to be told
        would let it grow old in host memory, and leave before its tail.
        """
        context = self._context(req_context)
        self._manager.touch(vllm_api.keys_in_prompt_order(req_context), context)
        return self._manager.prepare_load(keys, context)

    def complete_load(self, keys: Collection[OffloadKey], req_context: vllm_api.ReqContext) -> None:
        self._manager.complete_load(keys, self._context(req_context))

    def prepare_store(
        self, keys: Collection[OffloadKey], req_context: vllm_api.ReqContext
    ) -> vllm_api.PrepareStoreOutput | None:
        context = self._context(req_context)
        ordered = vllm_api.in_prompt_order(keys, req_context) if self._has_groups else keys
        output = self._manager.prepare_store(ordered, context)
        if output is None:
            return None
        keys_to_store, spec = output.keys_to_store, output.store_spec
        if self._has_groups:
            # vLLM offers group by group, and wants the answer so.
            slots = dict(zip(keys_to_store, _slots_of(spec), strict=True))
            keys_to_store = [key for key in keys if key in slots]
            spec = CPULoadStoreSpec([slots[key] for key in keys_to_store])
        return vllm_api.PrepareStoreOutput(keys_to_store, spec, output.evicted_keys)

    def complete_store(
        self,
        keys: Collection[OffloadKey],
        req_context: vllm_api.ReqContext,
        success: bool = True,
    ) -> None:
        self._manager.complete_store(keys, self._context(req_context), success)

    def touch(self, keys: Collection[OffloadKey], req_context: vllm_api.ReqContext) -> None:
        self._manager.touch(keys, self._context(req_context))

    def _tell_about_hashes(self) -> None:
        """Say once which other processes can find what this one stores. vLLM makes the root of its
        hashes after the manager, and asks a server's engine for pending work right after that."""
        root = vllm_api.hash_root()
        if root is not None:
            tell_about(root, self._untold_tiers)
            self._untold_tiers.clear()

    def on_new_request(self, req_context: vllm_api.ReqContext) -> vllm_api.RequestOffloadingContext:
        if self._untold_tiers:
            self._tell_about_hashes()
        answer = self._manager.on_new_request(self._adopt(req_context))
        return vllm_api.RequestOffloadingContext(policy=_VLLM_POLICIES[answer.policy])

    def on_request_finished(self, req_context: vllm_api.ReqContext) -> None:
        """Report what the request used, then that it has ended.

        vLLM does not touch the blocks a request found on the device. Without this, the head of
        a prefix that is always found there would grow old in host memory, leave it before its
        tail, and make the tail useless.
        """
        context = self._context(req_context)
        keys = vllm_api.keys_in_prompt_order(req_context)
        if keys:
            self._manager.touch(keys, context)
        self._manager.on_request_finished(context)

    def on_schedule_end(self, context: vllm_api.ScheduleEndContext) -> None:
        self._manager.on_schedule_end(
            ScheduleEndContext(context.new_req_ids, context.preempted_req_ids)
        )

    def has_pending_work(self) -> bool:
        if self._untold_tiers:
            self._tell_about_hashes()
        return self._manager.has_pending_work()

    def take_events(self) -> Iterable[vllm_api.OffloadingEvent]:
        return [
            vllm_api.OffloadingEvent(
                keys=event.keys,
                medium=_VLLM_MEDIA[event.medium],
                removed=event.removed,
                locality=_VLLM_LOCALITIES[event.locality],
            )
            for event in self._manager.take_events()
        ]

    def reset_cache(self) -> None:
        self._manager.reset_cache()

    def get_stats(self) -> vllm_api.OffloadingConnectorStats | None:
        figures = self._manager.get_stats()
        if figures is None:
            return None
        stats = vllm_api.OffloadingConnectorStats()
        for name, increase in figures.counters.items():
            if vllm_name := self._vllm_name(name):
                stats.increase_counter(vllm_name, increase)
        for name, value in figures.gauges.items():
            if vllm_name := self._vllm_name(name):
                stats.set_gauge(vllm_name, value)
        for name, observations in figures.histograms.items():
            if vllm_name := self._vllm_name(name):
                for observation in observations:
                    stats.observe_histogram(vllm_name, observation)
        return stats

    def _vllm_name(self, name: str) -> str | None:
        """What vLLM knows this figure as. It ends the engine over one that it does not know."""
        vllm_name = self._vllm_names.get(name)
        if vllm_name is None and name not in self._undeclared:
            self._undeclared.add(name)
            logger.warning("figure %r is reported but not declared: vLLM will not see it", name)
        return vllm_name

    def shutdown(self) -> None:
        self._manager.shutdown()
