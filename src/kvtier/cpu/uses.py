"""The log of uses: which request has used which block of the primary tier.

An eviction policy orders blocks by use. The log notes each use once per (request, key), keeps a
request's keys in prompt order, and reports the uses to the policy in batches, no later than the end
of the step or the next eviction.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Sequence, Set
from itertools import islice
from typing import TYPE_CHECKING, cast

from kvtier.base import ReqContext
from kvtier.cpu.policies.base import CachePolicy

if TYPE_CHECKING:
    from kvtier.admission import ReuseFilter
    from kvtier.base import OffloadKey
    from kvtier.cpu.policies.base import BlockStatus
    from kvtier.cpu.slots import SlotTable

_MAX_UNSETTLED = 4096
"""The largest number of requests with uses that are not yet reported to the policy."""


class RequestUse:
    """What one request has done with the primary tier so far."""

    __slots__ = (
        "all_here",
        "announced",
        "brought",
        "context",
        "fills_tier_since",
        "finished",
        "first_withheld",
        "fresh",
        "has_loaded",
        "is_stale",
        "keys",
        "loading",
        "num_writing",
        "out_of_order",
        "seen_at",
    )

    def __init__(self, context: ReqContext) -> None:
        self.context = context
        self.keys: dict[OffloadKey, int] = {}
        """The keys of the request in prompt order, each with the generation of the block that the
        request used or stored; 0 if there was no block."""
        self.seen_at = -1
        """Generation of the slot table when all of `keys` were last looked up. While the table
        has the same generation, none of their blocks has come or left."""
        self.all_here = False
        """True if every key had a block at `seen_at`."""
        self.fresh: list[OffloadKey] = []
        """Uses not yet reported to the policy."""
        self.out_of_order = False
        """True if, in the prompt, a key of `fresh` may come before a key that was used earlier."""
        self.brought: set[OffloadKey] = set()
        """Keys that the reuse filter has counted for this request."""
        self.loading: dict[OffloadKey, int] = {}
        """Number of loads under way, by key."""
        self.num_writing = 0
        """Number of blocks that the device is writing for this request."""
        self.announced = False
        self.finished = False
        self.has_loaded = False
        """True if the request has loaded blocks on the device."""
        self.is_stale = False
        """True if the request may have blocks on the device from before a reset."""
        self.first_withheld: OffloadKey | None = None
        """The first key that the request offered while it was stale; None once the request, no
        longer stale, has offered that key again."""
        self.fills_tier_since = -1
        """Generation of the slot table when the request's own blocks left no slot for a new one; -1
        if that has not happened."""

    def bring(self, keys: dict[OffloadKey, int]) -> bool:
        """Merge the keys of a call, in prompt order, with those of earlier calls.

        The values of `keys` are 0. Returns True only in the first of these cases:

        - No common key: the keys of the call come last in the prompt.
        - The call names every earlier key: the order of the call is taken.
        - The call names no new key: nothing changes.
        - Otherwise: first the earlier keys before the first common one, then the keys of the call,
          then the other earlier keys.
        """
        known = self.keys
        if known.keys().isdisjoint(keys):
            known.update(keys)
            self.seen_at = -1
            return True
        if len(known) <= len(keys) and known.keys() <= keys.keys():
            self.keys = {**keys, **known}
            if len(known) < len(keys):
                self.seen_at = -1
        elif not keys.keys() <= known.keys():
            front: dict[OffloadKey, int] = {}
            for key in known:
                if key in keys:
                    break
                front[key] = 0
            self.keys = {**front, **keys, **known}
            self.seen_at = -1
        return False

    def is_known_to_have(self, keys: list[OffloadKey], generation: int) -> bool:
        """True if these are the request's first keys, and all its blocks are known to be stored.

        `generation`: the current generation of the slot table.
        """
        if self.seen_at != generation or not self.all_here:
            return False
        return keys == list(islice(self.keys, len(keys)))

    def has_used_behind(self, key: OffloadKey) -> bool:
        """True if the request has used a block that comes after `key` in its prompt."""
        for other, generation in reversed(self.keys.items()):
            if generation:
                return True
            if other == key:
                return False
        return False

    def lose(self, blocks: Iterable[BlockStatus]) -> None:
        """Note that blocks that were being written for this request no longer exist."""
        for block in blocks:
            if block.key in self.keys:
                self.keys[block.key] = 0

    def withholds(self, keys: list[OffloadKey]) -> bool:
        """True if these blocks, offered after a reset, must not or need not be stored.

        Blocks of a stale request must not be stored. Once the request is no longer stale, blocks
        need not be stored until it offers the first withheld block again, because no block after a
        missing one can be used.
        """
        if not self.is_stale and self.first_withheld in keys:
            self.first_withheld = None
            return False
        if self.first_withheld is None and keys:
            self.first_withheld = keys[0]
        return True

    def end_loads(
        self, keys: Collection[OffloadKey], get: Callable[[OffloadKey], BlockStatus | None]
    ) -> tuple[list[BlockStatus], list[OffloadKey]]:
        """End loads of these keys. Returns their blocks, and the keys without a load under way."""
        loading = self.loading
        if (
            isinstance(keys, Set)
            and loading.keys() == keys
            and sum(loading.values()) == len(loading)
        ):
            self.loading = {}
            # The blocks are pinned, so `get` finds them all.
            return cast("list[BlockStatus]", list(map(get, loading))), []
        ended: list[BlockStatus] = []
        stray: list[OffloadKey] = []
        for key in keys:
            block = get(key)
            if block is None or key not in loading:
                stray.append(key)
                continue
            if loading[key] == 1:
                del loading[key]
            else:
                loading[key] -= 1
            ended.append(block)
        return ended, stray


_NO_REQUEST = RequestUse(ReqContext(""))
"""Stands for "no request" in `UseLog.last`."""


class UseLog:
    """Requests, and their uses until they are reported to the policy. Scheduler thread only.

    A request that was not announced is forgotten at the next call for another request, if it has no
    transfers under way.
    """

    def __init__(self, slots: SlotTable, reuse_filter: ReuseFilter | None) -> None:
        self.filter = reuse_filter
        """Counts the requests that bring a key; None: every block may be stored."""
        self.unsettled: list[RequestUse] = []
        """Requests with `fresh` keys."""
        # Calls for one request come in a row, so remembering the last one saves a lookup.
        self.last_context: ReqContext | None = None
        self.last = _NO_REQUEST
        """The record of `last_context`."""
        self._slots = slots
        self._policy = slots.policy
        self._may_decline = type(slots.policy).num_admitted is not CachePolicy.num_admitted
        self._get = slots.get
        self._requests: dict[str, RequestUse] = {}
        self._was_reset = False

    def admit_all(self) -> None:
        """Store every block from now on, because tiers below get what is stored here."""
        self._may_decline = False
        self._policy.admit_all()

    def __len__(self) -> int:
        """Number of requests that are remembered."""
        return len(self._requests)

    def __contains__(self, req_id: str) -> bool:
        return req_id in self._requests

    # --- requests -------------------------------------------------------------------------------

    def of(self, req_context: ReqContext) -> RequestUse:
        """The record of a request; a new one if there is none."""
        if req_context is self.last_context:
            return self.last
        use = self._requests.get(req_context.req_id) or RequestUse(req_context)
        self.last_context, self.last = req_context, use
        return use

    def announce(self, req_context: ReqContext) -> None:
        """Begin the record of a request."""
        use = self._requests.get(req_context.req_id)
        if use is None:
            use = self._requests[req_context.req_id] = RequestUse(req_context)
        # An id may be used again while transfers of an earlier request are under way.
        use.announced = True
        use.finished = use.is_stale = use.has_loaded = False
        use.first_withheld = None
        self.last_context, self.last = req_context, use

    def finish(self, req_context: ReqContext) -> None:
        """End a request. Its blocks become the most recently used ones."""
        use = self.of(req_context)
        self.settle()
        self._policy.on_request_finished(use.keys, req_context)
        use.keys = {}
        use.brought = set()
        use.finished = True
        self.drop_if_done(use)

    def remember(self, use: RequestUse) -> None:
        """Keep the record of a request, because it has a transfer under way."""
        self._requests[use.context.req_id] = use

    def drop_if_done(self, use: RequestUse) -> None:
        """Drop a finished or unannounced request if it has no transfers under way."""
        if (use.announced and not use.finished) or use.num_writing or use.loading:
            return
        if self._requests.pop(use.context.req_id, None) is not None and not use.announced:
            self.settle()
            self._policy.on_request_finished(use.keys, use.context)
        if self.last is use:
            self.last_context, self.last = None, _NO_REQUEST

    def end_step(self, new_req_ids: Collection[str], preempted_req_ids: Collection[str]) -> None:
        """Report the uses of a step. After a reset, let new and preempted requests store again."""
        if self.unsettled:
            self.settle()
        for req_id in preempted_req_ids:
            use = self._requests.get(req_id)
            if use is not None:  # a preempted request has lost its blocks on the device
                use.is_stale = use.has_loaded = False
        if self._was_reset:
            for req_id in new_req_ids:
                use = self._requests.get(req_id)
                if use is not None and not use.has_loaded:
                    use.is_stale = False  # the request computed nothing before the reset

    def reset(self) -> None:
        """Forget all blocks. Blocks that running requests have on the device become stale."""
        self.unsettled = []
        for use in list(self._requests.values()):
            use.keys = {}
            use.fresh = []
            use.out_of_order = False
            use.loading = {}
            use.num_writing = 0
            use.is_stale = use.announced and not use.finished
            use.first_withheld = None
            use.fills_tier_since = -1
            self.drop_if_done(use)
        self.last_context, self.last = None, _NO_REQUEST
        self._was_reset = True

    # --- uses -----------------------------------------------------------------------------------

    def note(self, block: BlockStatus, use: RequestUse) -> None:
        """Note the request's first use of a block since the block came into its slot."""
        if not use.fresh:
            self._expect_fresh(use)
        if block.key in use.keys:
            use.out_of_order = True
        use.keys[block.key] = block.generation
        use.fresh.append(block.key)

    def note_all(self, blocks: Iterable[BlockStatus], use: RequestUse) -> None:
        """As `note`, for each block that is not noted yet. Does not call `note`, because a long
        prompt has thousands of blocks, and a call for each would take too long."""
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

    def note_run(self, keys: Sequence[OffloadKey], generations: list[int], use: RequestUse) -> None:
        """Note that the request uses the blocks of these keys: one or more, in prompt order."""
        known = use.keys
        if keys[0] not in known:
            if not use.fresh:
                self._expect_fresh(use)
            num_known = len(known)
            known.update(zip(keys, generations, strict=True))
            use.fresh += keys
            if len(known) < num_known + len(keys):
                use.out_of_order = True  # the request had used some of them before
        elif list(map(known.get, keys)) != generations:
            self.note_all(cast("list[BlockStatus]", list(map(self._get, keys))), use)

    def note_load(
        self, keys: dict[OffloadKey, int], blocks: list[BlockStatus], use: RequestUse
    ) -> None:
        """Note that the request loads these blocks, for `RequestUse.end_loads`."""
        if not blocks:
            return
        use.has_loaded = True
        self.remember(use)
        loading = use.loading
        if not loading:
            use.loading = keys
        elif loading.keys().isdisjoint(keys):
            loading.update(keys)
        else:
            for key in keys:
                loading[key] = loading.get(key, 0) + 1
        if use.keys and next(iter(use.keys)) != blocks[0].key:
            # Lookups may have begun at the end of the prompt. Loads are in prompt order.
            use.bring(dict.fromkeys(keys, 0))
            use.out_of_order = True
            if not use.fresh:
                self.unsettled.append(use)
                use.fresh.append(blocks[0].key)
        if not use.is_known_to_have(list(keys), self._slots.generation):
            self.note_all(blocks, use)

    def touch(self, keys: list[OffloadKey], use: RequestUse) -> None:
        """Note and report that the request uses the blocks of these keys, in prompt order, and uses
        all its earlier blocks again."""
        is_new = self._note_prompt(keys, use) or use.out_of_order
        self.settle()
        if is_new:
            self._policy.touch(use.keys, use.context)
        else:
            self._policy.renew(use.keys, use.context)

    def _note_prompt(self, keys: list[OffloadKey], use: RequestUse) -> bool:
        """Note the uses of a prompt. Returns True if there are new ones.

        Engines pass all keys of a prompt in every step. If nothing has changed since the last step,
        this takes one comparison of two lists.
        """
        generation = self._slots.generation
        if not use.keys:
            blocks = list(map(self._get, keys))
            use.all_here = all(blocks)
            generations = [block.generation if block is not None else 0 for block in blocks]
            use.keys = dict(zip(keys, generations, strict=True))
            use.seen_at = generation
            return bool(keys)
        is_new = False
        is_whole = len(use.keys) == len(keys) and list(use.keys) == keys
        if not is_whole:
            brought, num_brought = use.keys, len(use.keys)
            use.bring(dict.fromkeys(keys, 0))
            is_new = use.keys is not brought or len(use.keys) != num_brought
            is_whole = list(use.keys) == keys
        elif use.seen_at == generation:
            return False
        blocks = list(map(self._get, keys))
        is_new = _note_generations(use.keys, keys, blocks) or is_new
        if is_whole:
            use.seen_at = generation
            use.all_here = all(blocks)
        return is_new

    def wanted(self, new: list[OffloadKey], use: RequestUse) -> list[OffloadKey]:
        """The new keys of a request that the policy wants to be stored."""
        if not (new and self._may_decline):
            return new
        self.settle()
        return new[: self._policy.num_admitted(new, self._slots.num_free(), use.context)]

    def settle(self) -> None:
        """Report all uses noted since the last time to the policy."""
        for use in self.unsettled:
            if use.out_of_order:
                self._policy.touch(use.keys, use.context)
            else:
                self._policy.on_use(use.fresh, use.keys, use.context)
            use.fresh = []
            use.out_of_order = False
        self.unsettled = []

    def _expect_fresh(self, use: RequestUse) -> None:
        """Add the request to `unsettled`. Called before it gets its first fresh key."""
        if len(self.unsettled) >= _MAX_UNSETTLED:  # the engine does not report its steps
            self.settle()
        self.unsettled.append(use)


def _note_generations(
    known: dict[OffloadKey, int], keys: list[OffloadKey], blocks: list[BlockStatus | None]
) -> bool:
    """Note the generations of the blocks that exist. Returns True if one is new."""
    generations = [block.generation if block is not None else 0 for block in blocks]
    if generations == list(map(known.get, keys)):
        return False
    is_new = False
    for key, block in zip(keys, blocks, strict=True):
        if block is not None and known[key] != block.generation:
            known[key] = block.generation
            is_new = True
    return is_new
