"""vLLM's scheduler on one side, a kvtier manager on the other: types are mapped, nothing else.

Called by vLLM's connector on the scheduler thread. `lookup` is called for every block of every
waiting request at every step, so it does as little as possible.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from itertools import chain, repeat
from typing import Any

from kvtier.base import (
    LoadStoreSpec,
    Locality,
    LookupResult,
    Medium,
    MetricDefinition,
    OffloadingManager,
    OffloadKey,
    OffloadPolicy,
    ReqContext,
    ScheduleEndContext,
)
from kvtier.connector.hints import parse_hints
from kvtier.cpu.common import CPULoadStoreSpec
from kvtier.cpu.manager import CPUOffloadingManager
from kvtier.cpu.notice_board import NoticeBoard
from kvtier.integrations.vllm import differences, vllm_api
from kvtier.integrations.vllm.figures import FigureReporter
from kvtier.integrations.vllm.metrics import BLOCK_BYTES, FAILED_LOADS
from kvtier.tiering.base import SecondaryTierManager
from kvtier.tiering.jobs import JobCount
from kvtier.tiering.manager import TieringOffloadingManager

logger = logging.getLogger(__name__)

# Names of this module are cheaper to reach than attributes of an enum class.
_HIT = LookupResult.HIT
_MISS = LookupResult.MISS
_VLLM_HIT = vllm_api.LookupResult.HIT
_VLLM_MISS = vllm_api.LookupResult.MISS
_VLLM_PENDING = vllm_api.LookupResult.HIT_PENDING
_VLLM_UNDECIDED = {
    LookupResult.HIT_PENDING: vllm_api.LookupResult.HIT_PENDING,
    LookupResult.RETRY: vllm_api.LookupResult.RETRY,
}
_VLLM_POLICIES = {
    OffloadPolicy.BLOCK_LEVEL: differences.BLOCK_LEVEL_POLICY,
    OffloadPolicy.REQUEST_LEVEL: vllm_api.OffloadPolicy.REQUEST_LEVEL,
}
_VLLM_LOCALITIES = {
    None: None,
    Locality.LOCAL: vllm_api.Locality.LOCAL,
    Locality.REMOTE: vllm_api.Locality.REMOTE,
}


class _Adopted:
    """A request of vLLM's, in kvtier's terms. vLLM's own context carries it as `kvtier`."""

    __slots__ = ("context", "knows_head", "may_load", "may_store")

    def __init__(self, context: ReqContext, *, skips: bool) -> None:
        self.context = context
        self.may_load = not skips
        self.may_store = not skips
        self.knows_head = differences.REPORTS_USE
        """Whether kvtier was told that the first blocks of the prompt are used. Those on the device
        vLLM finds without asking. Not to be told would let them grow old in host memory, and leave
        before the blocks behind them, which are of no use without."""


def _slots_of(spec: LoadStoreSpec) -> list[int]:
    assert isinstance(spec, CPULoadStoreSpec)
    slots: list[int] = spec.block_ids.tolist()
    return slots


