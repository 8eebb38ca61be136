"""LRU (least recently used); blocks of one request stay together."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence, Set
from typing import TYPE_CHECKING

from kvtier.cpu.policies.base import BlockStatus
from kvtier.cpu.policies.recency import RecencyList, RunKeepingPolicy, move, move_all

if TYPE_CHECKING:
    from kvtier.base import OffloadKey, ReqContext


class LRUCachePolicy(RunKeepingPolicy):
    """Evicts the blocks whose last use is longest ago; of one request, its last block first."""

    def __init__(self, cache_capacity: int) -> None:
        super().__init__(cache_capacity)
        self._order = RecencyList()
        self._storing: str | None = None
        """The request that stores next; its blocks are not evicted."""

    def insert(self, key: OffloadKey, block: BlockStatus) -> None:
        self.blocks[key] = block
        self._order.append_new(None, {key: block})
        if block.ref_cnt == 0:
            block.place.idle += 1

    def on_store_miss(self, keys: Sequence[OffloadKey], req_context: ReqContext) -> None:
        self._storing = req_context.req_id

    def insert_run(
        self,
        keys: Sequence[OffloadKey],
        blocks: Sequence[BlockStatus],
        brought: Collection[OffloadKey],
        req_context: ReqContext,
    ) -> None:
        new = dict(zip(keys, blocks, strict=True))
        self.blocks.update(new)
        had_run = self._order.run_of(req_context.req_id) is not None
        self._order.append_new(req_context.req_id, new)
        if not had_run and len(brought) > len(keys):
            # The blocks that the request used earlier are in other runs. Move them into its run.
            self.touch(brought, req_context)

    def remove(self, key: OffloadKey) -> None:
        self._order.discard(key, self.blocks.pop(key))

    def touch(self, keys: Iterable[OffloadKey], req_context: ReqContext) -> None:
        keys = list(keys)
        order = self._order
        own = order.run_of(req_context.req_id)
        if order.refresh_if_exactly(own, keys):
            return
        if own is None:
            if order.take_over(req_context.req_id, keys, self.blocks):
                return
        elif order.refresh_if_tail(own, keys, self.blocks):
            return
        run, former = order.reopen_run(req_context.req_id)
        move_all(keys, self.blocks, run)
        if former is not None:
            move_all(list(former.blocks), self.blocks, run)
        order.close_if_empty(run)

    def on_use(
        self,
        keys: Sequence[OffloadKey],
        brought: Collection[OffloadKey],
        req_context: ReqContext,
    ) -> None:
        run = self._order.run_of(req_context.req_id)
        if run is None:
            self.touch(brought, req_context)  # see `insert_run`
            return
        for key in keys:
            block = self.blocks.get(key)
            if block is None or block.place is run:
                continue
            if block.place.age < run.age:
                move(key, block, run)
            else:
                run.scattered = True

    def renew(self, keys: Collection[OffloadKey], req_context: ReqContext) -> None:
        run = self._order.run_of(req_context.req_id)
        if run is not None and not run.scattered:
            self._order.refresh(run)
        else:
            self.touch(keys, req_context)

    def on_request_finished(self, keys: Collection[OffloadKey], req_context: ReqContext) -> None:
        self.renew(keys, req_context)
        self._order.retire(req_context.req_id)

    def evict(
        self, n: int, protected: Set[OffloadKey]
    ) -> list[tuple[OffloadKey, BlockStatus]] | None:
        victims = self._order.select(n, protected, self._storing)
        self._storing = None
        if len(victims) < n:
            return None
        self._order.discard_selected(victims)
        blocks = self.blocks
        for key, _ in victims:
            del blocks[key]
        return victims

    def next_to_leave(self, n: int) -> list[tuple[OffloadKey, BlockStatus]]:
        return self._order.select(n, frozenset())

    def clear(self) -> None:
        self._storing = None
        self.blocks.clear()
        self._order.clear()
