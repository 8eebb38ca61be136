"""ARC, the Adaptive Replacement Cache (Megiddo and Modha, FAST 2003), changed to keep the blocks of
one request together."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Collection, Iterable, Sequence, Set
from typing import TYPE_CHECKING, TypeAlias

from kvtier.cpu.policies.base import BlockStatus
from kvtier.cpu.policies.recency import RecencyList, RunKeepingPolicy, move

if TYPE_CHECKING:
    from kvtier.base import OffloadKey, ReqContext


_Pair: TypeAlias = "tuple[OffloadKey, BlockStatus]"


class ARCCachePolicy(RunKeepingPolicy):
    """Balances recency (`t1`) against frequency (`t2`). Evicted keys that are stored again show
    which of the two lists was too small.

    `t1` holds blocks that one request has used, `t2` blocks that several requests have used. `b1`
    and `b2` hold the keys that were evicted from `t1` and `t2`. A store of a key in `b1` shows that
    `t1` was too small, so `target_t1_size` grows; a store of a key in `b2` shows that `t2` was too
    small, so `target_t1_size` shrinks. In both cases the block enters `t2`, because it was used
    twice. As in the paper, `t1` and `b1` together hold at most `cache_capacity` keys, and all four
    lists at most twice as many.

    A request counts once for each block, even if it uses the block several times.
    """

    def __init__(self, cache_capacity: int) -> None:
        super().__init__(cache_capacity)
        self.t1 = RecencyList()
        self.t2 = RecencyList()
        self.b1: OrderedDict[OffloadKey, None] = OrderedDict()
        self.b2: OrderedDict[OffloadKey, None] = OrderedDict()
        self.target_t1_size = 0.0
        self._incoming: Sequence[OffloadKey] = ()
        """Keys of the store under way, until `_replace` has read them."""
        self._returning: set[OffloadKey] = set()
        """Keys of the store under way that were in `b1` or `b2`."""
        self._storing: str | None = None
        """The request that stores next; its blocks are not evicted."""

    def insert(self, key: OffloadKey, block: BlockStatus) -> None:
        self._incoming = (key,)
        self._replace([], [], 0)
        self.blocks[key] = block
        target = self.t2 if key in self._returning else self.t1
        target.append_new(None, {key: block})
        if block.ref_cnt == 0:
            block.place.idle += 1
        self._bound_ghosts()

    def on_store_miss(self, keys: Sequence[OffloadKey], req_context: ReqContext) -> None:
        self._incoming = keys
        self._storing = req_context.req_id

    def insert_run(
        self,
        keys: Sequence[OffloadKey],
        blocks: Sequence[BlockStatus],
        brought: Collection[OffloadKey],
        req_context: ReqContext,
    ) -> None:
        if self._incoming:
            self._replace([], [], 0)
        new = dict(zip(keys, blocks, strict=True))
        self.blocks.update(new)
        owner = req_context.req_id
        overtakes = bool(self._returning) and self.t2.run_of(owner) is None
        if self._returning:
            again = {key: block for key, block in new.items() if key in self._returning}
            self.t2.append_new(owner, again)
            new = {key: block for key, block in new.items() if key not in again}
        if new:
            self.t1.append_new(owner, new)
        self._bound_ghosts()
        if overtakes and len(brought) > len(keys):
            # The request's earlier blocks are in other runs (a run: blocks of one request that are
            # equally recent). Make them as recent as its new blocks.
            self.touch(brought, req_context)

    def remove(self, key: OffloadKey) -> None:
        block = self.blocks.pop(key)
        block.place.recency.discard(key, block)

    def touch(self, keys: Iterable[OffloadKey], req_context: ReqContext) -> None:
        owner = req_context.req_id
        keys = list(keys)
        if self.t2.run_of(owner) is None and self.t1.refresh_if_exactly(
            self.t1.run_of(owner), keys
        ):
            return
        is_first = self.t1.run_of(owner) is None and self.t2.run_of(owner) is None
        if is_first and self.t2.take_over(owner, keys, self.blocks):
            return
        run1, former1 = self.t1.reopen_run(owner)
        run2, former2 = self.t2.reopen_run(owner)
        for key in keys:
            block = self.blocks.get(key)
            if block is None or block.place is run1 or block.place is run2:
                continue
            # Blocks that this request stored stay in `t1`: no other request has used them.
            move(key, block, run1 if block.place is former1 else run2)
        for former, run in ((former1, run1), (former2, run2)):
            if former is not None:
                for key, block in list(former.blocks.items()):
                    move(key, block, run)
            run.recency.close_if_empty(run)

    def on_use(
        self,
        keys: Sequence[OffloadKey],
        brought: Collection[OffloadKey],
        req_context: ReqContext,
    ) -> None:
        run = self.t2.run_of(req_context.req_id)
        if run is None:
            # A new run for `keys` alone would be more recent than the request's earlier blocks.
            self.touch(brought, req_context)
            return
        own_t1 = self.t1.run_of(req_context.req_id)
        for key in keys:
            block = self.blocks.get(key)
            if block is None or block.place is own_t1 or block.place is run:
                continue
            if block.place.recency is self.t1 or block.place.age < run.age:
                move(key, block, run)
            else:
                run.scattered = True

    def renew(self, keys: Collection[OffloadKey], req_context: ReqContext) -> None:
        owner = req_context.req_id
        runs = [run for run in (self.t1.run_of(owner), self.t2.run_of(owner)) if run is not None]
        if runs and not any(run.scattered for run in runs):
            for run in runs:
                run.recency.refresh(run)
        else:
            self.touch(keys, req_context)

    def on_request_finished(self, keys: Collection[OffloadKey], req_context: ReqContext) -> None:
        self.renew(keys, req_context)
        self.t1.retire(req_context.req_id)
        self.t2.retire(req_context.req_id)

    def evict(
        self, n: int, protected: Set[OffloadKey]
    ) -> list[tuple[OffloadKey, BlockStatus]] | None:
        from_t1 = self.t1.select(n, protected, self._storing)
        from_t2 = self.t2.select(n, protected, self._storing)
        self._storing = None
        if len(from_t1) + len(from_t2) < n:
            return None
        num_from_t1 = self._replace(from_t1, from_t2, n)
        del from_t1[num_from_t1:]
        del from_t2[n - num_from_t1 :]
        self.t1.discard_selected(from_t1)
        self.t2.discard_selected(from_t2)
        victims = from_t1 + from_t2
        for key, _ in victims:
            del self.blocks[key]
        return victims

    def next_to_leave(self, n: int) -> list[_Pair]:
        from_t1 = self.t1.select(n, frozenset())
        from_t2 = self.t2.select(n, frozenset())
        # `_replace_for_new`, if one new block after the other is stored: `t1` keeps its size while
        # it gives one for each that it gets.
        num_first = max(int(self.target_t1_size) + 1 - len(self.t1), 0)
        return [*from_t2[:num_first], *from_t1, *from_t2[num_first:]][:n]

    def clear(self) -> None:
        self.blocks.clear()
        self.t1.clear()
        self.t2.clear()
        self.b1.clear()
        self.b2.clear()
        self._incoming = ()
        self._storing = None
        self._returning.clear()
        self.target_t1_size = 0.0

    def _replace(self, from_t1: list[_Pair], from_t2: list[_Pair], n: int) -> int:
        """Decide how many of `n` victims come from `t1`, and add their keys to `b1` and `b2`.

        `from_t1`, `from_t2`: candidates, in order of eviction. Incoming keys are handled from the
        end of the prompt to its start. The `n` keys handled last, at the start of the prompt, each
        replace a block; the keys handled before them get free slots.
        """
        incoming = self._incoming
        self._incoming = ()
        self._returning = set()
        room = max(len(incoming) - n, 0)
        if self.b1.keys().isdisjoint(incoming) and self.b2.keys().isdisjoint(incoming):
            return self._replace_for_new(from_t1, from_t2, n, room)
        return self._replace_one_by_one(from_t1, from_t2, incoming, room)

    def _replace_for_new(
        self, from_t1: list[_Pair], from_t2: list[_Pair], n: int, room: int
    ) -> int:
        """Do `_replace_one_by_one` in one pass, for keys that are in neither `b1` nor `b2`.

        The target does not change, and all new blocks enter `t1`. So blocks are evicted from `t2`
        until `t1` is larger than its target, and from `t1` after that.
        """
        below_target = int(self.target_t1_size) + 1 - len(self.t1) - room
        num_from_t2 = min(n, max(below_target, 0), len(from_t2))
        num_from_t1 = min(n - num_from_t2, len(from_t1))
        for key, _ in from_t1[:num_from_t1]:
            self.b1[key] = None
        for key, _ in from_t2[: n - num_from_t1]:
            self.b2[key] = None
        return num_from_t1

    def _replace_one_by_one(
        self,
        from_t1: list[_Pair],
        from_t2: list[_Pair],
        incoming: Sequence[OffloadKey],
        room: int,
    ) -> int:
        """The paper's procedure, for one key after the other, from the end of the prompt."""
        b1, b2, capacity = self.b1, self.b2, self.cache_capacity
        t1_size, t2_size = len(self.t1), len(self.t2)
        num_from_t1 = num_from_t2 = 0
        for key in reversed(incoming):
            was_in_b1, was_in_b2 = key in b1, key in b2
            if was_in_b1:
                step = max(1.0, len(b2) / len(b1))
                self.target_t1_size = min(self.target_t1_size + step, float(capacity))
                del b1[key]
            elif was_in_b2:
                step = max(1.0, len(b1) / len(b2))
                self.target_t1_size = max(self.target_t1_size - step, 0.0)
                del b2[key]
            elif t1_size + len(b1) >= capacity:
                if b1:
                    b1.popitem(last=False)
            elif b2 and t1_size + t2_size + len(b1) + len(b2) >= 2 * capacity:
                b2.popitem(last=False)

            if room > 0:
                room -= 1
            else:
                target = self.target_t1_size
                t1_gives = t1_size > target or (was_in_b2 and t1_size == int(target) > 0)
                if num_from_t2 == len(from_t2) or (t1_gives and num_from_t1 < len(from_t1)):
                    b1[from_t1[num_from_t1][0]] = None
                    num_from_t1 += 1
                    t1_size -= 1
                else:
                    b2[from_t2[num_from_t2][0]] = None
                    num_from_t2 += 1
                    t2_size -= 1
            if was_in_b1 or was_in_b2:
                self._returning.add(key)
                t2_size += 1
            else:
                t1_size += 1
        return num_from_t1

    def _bound_ghosts(self) -> None:
        """Drop the oldest keys of `b1` and `b2` beyond the paper's limits."""
        b1, b2, capacity = self.b1, self.b2, self.cache_capacity
        for _ in range(min(len(b1), len(self.t1) + len(b1) - capacity)):
            b1.popitem(last=False)
        for _ in range(len(self.blocks) + len(b1) + len(b2) - 2 * capacity):
            (b2 or b1).popitem(last=False)