class ManagerAdapter(vllm_api.OffloadingManager):
    """A kvtier manager, as vLLM's connector wants to see it. Scheduler thread only.

    One kvtier `ReqContext` is made per request, in `on_new_request`.
    """

    def __init__(
        self,
        manager: CPUOffloadingManager | TieringOffloadingManager,
        board: NoticeBoard,
        metrics: Mapping[str, MetricDefinition],
        block_bytes: int,
        *,
        has_groups: bool = False,
        check_hashes: Callable[[], bool] | None = None,
    ) -> None:
        """`board`: where ranks tell which stores have failed. `metrics`: all figures that
        the manager and this adapter report. `has_groups`: the model has more than one KV-cache
        group. `check_hashes`: called until it answers True, before the first request is served;
        may raise."""
        self._manager = manager
        self._tiering = manager if isinstance(manager, TieringOffloadingManager) else None
        primary = manager.primary_tier if isinstance(manager, TieringOffloadingManager) else manager
        self._slots_of = primary.slots_of
        self._board = board
        self._figures = FigureReporter(manager, metrics, {BLOCK_BYTES: block_bytes})
        self._tier_jobs = JobCount(0, 0, 0)
        """As of the last figures."""
        self._num_storing = 0
        """Blocks that are being stored, but for those from before a reset."""
        self._sources_of: vllm_api.ReqContext | None = None
        self._sources: Mapping[OffloadKey, SecondaryTierManager] = {}
        self._check_hashes = check_hashes
        self._has_groups = has_groups
        self._adopted: dict[str, _Adopted] = {}
        """Of the requests that have not finished."""
        # Of the prefix that is being looked up, if one is:
        self._hits: Iterator[OffloadKey] | None = None
        """Blocks that are known to be readable, in the order in which they are asked for."""
        self._no_hits: Iterator[vllm_api.LookupResult] | None = None
        """What to say instead, if there is nothing to load now."""
        # The hot path, without the attribute look-ups.
        self._lookup = manager.lookup

    @property
    def inner(self) -> OffloadingManager:
        """The kvtier manager."""
        return self._manager

    def _adopt(self, req_context: vllm_api.ReqContext) -> _Adopted:
        """Make kvtier's context for a request, and leave it where later calls find it."""
        # Not vLLM's own reading of `kv_load_tiers`: where no entry is valid, it allows every tier.
        hints = parse_hints(req_context.kv_transfer_params)
        context = ReqContext(req_context.req_id, req_context.kv_transfer_params, hints.load_tiers)
        req_context.kvtier = adopted = _Adopted(context, skips=hints.skip)
        return adopted

    def _context(self, req_context: vllm_api.ReqContext) -> ReqContext:
        return self._adopted_of(req_context).context

    def _adopted_of(self, req_context: vllm_api.ReqContext) -> _Adopted:
        adopted: _Adopted | None = getattr(req_context, "kvtier", None)
        return adopted or self._adopt(req_context)

    def expect_prompt(self, req_id: str, num_tokens: int) -> None:
        """The request, which is new, has so many prompt tokens. By the connector alone."""
        self._adopted[req_id].context.num_prompt_tokens = num_tokens

    def give_up_loading(self, req_id: str) -> None:
        """A load of this request has failed: it is to compute. By the connector alone.

        It would be offered the same blocks again, and might never end.
        """
        adopted = self._adopted.get(req_id)
        if adopted is None or adopted.may_load:  # once for a request, however many ranks fail
            self._figures.count(FAILED_LOADS, 1)
        if adopted is not None:
            adopted.may_load = False

    def begin_prefix(self, keys: list[OffloadKey], req_context: vllm_api.ReqContext) -> None:
        """A request is about to look up these keys, one by one and up to its first miss, until
        `end_prefix`. By the connector alone."""
        adopted = self._adopted_of(req_context)
        if not keys or not adopted.may_load:
            return
        # Most prompts are new: then the first key says it all.
        if self._lookup(keys[0], adopted.context) is _MISS:
            self._no_hits = repeat(_VLLM_MISS)
            return
        num_hits, is_final = self._manager.lookup_prefix(keys, adopted.context)
        if is_final:
            self._hits = iter(keys[:num_hits])
        else:
            # The first answer has the request wait, and the second ends the loop.
            self._no_hits = chain((_VLLM_PENDING,), repeat(_VLLM_MISS))

    def end_prefix(self) -> None:
        """Every lookup stands for itself again."""
        self._hits = self._no_hits = None

    def lookup(self, key: OffloadKey, req_context: vllm_api.ReqContext) -> vllm_api.LookupResult:
        if self._hits is not None:
            if next(self._hits, None) is key:
                return _VLLM_HIT
            self._hits = None
        elif self._no_hits is not None:
            return next(self._no_hits)
        try:
            adopted = req_context.kvtier
        except AttributeError:
            adopted = self._adopt(req_context)
        if not adopted.may_load:
            return _VLLM_MISS
        result = self._lookup(key, adopted.context)
        if result is _HIT:
            return _VLLM_HIT
        if result is _MISS:
            return _VLLM_MISS
        return _VLLM_UNDECIDED[result]

    def get_load_source(self, key: OffloadKey, req_context: vllm_api.ReqContext) -> Any:
        """Where a block that was a hit has come from for this request. For one block after the
        other, when their load is prepared."""
        source = differences.CacheHitSource
        if self._tiering is None:
            return source.HOST
        if req_context is not self._sources_of:
            self._sources_of = req_context
            self._sources = self._tiering.tiers_of(self._context(req_context))
        tier = self._sources.get(key)
        if tier is not None and tier.locality is Locality.REMOTE:
            return source.EXTERNAL_UNSPECIFIED
        return source.HOST if tier is None or tier.medium is Medium.CPU else source.DISK

    def prepare_load(
        self, keys: Collection[OffloadKey], req_context: vllm_api.ReqContext
    ) -> object:
        """Load, and report as used what comes before that in the prompt."""
        self._figures.is_quiet = False
        adopted = self._adopted_of(req_context)
        if not adopted.knows_head:
            self._tell_of_head(keys, req_context, adopted)
        return self._manager.prepare_load(keys, adopted.context)

    def _tell_of_head(
        self,
        keys: Collection[OffloadKey],
        req_context: vllm_api.ReqContext,
        adopted: _Adopted,
    ) -> None:
        """Report the whole prompt as used, unless these keys, which are, begin it."""
        adopted.knows_head = True
        if not differences.begins_prompt(keys, req_context):
            in_order = differences.keys_in_prompt_order(req_context)
            if in_order:
                self._manager.touch(in_order, adopted.context)

    def complete_load(self, keys: Collection[OffloadKey], req_context: vllm_api.ReqContext) -> None:
        self._figures.is_quiet = False
        self._manager.complete_load(keys, self._context(req_context))

    def prepare_store(
        self, keys: Collection[OffloadKey], req_context: vllm_api.ReqContext
    ) -> vllm_api.PrepareStoreOutput | None:
        self._figures.is_quiet = False
        adopted = self._adopted_of(req_context)
        if not adopted.may_store:
            return vllm_api.PrepareStoreOutput([], CPULoadStoreSpec(()), [])
        if not adopted.knows_head and differences.begins_prompt(keys, req_context):
            adopted.knows_head = True
        ordered = differences.in_prompt_order(keys, req_context) if self._has_groups else keys
        output = self._manager.prepare_store(ordered, adopted.context)
        if output is None:
            return None
        keys_to_store, spec = output.keys_to_store, output.store_spec
        if self._has_groups:
            # vLLM offers group by group, and wants the answer so.
            slots = dict(zip(keys_to_store, _slots_of(spec), strict=True))
            keys_to_store = [key for key in keys if key in slots]
            spec = CPULoadStoreSpec([slots[key] for key in keys_to_store])
        self._num_storing += len(keys_to_store)
        return vllm_api.PrepareStoreOutput(keys_to_store, spec, output.evicted_keys)

    def complete_store(
        self,
        keys: Collection[OffloadKey],
        req_context: vllm_api.ReqContext,
        success: bool = True,
    ) -> None:
        self._figures.is_quiet = False
        self._num_storing -= len(keys)
        context = self._context(req_context)
        if success and self._board.has_news():
            keys = self._without_failed(keys, context)
            if not keys:
                return
        self._manager.complete_store(keys, context, success)

    def _without_failed(
        self, keys: Collection[OffloadKey], context: ReqContext
    ) -> Collection[OffloadKey]:
        """Drop those of these blocks whose store has failed on a rank; the others."""
        slots = self._slots_of(keys)
        poisoned = self._board.take_poisoned(slots.values())
        if not self._num_storing:
            self._board.forget()  # stores from before a reset, whose end vLLM does not tell of
        failed = {key for key, slot in slots.items() if slot in poisoned}
        if not failed:
            return keys
        self._manager.complete_store(failed, context, False)
        return [key for key in keys if key not in failed]

    def touch(self, keys: Collection[OffloadKey], req_context: vllm_api.ReqContext) -> None:
        self._manager.touch(keys, self._context(req_context))

    def on_new_request(self, req_context: vllm_api.ReqContext) -> vllm_api.RequestOffloadingContext:
        if self._check_hashes is not None and self._check_hashes():
            self._check_hashes = None
        adopted = self._adopted[req_context.req_id] = self._adopt(req_context)
        answer = self._manager.on_new_request(adopted.context)
        return vllm_api.RequestOffloadingContext(policy=_VLLM_POLICIES[answer.policy])

    def on_request_finished(self, req_context: vllm_api.ReqContext) -> None:
        """Report what the request used, unless that is known, then that it has ended."""
        self._figures.is_quiet = False
        adopted = self._adopted_of(req_context)
        self._adopted.pop(req_context.req_id, None)
        if not adopted.knows_head:
            self._tell_of_head((), req_context, adopted)
        self._manager.on_request_finished(adopted.context)

    def on_schedule_end(self, context: vllm_api.ScheduleEndContext) -> None:
        self._manager.on_schedule_end(
            ScheduleEndContext(context.new_req_ids, context.preempted_req_ids)
        )
        if self._tiering is not None:
            jobs = self._tiering.job_count
            if jobs != self._tier_jobs:
                self._tier_jobs = jobs
                self._figures.is_quiet = False
                self._figures.may_change = jobs.num_open > 0

    def has_pending_work(self) -> bool:
        # A server's engine is asked this right after its start, before there are requests.
        if self._check_hashes is not None and self._check_hashes():
            self._check_hashes = None
        if self._manager.has_pending_work():
            return True
        # One more step, and vLLM is told what has become of the last jobs.
        return self._tiering is not None and self._tiering.job_count != self._tier_jobs

    def take_events(self) -> Iterable[vllm_api.OffloadingEvent]:
        return [
            vllm_api.OffloadingEvent(
                keys=event.keys,
                medium=differences.MEDIA[event.medium],
                removed=event.removed,
                locality=_VLLM_LOCALITIES[event.locality],
                **differences.owner_in_event(event.tier),
            )
            for event in self._manager.take_events()
        ]

    def reset_cache(self) -> None:
        self._figures.is_quiet = False
        self._num_storing = 0
        self._manager.reset_cache()

    def get_stats(self) -> vllm_api.OffloadingConnectorStats | None:
        return self._figures.report()

    def shutdown(self) -> None:
        self._manager.shutdown()
        self._board.close()
