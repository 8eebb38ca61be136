"""The primary tier's bookkeeping: which block is in which slot, and who is using it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Sequence, Set
from operator import attrgetter
from typing import TYPE_CHECKING, cast

from kvtier.admission.reuse import ReuseFilter
from kvtier.base import (
    LoadStoreSpec,
    LookupResult,
    Medium,
    OffloadingEvent,
    OffloadingManager,
    OffloadingStats,
    PrefixLookup,
    PrepareStoreOutput,
    RequestOffloadingContext,
)
from kvtier.cpu.common import CPULoadStoreSpec
from kvtier.cpu.policies.base import (
    FREE,
    QUARANTINED,
    WRITING,
    BlockStatus,
    CachePolicy,
    SlotState,
)
from kvtier.cpu.policies.factory import CachePolicyFactory
from kvtier.cpu.request_use import RequestUse
from kvtier.misuse import MisuseLog

if TYPE_CHECKING:
    from kvtier.base import OffloadKey, ReqContext, ScheduleEndContext

_HIT = LookupResult.HIT
_MISS = LookupResult.MISS
_HIT_PENDING = LookupResult.HIT_PENDING

_MAX_UNSETTLED = 4096
"""Requests whose uses are kept back before the policy is told."""

_generation_of = attrgetter("generation")

_FIRST_RUN = 16
"""How many keys of a prompt are looked at first. Most prompts end with their first miss."""

NO_BLOCK = -1
"""The slot number in a load spec for a block that is not there. Its transfer must fail."""


class CPUOffloadingManager(OffloadingManager):
    """Slots of host memory, reference counts, events; a policy decides who leaves.

    Scheduler thread only. No call does I/O or waits, and each costs a constant per block.

    Use of a block is learnt from every call that reveals it, once for each (request, key):
    lookups that find it, loads, stores of blocks that are there already, `touch`. When a request
    finishes, its blocks become the most recently used ones.

    What a request that is running at a `reset_cache` has on the device was computed before it.
    Such a request stores nothing until it is preempted, after which it computes everything anew.

    A slot that a transfer may be using when `reset_cache` is called is quarantined until a
    later transfer completes. Some slots must be left for that one: at most `num_blocks -
    reserve` are ever in stores at the same time, and during a quarantine all stores together take
    at most half of what was free. If nothing is left all the same, the quarantine ends with the
    second step.
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
    ) -> None:
        """Make a manager of `num_blocks` slots, numbered from 0.

        `strict`: raise when the caller breaks the contract; by default if the environment
        variable KVTIER_STRICT is set.
        """
        _require_whole("num_blocks", num_blocks, 1)
        _require_whole("store_threshold", store_threshold, 0)
        _require_whole("max_tracker_size", max_tracker_size, 1)
        self.medium = Medium.CPU
        self.num_blocks = num_blocks
        self.reserve = min(max(1, num_blocks // 256), num_blocks - 1)
        self.misuse = MisuseLog("primary tier", strict)
        policy_cls = CachePolicyFactory.get_cache_policy_cls(cache_policy, cache_policy_module_path)
        self._policy: CachePolicy = policy_cls(cache_capacity=num_blocks)
        # The built-in policies keep blocks in the dictionary of their base class: asking that
        # directly saves a Python call for each key.
        overrides_get = type(self._policy).get is not CachePolicy.get
        self._get = self._policy.get if overrides_get else self._policy.blocks.get
        self._resident = None if overrides_get else self._policy.blocks
        self._filter = (
            ReuseFilter(store_threshold, max_tracker_size) if store_threshold > 1 else None
        )
        self._events: list[OffloadingEvent] | None = [] if enable_events else None

        self._slots: list[BlockStatus] = []
        """Every slot that was ever in use; made when first needed."""
        self._free: list[BlockStatus] = []
        self._quarantine: dict[BlockStatus, None] = {}
        """Slots that transfers of the device from before a reset may be using."""
        self._held: dict[BlockStatus, int] = {}
        """Slots out of use for as long as that many transfers of other tiers may be using them."""
        self._generation = 0
        """Of the slots given away last. No two blocks of one key have the same."""
        self._num_writing = 0
        self._num_evictable = 0
        self._num_pinned = 0

        self._uses: dict[str, RequestUse] = {}
        self._unsettled: list[RequestUse] = []
        """Requests with fresh keys."""
        self._was_reset = False
        self._allowance = 0
        """How many slots may be given away until the quarantine ends."""
        self._num_steps_in_quarantine = 0
        # Calls for one request come in a row: remembering the last one saves a look-up.
        self._last_context: ReqContext | None = None
        self._last_use: RequestUse | None = None

        self._counters: dict[str, int] = {}

    # --- requests ---------------------------------------------------------------------------

    def on_new_request(self, req_context: ReqContext) -> RequestOffloadingContext:
        use = self._uses.get(req_context.req_id)
        if use is None:
            use = self._uses[req_context.req_id] = RequestUse(req_context)
        # An id may be used again while transfers of the request that had it are under way.
        use.announced = True
        use.finished = use.is_stale = use.has_loaded = False
        use.first_withheld = None
        self._last_context, self._last_use = req_context, use
        return RequestOffloadingContext()

    def on_request_finished(self, req_context: ReqContext) -> None:
        use = self._use_of(req_context)
        self._settle()
        self._policy.on_request_finished(use.keys, req_context)
        use.keys = {}
        use.brought = set()
        use.finished = True
        self._forget_if_done(use)

    def on_schedule_end(self, context: ScheduleEndContext) -> None:
        if self._unsettled:
            self._settle()
        if context.preempted_req_ids:
            self._forget_what_is_on_the_device(context.preempted_req_ids)
        if self._was_reset:
            self._let_store(context.new_req_ids)
        if self._quarantine:
            self._num_steps_in_quarantine += 1
            if self._num_steps_in_quarantine > 1 and not self._allowance:
                # No store is possible, so none will ever end. But the engine has flushed earlier
                # transfers by now: it does so before any that it starts later.
                self._end_quarantine()

    def _forget_what_is_on_the_device(self, req_ids: Collection[str]) -> None:
        """These requests have lost all that they had computed or loaded."""
        for req_id in req_ids:
            use = self._uses.get(req_id)
            if use is not None:
                use.is_stale = use.has_loaded = False

    def _let_store(self, new_req_ids: Collection[str]) -> None:
        """Requests that begin only now have computed nothing before the reset."""
        for req_id in new_req_ids:
            use = self._uses.get(req_id)
            if use is not None and not use.has_loaded:
                use.is_stale = False

    def touch(self, keys: Collection[OffloadKey], req_context: ReqContext) -> None:
        keys = list(keys)
        use = self._use_of(req_context)
        if self._filter is not None:
            self._filter.count(keys, use.brought)
        is_new = self._note_prompt(keys, use) or use.out_of_order
        self._settle()
        if is_new:
            self._policy.touch(use.keys, use.context)
        else:
            self._policy.renew(use.keys, use.context)

    def _note_prompt(self, keys: list[OffloadKey], use: RequestUse) -> bool:
        """A request brings these keys, in prompt order, and uses what is here of them. Whether that
        says anything new.

        Engines bring all keys of a prompt in step after step: those that nothing has become of
        cost next to nothing.
        """
        if not use.keys:
            blocks = list(map(self._get, keys))
            use.all_here = all(blocks)
            generations = [block.generation if block is not None else 0 for block in blocks]
            use.keys = dict(zip(keys, generations, strict=True))
            use.seen_at = self._generation
            return bool(keys)
        is_new = False
        is_whole = len(use.keys) == len(keys) and list(use.keys) == keys
        if not is_whole:
            brought, num_brought = use.keys, len(use.keys)
            use.bring(dict.fromkeys(keys, 0))
            is_new = use.keys is not brought or len(use.keys) != num_brought
            is_whole = list(use.keys) == keys
        elif use.seen_at == self._generation:
            return False
        blocks = list(map(self._get, keys))
        known = list(map(use.keys.get, keys))
        if [block.generation if block is not None else 0 for block in blocks] != known:
            for key, block in zip(keys, blocks, strict=True):
                if block is not None and use.keys[key] != block.generation:
                    use.keys[key] = block.generation
                    is_new = True
        if is_whole:
            use.seen_at = self._generation
            use.all_here = all(blocks)
        return is_new

    # --- lookups ----------------------------------------------------------------------------

    def lookup(self, key: OffloadKey, req_context: ReqContext) -> LookupResult:
        if self._filter is not None:
            self._filter.count((key,), self._use_of(req_context).brought)
        block = self._get(key)
        if block is None:
            return _MISS
        if req_context is not self._last_context:
            self._use_of(req_context)
        use = self._last_use
        assert use is not None
        if use.keys.get(key) != block.generation:
            self._note_use(block, use)
        return _HIT if block.ref_cnt >= 0 else _HIT_PENDING

    def lookup_prefix(self, keys: Iterable[OffloadKey], req_context: ReqContext) -> PrefixLookup:
        if self._filter is not None:
            return super().lookup_prefix(keys, req_context)
        use = self._use_of(req_context)
        keys = list(keys)
        num_hits = 0
        is_final = True
        size = _FIRST_RUN
        while num_hits < len(keys):
            run = keys[num_hits : num_hits + size]
            found = list(map(self._get, run))
            num_asked = len(run)
            if not all(found):
                del found[found.index(None) :], run[len(found) :]
            blocks = cast("list[BlockStatus]", found)
            is_final = self._note_run(run, blocks, use) and is_final
            num_hits += len(run)
            if len(run) < num_asked:
                break
            size *= 4
        return PrefixLookup(num_hits, is_final)

    def _find_all(self, keys: Sequence[OffloadKey], use: RequestUse) -> bool:
        """Whether all of these blocks, given in prompt order, can be read. If so, they are used."""
        if self._num_writing:
            return False  # somebody has to look at each
        try:
            generations = [block.generation for block in map(self._get, keys)]  # type: ignore[union-attr]
        except AttributeError:  # there is none
            return False
        self._note_generations(keys, generations, use)
        return True

    def _note_generations(
        self, keys: Sequence[OffloadKey], generations: list[int], use: RequestUse
    ) -> None:
        """The request uses blocks of these keys and generations, at least one, in prompt order."""
        known = use.keys
        if keys[0] not in known:
            if not use.fresh:
                self._expect_fresh(use)
            num_known = len(known)
            known.update(zip(keys, generations, strict=True))
            use.fresh += keys
            if len(known) < num_known + len(keys):
                use.out_of_order = True  # some of them it had used before
        elif list(map(known.get, keys)) != generations:
            self._note_uses(cast("list[BlockStatus]", list(map(self._get, keys))), use)

    def _note_run(
        self, keys: Sequence[OffloadKey], blocks: list[BlockStatus], use: RequestUse
    ) -> bool:
        """The request uses these blocks, in prompt order. Whether all of them can be read."""
        if keys:
            self._note_generations(keys, list(map(_generation_of, blocks)), use)
        return not self._num_writing or all(block.ref_cnt >= 0 for block in blocks)

    # --- loads ------------------------------------------------------------------------------

    def prepare_load(self, keys: Collection[OffloadKey], req_context: ReqContext) -> LoadStoreSpec:
        use = self._use_of(req_context)
        keys = list(keys)
        once = dict.fromkeys(keys, 1)
        blocks = list(map(self._get, once))
        newly_pinned: list[BlockStatus] = []
        unreadable = 0
        for block in blocks:
            if block is None or block.ref_cnt < 0:
                unreadable += 1
                continue
            if block.ref_cnt == 0:
                newly_pinned.append(block)
            block.ref_cnt += 1
        self._num_evictable -= len(newly_pinned)
        self._num_pinned += len(newly_pinned)
        self._policy.pinned(newly_pinned)
        if unreadable:
            readable = [block for block in blocks if block is not None and block.is_ready]
            once = dict.fromkeys([block.key for block in readable], 1)
        else:
            readable = cast("list[BlockStatus]", blocks)
        self._note_loading(once, readable, use)
        if unreadable or len(once) < len(keys):
            return self._slots_one_by_one(keys, once, use)
        return CPULoadStoreSpec([block.block_id for block in readable])

    def _note_loading(
        self, keys: dict[OffloadKey, int], blocks: list[BlockStatus], use: RequestUse
    ) -> None:
        """Remember whose pins these are, for `complete_load`, and that the blocks are used."""
        if not blocks:
            return
        use.has_loaded = True
        self._uses[use.context.req_id] = use
        loading = use.loading
        if not loading:
            use.loading = keys
        elif loading.keys().isdisjoint(keys):
            loading.update(keys)
        else:
            for key in keys:
                loading[key] = loading.get(key, 0) + 1
        if use.keys and next(iter(use.keys)) != blocks[0].key:
            # It may have looked from the end of its prompt. Loads are in order.
            use.bring(dict.fromkeys(keys, 0))
            use.out_of_order = True
            if not use.fresh:
                self._unsettled.append(use)
                use.fresh.append(blocks[0].key)
        if not use.is_known_to_have(list(keys), self._generation):
            self._note_uses(blocks, use)

    def _slots_one_by_one(
        self, keys: list[OffloadKey], loading: dict[OffloadKey, int], use: RequestUse
    ) -> LoadStoreSpec:
        """The answer to a load of blocks of which some are not readable, or are named twice."""
        missing = [key for key in keys if key not in loading]
        self._record_misuse("load of an unreadable block", missing, use, "load only after a HIT")
        slots = []
        for key in keys:
            block = self._get(key) if key in loading else None
            slots.append(NO_BLOCK if block is None else block.block_id)
        return CPULoadStoreSpec(slots)

    def complete_load(self, keys: Collection[OffloadKey], req_context: ReqContext) -> None:
        use = self._use_of(req_context)
        stray: list[OffloadKey] = []
        ended = self._take_only_load(keys, use)
        if ended is None:
            ended, stray = self._take_loads(keys, use)
        unpinned: list[BlockStatus] = []
        for block in ended:
            block.ref_cnt -= 1
            if block.ref_cnt == 0:
                unpinned.append(block)
        self._num_evictable += len(unpinned)
        self._num_pinned -= len(unpinned)
        self._policy.unpinned(unpinned)
        if ended:
            self._count("kvtier_cpu_loaded_blocks", len(ended))
            self._end_quarantine()
        self._forget_if_done(use)
        self._record_misuse("stray completion of a load", stray, use, "complete each load once")

    def _take_only_load(
        self, keys: Collection[OffloadKey], use: RequestUse
    ) -> list[BlockStatus] | None:
        """The blocks of all that a request is loading, in prompt order, if these are their keys."""
        loading = use.loading
        if not isinstance(keys, Set) or loading.keys() != keys:
            return None
        if sum(loading.values()) > len(loading):
            return None  # some of them twice
        use.loading = {}
        # Those that are pinned are there.
        return cast("list[BlockStatus]", list(map(self._get, loading)))

    def _take_loads(
        self, keys: Collection[OffloadKey], use: RequestUse
    ) -> tuple[list[BlockStatus], list[OffloadKey]]:
        """The blocks of these keys that a request is loading, and the keys that it is not."""
        loading = use.loading
        ended: list[BlockStatus] = []
        stray: list[OffloadKey] = []
        for key in keys:
            block = self._get(key)
            if block is None or key not in loading:
                stray.append(key)
                continue
            if loading[key] == 1:
                del loading[key]
            else:
                loading[key] -= 1
            ended.append(block)
        return ended, stray

    # --- stores -----------------------------------------------------------------------------

    def prepare_store(
        self, keys: Collection[OffloadKey], req_context: ReqContext
    ) -> PrepareStoreOutput | None:
        keys = list(keys)
        use = self._use_of(req_context)
        if self._filter is not None:
            self._filter.count(keys, use.brought)
        if (use.is_stale or use.first_withheld is not None) and self._withholds(keys, use):
            self._count("kvtier_cpu_stale_blocks", len(keys))
            return PrepareStoreOutput([], CPULoadStoreSpec(()), [])
        if use.is_known_to_have(keys, self._generation):
            return PrepareStoreOutput([], CPULoadStoreSpec(()), [])
        offered = dict.fromkeys(keys, 0)
        new, present = self._split(offered)
        comes_last = use.bring(offered)
        if present:
            self._note_uses(present, use)
            comes_last = False
        new = self._admitted(new)
        num_storable = self._num_storable(len(new), use)
        if num_storable is None:
            self._count("kvtier_cpu_refused_blocks", len(new))
            return None
        if num_storable < len(new):
            self._count("kvtier_cpu_truncated_blocks", len(new) - num_storable)
            del new[num_storable:]
        if not new:
            return PrepareStoreOutput([], CPULoadStoreSpec(()), [])

        placed = self._place(new, use, comes_last, use)
        if placed is None:
            self._count("kvtier_cpu_refused_blocks", len(new))
            return None
        blocks, evicted = placed
        use.num_writing += len(blocks)
        self._uses[use.context.req_id] = use
        return PrepareStoreOutput(
            new, CPULoadStoreSpec([block.block_id for block in blocks]), evicted
        )

    def slots_of(self, keys: Iterable[OffloadKey]) -> dict[OffloadKey, int]:
        """Where those of these blocks are that have a slot, also while it is being written."""
        found = {key: self._get(key) for key in keys}
        return {key: block.block_id for key, block in found.items() if block is not None}

    def complete_store(
        self, keys: Collection[OffloadKey], req_context: ReqContext, success: bool = True
    ) -> None:
        self._complete_store(keys, req_context, success)

    def _complete_store(
        self, keys: Collection[OffloadKey], req_context: ReqContext, success: bool
    ) -> list[BlockStatus]:
        """Returns the blocks that can be read from now on."""
        use = self._use_of(req_context)
        get = self._get
        ended: list[BlockStatus] = []
        stray: list[OffloadKey] = []
        for key in keys:
            block = get(key)
            if block is None or block.writer is not use:
                stray.append(key)
                continue
            block.writer = None
            ended.append(block)
        if ended:
            use.num_writing -= len(ended)
            self._num_writing -= len(ended)
            if success:
                self._publish(ended, "kvtier_cpu_stored_blocks")
            else:
                self._abandon(ended, use)
                self._count("kvtier_cpu_failed_stores", len(ended))
            self._end_quarantine()
        self._forget_if_done(use)
        self._record_misuse("stray completion of a store", stray, use, "complete each store once")
        return ended if success else []

    def _place(
        self, new: list[OffloadKey], use: RequestUse, comes_last: bool, writer: object
    ) -> tuple[list[BlockStatus], list[OffloadKey]] | None:
        """Give slots to blocks that a request brings, and that `writer` is going to write.

        Returns the blocks, and the keys of those that had to leave. None: not enough could.
        """
        self._settle()
        self._policy.on_store_miss(new, use.context)
        evicted = self._make_room(len(new), use.keys.keys())
        if evicted is None:
            return None
        closes_gap = not comes_last and use.has_used_behind(new[0])
        was_seen = use.seen_at == self._generation
        blocks = self._take_slots(new, writer)
        use.keys.update(dict.fromkeys(new, self._generation))
        if was_seen:
            use.seen_at = self._generation  # what it had used before was not evicted for this
        self._policy.insert_run(new, blocks, use.keys, use.context)
        if closes_gap:
            # They belong between the others, not behind them.
            self._policy.touch(use.keys, use.context)
        return blocks, evicted

    def _withholds(self, keys: list[OffloadKey], use: RequestUse) -> bool:
        """Whether these blocks must not, or need not, be stored after a reset.

        Engines do not offer a block again that was not stored. If those at the head were
        withheld, what comes behind them is of no use, also when it was computed later.
        """
        if not use.is_stale and use.first_withheld in keys:
            use.first_withheld = None
            return False
        if use.first_withheld is None and keys:
            use.first_withheld = keys[0]
        return True

    def _split(self, offered: dict[OffloadKey, int]) -> tuple[list[OffloadKey], list[BlockStatus]]:
        """Those of the keys that are new, and the blocks of those that are there already."""
        if self._resident is not None and self._resident.keys().isdisjoint(offered):
            return list(offered), []
        get = self._get
        new = [key for key in offered if get(key) is None]
        return new, [block for key in offered if (block := get(key)) is not None]

    def _admitted(self, keys: list[OffloadKey]) -> list[OffloadKey]:
        """Those of the keys that enough requests have brought."""
        if self._filter is None:
            return keys
        admits = self._filter.admits
        admitted = [key for key in keys if admits(key)]
        if len(admitted) < len(keys):
            self._count("kvtier_cpu_filtered_blocks", len(keys) - len(admitted))
        return admitted

    def _num_storable(self, wanted: int, use: RequestUse) -> int | None:
        """How many of `wanted` new blocks to store: all, only the head, or None: not now.

        A request does not evict its own blocks. If it does not fit beside those even into an
        idle tier, waiting would not help: then the head is stored, which is what a later request
        can use. After a reset, too, the head has to do.
        """
        num_free = self._num_free()
        if wanted == 0:
            return 0
        if self._quarantine:
            return min(wanted, self._allowance) if self._allowance else None
        if use.fills_tier_since == self._generation:
            return 0
        in_transfer = self._num_writing + self._num_pinned + len(self._held)
        most_now = self.num_blocks - self.reserve - in_transfer
        # Counting the request's own blocks takes a while, and hardly ever matters.
        if wanted <= min(num_free + max(self._num_evictable - len(use.keys), 0), most_now):
            return wanted
        own = [block for key in use.keys if (block := self._get(key)) is not None]
        most_now = min(most_now, num_free + self._num_evictable - sum(b.ref_cnt == 0 for b in own))
        wanted = min(wanted, self.num_blocks - len(self._held) - max(self.reserve, len(own)))
        if wanted <= 0:
            wanted = 0
            use.fills_tier_since = self._generation
        return wanted if wanted <= most_now else None

    def _num_free(self) -> int:
        return len(self._free) + self.num_blocks - len(self._slots)

    def _make_room(self, wanted: int, protected: Set[OffloadKey]) -> list[OffloadKey] | None:
        """Evict what stands in the way of `wanted` free slots. None, if that is not possible."""
        missing = wanted - self._num_free()
        if missing <= 0:
            return []
        victims = self._policy.evict(missing, protected)
        if victims is None:
            return None
        freed = [block for _, block in victims]
        for block in freed:
            block.ref_cnt = FREE
        self._free += freed
        self._num_evictable -= len(victims)
        self._count("kvtier_cpu_evicted_blocks", len(victims))
        evicted = [key for key, _ in victims]
        self._report(evicted, removed=True)
        return evicted

    def _take_slots(self, keys: list[OffloadKey], writer: object) -> list[BlockStatus]:
        """Take a free slot for each of the blocks, which `writer` is going to write."""
        free = self._free
        n = len(keys)
        if len(free) < n:
            first = len(self._slots)
            never_used = [BlockStatus(i) for i in range(first, first + n - len(free))]
            self._slots += never_used
            # The lowest numbers go to the end, where slots are taken from.
            free[:0] = reversed(never_used)
        blocks = free[-n:]
        del free[-n:]
        blocks.reverse()
        self._generation += 1
        generation = self._generation
        for key, block in zip(keys, blocks, strict=True):
            block.key = key
            block.ref_cnt = WRITING
            block.generation = generation
            block.writer = writer
        self._num_writing += n
        self._allowance -= n
        return blocks

    def _publish(self, written: list[BlockStatus], counter: str) -> None:
        """Make blocks readable."""
        for block in written:
            block.ref_cnt = 0
        self._num_evictable += len(written)
        self._policy.unpinned(written)
        self._count(counter, len(written))
        self._report([block.key for block in written], removed=False)

    def _abandon(self, failed: Iterable[BlockStatus], use: RequestUse) -> None:
        """Forget blocks whose write failed."""
        for block in failed:
            self._forget(block, use)
            self._release(block)

    def _forget(self, block: BlockStatus, use: RequestUse) -> None:
        """Take a block that `use` has brought out of the cache. What becomes of its slot is the
        caller's business."""
        self._policy.remove(block.key)
        if block.key in use.keys:
            use.keys[block.key] = 0
        self._generation += 1  # a request that was found to fill the tier may do so no more

    def _release(self, block: BlockStatus) -> None:
        block.ref_cnt = FREE
        self._free.append(block)

    # --- the whole cache --------------------------------------------------------------------

    def reset_cache(self) -> None:
        removed: list[OffloadKey] = []
        for block in self._slots:
            if block.ref_cnt >= 0:
                removed.append(block.key)
            if block.ref_cnt == 0:
                self._release(block)
            elif block.ref_cnt > 0 or block.ref_cnt == WRITING:
                if self._is_used_by_device(block):
                    self._quarantine[block] = None
                block.ref_cnt = QUARANTINED
            block.writer = block.place = None
        self._report(removed, removed=True)
        self._policy.clear()
        self._num_writing = self._num_evictable = self._num_pinned = 0
        self._unsettled = []
        for use in list(self._uses.values()):
            use.keys = {}
            use.fresh = []
            use.out_of_order = False
            use.loading = {}
            use.num_writing = 0
            use.is_stale = use.announced and not use.finished
            use.first_withheld = None
            use.fills_tier_since = -1
            self._forget_if_done(use)
        self._last_context = self._last_use = None
        self._was_reset = True
        # Half of what is free stays for the time after another reset.
        self._allowance = (self._num_free() + 1) // 2
        self._num_steps_in_quarantine = 0

    def _is_used_by_device(self, block: BlockStatus) -> bool:
        """Whether a device transfer may be using a slot that is pinned or being written."""
        return True

    def take_events(self) -> Iterable[OffloadingEvent]:
        if not self._events:
            return ()
        events, self._events = self._events, []
        return events

    def get_stats(self) -> OffloadingStats:
        counters: dict[str, float] = dict(self._counters)
        self._counters = {}
        return OffloadingStats(
            counters=counters,
            gauges={
                "kvtier_cpu_slots": self.num_blocks,
                "kvtier_cpu_resident_blocks": self._num_evictable + self._num_pinned,
                "kvtier_cpu_writing_blocks": self._num_writing,
                "kvtier_cpu_pinned_blocks": self._num_pinned,
                "kvtier_cpu_quarantined_slots": len(self._quarantine.keys() | self._held.keys()),
            },
        )

    def slot_states(self) -> Counter[SlotState]:
        """How many slots are in each state, counted one by one. For tests and inspection."""
        states = Counter(block.state for block in self._slots)
        states[SlotState.FREE] += self.num_blocks - len(self._slots)
        return states

    def resident_keys(self) -> list[OffloadKey]:
        """Keys of all readable blocks. For tests and inspection."""
        return [block.key for block in self._slots if block.is_ready]

    # --- common -----------------------------------------------------------------------------

    def _use_of(self, req_context: ReqContext) -> RequestUse:
        """What is known of the request. One that was not announced is known while it has transfers
        under way, and for as long as no other request is asked for."""
        if req_context is self._last_context:
            assert self._last_use is not None
            return self._last_use
        use = self._uses.get(req_context.req_id) or RequestUse(req_context)
        self._last_context, self._last_use = req_context, use
        return use

    def _forget_if_done(self, use: RequestUse) -> None:
        """Drop a request that has finished, or was never announced, and has no transfers."""
        if (use.announced and not use.finished) or use.num_writing or use.loading:
            return
        if self._uses.pop(use.context.req_id, None) is not None and not use.announced:
            self._settle()
            self._policy.on_request_finished(use.keys, use.context)
        if self._last_use is use:
            self._last_context = self._last_use = None

    def _note_use(self, block: BlockStatus, use: RequestUse) -> None:
        """The request uses a block; the policy is told before it is next asked."""
        if not use.fresh:
            self._expect_fresh(use)
        if block.key in use.keys:
            use.out_of_order = True
        use.keys[block.key] = block.generation
        use.fresh.append(block.key)

    def _expect_fresh(self, use: RequestUse) -> None:
        """The policy is to be told of uses by this request, which has had none to tell of."""
        if len(self._unsettled) >= _MAX_UNSETTLED:  # an engine that reports no steps
            self._settle()
        self._unsettled.append(use)

    def _note_uses(self, blocks: Iterable[BlockStatus], use: RequestUse) -> None:
        """`_note_use` for those that are not noted yet: thousands, when a long prompt is offered
        that the device has kept."""
        keys = use.keys
        for block in blocks:
            key, generation = block.key, block.generation
            known = keys.get(key)
            if known == generation:
                continue
            if not use.fresh:
                self._expect_fresh(use)
            if known is not None:
                use.out_of_order = True
            keys[key] = generation
            use.fresh.append(key)

    def _settle(self) -> None:
        """Tell the policy of all uses noted since the last time."""
        for use in self._unsettled:
            if use.out_of_order:
                self._policy.touch(use.keys, use.context)
            else:
                self._policy.on_use(use.fresh, use.keys, use.context)
            use.fresh = []
            use.out_of_order = False
        self._unsettled = []

    def _end_quarantine(self) -> None:
        """A transfer that began after the last reset has ended, hence all earlier ones have."""
        if self._quarantine:
            for block in self._quarantine:
                if block not in self._held:
                    self._release(block)
            self._quarantine = {}

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


def _require_whole(name: str, value: object, least: int) -> None:
    if not isinstance(value, int) or isinstance(value, bool) or value < least:
        raise ValueError(f"{name} is {value!r}: give a whole number of at least {least}")
