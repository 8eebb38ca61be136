"""The manager of the primary tier: answers an engine's lookups, loads and stores."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from operator import attrgetter
from typing import TYPE_CHECKING, cast

from kvtier.admission import ReuseFilter
from kvtier.base import (
    LoadStoreSpec,
    LookupResult,
    Medium,
    OffloadingEvent,
    OffloadingStats,
    PrefixLookup,
    PrepareStoreOutput,
    RequestOffloadingContext,
)
from kvtier.cpu.common import CPULoadStoreSpec
from kvtier.cpu.policies.factory import CachePolicyFactory
from kvtier.cpu.policies.tenants import new_policy
from kvtier.cpu.prompt_log import PromptWatching
from kvtier.cpu.prompt_sources import PromptSources
from kvtier.cpu.slots import SlotTable
from kvtier.cpu.uses import RequestUse, UseLog
from kvtier.misuse import MisuseLog
from kvtier.observe.journal import HOST_PLACE, What

if TYPE_CHECKING:
    from kvtier.base import OffloadKey, ReqContext, ScheduleEndContext
    from kvtier.cpu.policies.base import BlockStatus
    from kvtier.cpu.policies.tenants import Tenancy

_HIT = LookupResult.HIT
_MISS = LookupResult.MISS
_HIT_PENDING = LookupResult.HIT_PENDING

_generation_of = attrgetter("generation")

_FIRST_RUN = 16
"""Keys in the first batch of a prompt's lookup. Most lookups end with an early miss."""

_COUNTERS = {
    What.EVICTED: "kvtier_cpu_evicted_blocks",
    What.FILTERED: "kvtier_cpu_filtered_blocks",
    What.UNWANTED: "kvtier_cpu_declined_blocks",
    What.TOO_MANY: "kvtier_cpu_truncated_blocks",
    What.STALE: "kvtier_cpu_stale_blocks",
    What.COPY_FAILED: "kvtier_cpu_failed_stores",
}

NO_BLOCK = -1
"""Slot number of a missing block in a load spec. A worker fails a transfer that has it."""


class CPUOffloadingManager(PromptWatching):
    """Stores and loads blocks in slots of host memory. Scheduler thread only.

    `slots` keeps the state of every slot; `uses` records which requests use which blocks. No call
    waits, and each takes constant time per block. A request uses a block when a lookup finds it,
    when it is loaded or touched, and when it is offered for storing but is stored already. These
    uses count once per (request, key). When a request finishes, its blocks become the most recent.

    Blocks that were computed before a `reset_cache` must not be stored after it. So a request that
    is running at a reset stores nothing until it is preempted and computes its blocks again.
    """

    def __init__(
        self,
        num_blocks: int,
        cache_policy: str = "lru",
        cache_policy_module_path: str | None = None,
        enable_events: bool = False,
        store_threshold: int = 1,
        max_tracker_size: int = 64_000,
        *,
        strict: bool | None = None,
        tenancy: Tenancy | None = None,
    ) -> None:
        """Make a manager of `num_blocks` slots, numbered from 0.

        `tenancy`: what each tenant may have of them; None: there are no tenants. `strict`: raise
        when the caller breaks the contract. None: only if KVTIER_STRICT is set.
        """
        super().__init__()
        _require_whole("num_blocks", num_blocks, 1)
        _require_whole("store_threshold", store_threshold, 0)
        _require_whole("max_tracker_size", max_tracker_size, 1)
        self.medium = Medium.CPU
        self.sources = PromptSources()
        self.num_blocks = num_blocks
        self.misuse = MisuseLog("primary tier", strict)
        policy_cls = CachePolicyFactory.get_cache_policy_cls(cache_policy, cache_policy_module_path)
        self.slots = SlotTable(num_blocks, new_policy(policy_cls, num_blocks, tenancy))
        self.reserve = self.slots.reserve
        """Slots kept out of transfer, so that a later store can end a quarantine."""
        counts = store_threshold > 1
        self._filter = ReuseFilter(store_threshold, max_tracker_size) if counts else None
        self.uses = UseLog(self.slots, self._filter)
        self._get = self.slots.get
        self._events: list[OffloadingEvent] | None = [] if enable_events else None
        self.media = (self.medium,) if enable_events else ()
        self._counters: dict[str, float] = {}

    # --- requests -------------------------------------------------------------------------------

    def on_new_request(self, req_context: ReqContext) -> RequestOffloadingContext:
        self.uses.announce(req_context)
        self.journal.begin(req_context)
        return RequestOffloadingContext()

    def on_request_finished(self, req_context: ReqContext) -> None:
        self.uses.finish(req_context)
        self.journal.end(req_context)

    def on_schedule_end(self, context: ScheduleEndContext) -> None:
        self.uses.end_step(context.new_req_ids, context.preempted_req_ids)
        if self.slots.quarantine:
            self.slots.end_step_in_quarantine()
        self.observe_step()

    def touch(self, keys: Collection[OffloadKey], req_context: ReqContext) -> None:
        keys = list(keys)
        use = self.uses.of(req_context)
        if self._filter is not None:
            self._filter.count(keys, use.brought)
        self.uses.touch(keys, use)

    # --- lookups --------------------------------------------------------------------------------

    def lookup(self, key: OffloadKey, req_context: ReqContext) -> LookupResult:
        if self._filter is not None:
            self._filter.count((key,), self.uses.of(req_context).brought)
        block = self._get(key)
        if block is None:
            return _MISS
        uses = self.uses
        use = uses.last if req_context is uses.last_context else uses.of(req_context)
        if use.keys.get(key) != block.generation:
            uses.note(block, use)
        return _HIT if block.ref_cnt >= 0 else _HIT_PENDING

    def lookup_prefix(self, keys: Iterable[OffloadKey], req_context: ReqContext) -> PrefixLookup:
        keys = list(keys)
        if self._filter is not None:
            return self.answered(keys, super().lookup_prefix(keys, req_context), req_context)
        num_hits, is_final, size = 0, True, _FIRST_RUN
        while num_hits < len(keys):
            run = keys[num_hits : num_hits + size]
            found = list(map(self._get, run))
            num_asked = len(run)
            if not all(found):
                del found[found.index(None) :], run[len(found) :]
            blocks = cast("list[BlockStatus]", found)
            is_final = self.use_run(run, blocks, req_context) and is_final
            num_hits += len(run)
            if len(run) < num_asked:
                break
            size *= 4
        return self.answered(keys, PrefixLookup(num_hits, is_final), req_context)

    def use_run(
        self, keys: Sequence[OffloadKey], blocks: list[BlockStatus], req_context: ReqContext
    ) -> bool:
        """Note that a request uses blocks, in prompt order. Returns True if all are readable."""
        if keys:
            generations = list(map(_generation_of, blocks))
            self.uses.note_run(keys, generations, self.uses.of(req_context))
        return not self.slots.num_writing or all(block.ref_cnt >= 0 for block in blocks)

    # --- loads ----------------------------------------------------------------------------------

    def prepare_load(self, keys: Collection[OffloadKey], req_context: ReqContext) -> LoadStoreSpec:
        use = self.uses.of(req_context)
        keys = list(keys)
        once = dict.fromkeys(keys, 1)
        blocks = list(map(self._get, once))
        num_unreadable = self.slots.pin(blocks)
        if num_unreadable:
            readable = [block for block in blocks if block is not None and block.is_ready]
            once = dict.fromkeys([block.key for block in readable], 1)
        else:
            readable = cast("list[BlockStatus]", blocks)
        self.uses.note_load(once, readable, use)
        if num_unreadable or len(once) < len(keys):
            return self._slots_one_by_one(keys, once, use)
        return CPULoadStoreSpec([block.block_id for block in readable])

    def _slots_one_by_one(
        self, keys: list[OffloadKey], loading: dict[OffloadKey, int], use: RequestUse
    ) -> LoadStoreSpec:
        """The spec of a load with unreadable blocks (not in `loading`) or a key given twice."""
        missing = [key for key in keys if key not in loading]
        self._record_misuse("load of an unreadable block", missing, use, "load only after a HIT")
        found = (self._get(key) if key in loading else None for key in keys)
        return CPULoadStoreSpec([NO_BLOCK if block is None else block.block_id for block in found])

    def complete_load(self, keys: Collection[OffloadKey], req_context: ReqContext) -> None:
        use = self.uses.of(req_context)
        ended, stray = use.end_loads(keys, self._get)
        self.slots.unpin(ended)
        if ended:
            self._count("kvtier_cpu_loaded_blocks", len(ended))
            self.slots.end_quarantine()
        self.uses.drop_if_done(use)
        self._record_misuse("stray completion of a load", stray, use, "complete each load once")

    # --- stores ---------------------------------------------------------------------------------

    def prepare_store(
        self, keys: Collection[OffloadKey], req_context: ReqContext
    ) -> PrepareStoreOutput | None:
        keys = list(keys)
        use = self.uses.of(req_context)
        if self._filter is not None:
            self._filter.count(keys, use.brought)
        if (use.is_stale or use.first_withheld is not None) and use.withholds(keys):
            _enter(self, What.STALE, keys, use)
            return PrepareStoreOutput([], CPULoadStoreSpec(()), [])
        if use.is_known_to_have(keys, self.slots.generation):
            return PrepareStoreOutput([], CPULoadStoreSpec(()), [])
        offered = dict.fromkeys(keys, 0)
        new, present = self.slots.split(offered)
        comes_last = use.bring(offered)
        if present:
            self.uses.note_all(present, use)
            comes_last = False
        new = self._admitted(new, use)
        num_storable = self._num_storable(len(new), use)
        if num_storable is not None and num_storable < len(new):
            _enter(self, What.TOO_MANY, new[num_storable:], use)
            del new[num_storable:]
        if not new:
            return PrepareStoreOutput([], CPULoadStoreSpec(()), [])
        placed = None if num_storable is None else self._place(new, use, comes_last, use)
        if placed is None:
            self._count("kvtier_cpu_refused_blocks", len(new))
            self.journal.note_refused(new, req_context)
            return None
        blocks, evicted = placed
        use.num_writing += len(blocks)
        self.uses.remember(use)
        return PrepareStoreOutput(
            new, CPULoadStoreSpec([block.block_id for block in blocks]), evicted
        )

    def complete_store(
        self, keys: Collection[OffloadKey], req_context: ReqContext, success: bool = True
    ) -> None:
        self.finish_store(keys, req_context, success)

    def finish_store(
        self, keys: Collection[OffloadKey], req_context: ReqContext, success: bool
    ) -> list[BlockStatus]:
        """Do `complete_store`. Returns the blocks that became readable, in the order of `keys`."""
        use = self.uses.of(req_context)
        ended: list[BlockStatus] = []
        stray: list[OffloadKey] = []
        for key in keys:
            block = self._get(key)
            if block is None or block.writer is not use:
                stray.append(key)
                continue
            block.writer = None
            ended.append(block)
        if ended:
            use.num_writing -= len(ended)
            if success:
                stored = self._publish(ended, "kvtier_cpu_stored_blocks")
                self.journal.note(What.STORED, HOST_PLACE, stored, req_context)
            else:
                _enter(self, What.COPY_FAILED, [block.key for block in ended], use)
                use.lose(ended)
                self.slots.discard(ended)
            self.slots.end_quarantine()
        self.uses.drop_if_done(use)
        self._record_misuse("stray completion of a store", stray, use, "complete each store once")
        return ended if success else []

    def _admitted(self, keys: list[OffloadKey], use: RequestUse) -> list[OffloadKey]:
        """The keys that the filter lets pass and that the policy wants."""
        admitted = keys if self._filter is None else self._filter.admitted(keys)
        if len(admitted) < len(keys):
            # The journal gets all of them: those that pass are stored later.
            _enter(self, What.FILTERED, keys, use, len(keys) - len(admitted))
        wanted = self.uses.wanted(admitted, use)
        if len(wanted) < len(admitted):
            _enter(self, What.UNWANTED, admitted, use, len(admitted) - len(wanted))
        return wanted

    def _num_storable(self, wanted: int, use: RequestUse) -> int | None:
        """How many of `wanted` new blocks to store, from the first one on. None: refuse the store.

        The engine offers refused blocks again later. A request never evicts its own blocks. If the
        new blocks do not fit beside them even in an otherwise idle tier, only as many as fit there
        are wanted. During a quarantine, at most `slots.allowance` blocks are stored.
        """
        slots = self.slots
        if wanted == 0:
            return 0
        if slots.quarantine:
            return min(wanted, slots.allowance) if slots.allowance else None
        if use.fills_tier_since == slots.generation:
            return 0
        most_now = self.num_blocks - self.reserve - slots.num_in_transfer()
        # Try a lower bound first: counting exactly the request's own blocks takes time.
        if wanted <= min(slots.sure_room_for(use.context, len(use.keys)), most_now):
            return wanted
        own = [block for key in use.keys if (block := self._get(key)) is not None]
        room_now, room_ever = slots.room_for(use.context, own)
        most_now = min(most_now, room_now)
        wanted = min(wanted, min(self.num_blocks - self.reserve, room_ever) - len(slots.held))
        if wanted <= 0:
            wanted = 0
            use.fills_tier_since = slots.generation
        return wanted if wanted <= most_now else None

    def _place(
        self, new: list[OffloadKey], use: RequestUse, comes_last: bool, writer: object
    ) -> tuple[list[BlockStatus], list[OffloadKey]] | None:
        """Take slots for new blocks of a request, for `writer` to fill.

        Returns the blocks, and the keys that were evicted for them; None if too few blocks could be
        evicted. `comes_last`: in the prompt, the new blocks follow all earlier ones of the request.
        """
        slots, policy = self.slots, self.slots.policy
        self.uses.settle()
        policy.on_store_miss(new, use.context)
        if evicted := slots.make_room(len(new), use.keys.keys()):
            _enter(self, What.EVICTED, evicted, use)
            self._report(evicted, removed=True)
        if evicted is None or not slots.has_room_for(len(new), use.context):
            return None
        closes_gap = not comes_last and use.has_used_behind(new[0])
        was_seen = use.seen_at == slots.generation
        blocks = slots.take(new, writer)
        use.keys.update(dict.fromkeys(new, slots.generation))
        if was_seen:
            use.seen_at = slots.generation  # the request's earlier blocks were not evicted
        policy.insert_run(new, blocks, use.keys, use.context)
        if closes_gap:
            # In the prompt, a block that the request has used comes after the first new block.
            policy.touch(use.keys, use.context)
        return blocks, evicted

    def _publish(self, written: list[BlockStatus], counter: str) -> list[OffloadKey]:
        """Make blocks readable. Returns their keys."""
        self.slots.publish(written)
        self._count(counter, len(written))
        keys = [block.key for block in written]
        self._report(keys, removed=False)
        return keys

    # --- the whole cache ------------------------------------------------------------------------

    def reset_cache(self) -> None:
        self._report(self.slots.reset(), removed=True)
        self.journal.note_reset()
        self.uses.reset()
        super().reset_cache()

    def take_events(self) -> Iterable[OffloadingEvent]:
        if not self._events:
            return ()
        events, self._events = self._events, []
        return events

    def take_stats(self) -> OffloadingStats:
        slots = self.slots
        counters, self._counters = self._counters, {}
        gauges: dict[str, float] = {
            "kvtier_cpu_slots": self.num_blocks,
            "kvtier_cpu_resident_blocks": slots.num_evictable + slots.num_pinned,
            "kvtier_cpu_writing_blocks": slots.num_writing,
            "kvtier_cpu_pinned_blocks": slots.num_pinned,
            "kvtier_cpu_quarantined_slots": len(slots.quarantine.keys() | slots.held.keys()),
            **self.prompt_gauges(),
        }
        return self.sources.add_to(OffloadingStats(counters, gauges))

    def slots_of(self, keys: Iterable[OffloadKey]) -> dict[OffloadKey, int]:
        """The slot numbers of these blocks, including blocks that are being written."""
        return {key: block.block_id for key in keys if (block := self._get(key)) is not None}

    def resident_keys(self) -> list[OffloadKey]:
        """Keys of all readable blocks. For tests and inspection."""
        return [block.key for block in self.slots.used if block.is_ready]

    # --- counters, events, misuse ---------------------------------------------------------------

    def _count(self, name: str, n: int) -> None:
        self._counters[name] = self._counters.get(name, 0) + n

    def _report(self, keys: list[OffloadKey], removed: bool) -> None:
        if self._events is not None and keys:
            self._events.append(OffloadingEvent(keys, self.medium, removed))

    def _record_misuse(
        self, kind: str, keys: Iterable[OffloadKey], use: RequestUse, remedy: str
    ) -> None:
        for key in keys:
            self._count("kvtier_cpu_misuse", 1)
            self.misuse.record(kind, key, use.context.req_id, remedy)


def _enter(
    manager: CPUOffloadingManager,
    what: What,
    keys: list[OffloadKey],
    use: RequestUse,
    n: int | None = None,
) -> None:
    """Count what has happened to blocks, and enter it in the journal. `n`: how many to count; None:
    all."""
    manager._count(_COUNTERS[what], len(keys) if n is None else n)
    manager.journal.note(what, HOST_PLACE, keys, use.context)


def _require_whole(name: str, value: object, least: int) -> None:
    if not isinstance(value, int) or isinstance(value, bool) or value < least:
        raise ValueError(f"{name} is {value!r}: give a whole number of at least {least}")
