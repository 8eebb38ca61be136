"""Looks ahead: promotes the blocks of requests that still wait in the engine's queue.

An engine looks up a request only when it is about to start it, which on a busy engine is long after
its arrival. So at the end of each step, `LookAhead` looks up requests that the engine has queued
and has not looked up yet, in the order in which they will probably start. What a tier has is
promoted, by the same rule as for other requests, and leased to the request until it starts or ends.

A request that the rule lets compute is asked again later, because the tier may be less busy by
then. The engine's own lookup decides in the end: a load that has not begun may become computing.
"""

from __future__ import annotations

import logging
from bisect import insort
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from itertools import chain, islice, takewhile
from math import inf
from typing import TYPE_CHECKING

from kvtier.tiering.leases import are_for_prefetch

if TYPE_CHECKING:
    from kvtier.base import OffloadKey
    from kvtier.tiering.lookup import Lookup
    from kvtier.tiering.primary import CPUPrimaryTierOffloadingManager
    from kvtier.tiering.promotion import Promotions
    from kvtier.tiering.request import Step, TierRequest

logger = logging.getLogger(__name__)

_SHARE, _PREFETCH_SHARE = 1 / 4, 1 / 8
"""Share of the slots that may hold blocks promoted for queued requests, and for prefetches."""
_MOST_IN_STEP, _MOST_BLOCKS_IN_STEP = 4, 2048
"""Limits on one step: requests that are looked up ahead, each of which takes as long as a lookup by
the engine, and their blocks. The last one may exceed the limit."""
_MOST_CONSIDERED = 64
"""Only these first requests of the queue are looked up ahead: the others start much later."""
_AGAIN_S, _LONGEST_PAUSE_S = 0.1, 1.6
"""Seconds until a request that should compute is looked up again. They double each time, up to the
longest pause: in a long queue, lookups in vain would take the engine's time."""


class Queued:
    """A request in the engine's queue. `LookAhead` makes it; `Promotions` tells it what becomes of
    its blocks."""

    __slots__ = (
        "_ahead",
        "_pause_s",
        "again_at",
        "find_blocks",
        "is_being_looked_up",
        "kept_lease",
        "rank",
        "request",
        "room",
    )

    def __init__(
        self,
        ahead: LookAhead,
        request: TierRequest,
        find_blocks: Callable[[], Sequence[OffloadKey]],
        rank: tuple[bool, int],
    ) -> None:
        self._ahead = ahead
        self._pause_s = _AGAIN_S
        self.request = request
        self.find_blocks = find_blocks
        """Returns the blocks that the request will look up."""
        self.rank = rank
        """Requests with a lower rank come first: those that somebody waits for, then by priority.
        Among requests of one rank, the earliest comes first."""
        self.again_at = -inf
        """When to look it up again; infinite if there is nothing left to do for it."""
        self.is_being_looked_up = False
        """True while `LookAhead` looks it up."""
        self.kept_lease: int | None = None
        """The lease on blocks that were in host memory already."""
        self.room = 0
        """The most slots that it may get now."""

    def look_up_next(self) -> None:
        """Look it up again in the next step."""
        self.again_at = -inf
        self._pause_s = _AGAIN_S

    def look_up_later(self, now: float) -> None:
        """The request should rather compute, as things are now, or there is no room for more."""
        self.again_at = now + self._pause_s
        self._pause_s = min(2 * self._pause_s, _LONGEST_PAUSE_S)

    def leave(self) -> None:
        """The engine has looked up the request, has started it or has ended it. Its wait for tiers
        begins now, and its leases last no longer than those of other requests."""
        self._ahead.leave(self)


class LookAhead:
    """The requests in the engine's queue. Scheduler thread only."""

    def __init__(
        self,
        primary: CPUPrimaryTierOffloadingManager,
        lookup: Lookup,
        promotions: Promotions,
        step: Step,
    ) -> None:
        self._primary = primary
        self._lookup = lookup
        self._promotions = promotions
        self._step = step
        self._most_blocks = {
            False: int(primary.num_blocks * _SHARE),
            True: int(primary.num_blocks * _PREFETCH_SHARE),
        }
        """Slots that prefetches may have (True), and those that other requests may have."""
        self._ranks: list[tuple[bool, int]] = []
        """The ranks of all requests in the queue, in order."""
        self._by_rank: dict[tuple[bool, int], dict[Queued, None]] = {}
        """By rank: requests in the order of their arrival."""
        self._by_id: dict[str, Queued] = {}
        self._has_failed = False
        """True once a `find_blocks` of the engine has raised."""

    def __len__(self) -> int:
        return len(self._by_id)

    def enter(
        self,
        request: TierRequest,
        find_blocks: Callable[[], Sequence[OffloadKey]],
        priority: int,
    ) -> None:
        """The engine has queued a request."""
        if request.queued is not None:
            self.leave(request.queued)
        if not request.sources.all:
            return
        rank = request.context.is_prefetch, priority
        queued = request.queued = Queued(self, request, find_blocks, rank)
        self._by_id[request.context.req_id] = queued
        if rank not in self._by_rank:
            self._by_rank[rank] = {}
            insort(self._ranks, rank)
        self._by_rank[rank][queued] = None

    def leave(self, queued: Queued) -> None:
        """See `Queued.leave`."""
        request = queued.request
        del self._by_id[request.context.req_id]
        same_rank = self._by_rank[queued.rank]
        del same_rank[queued]
        if not same_rank:
            del self._by_rank[queued.rank]
            self._ranks.remove(queued.rank)
        request.queued = None
        request.wait.end()
        request.sources.declined = set()  # the engine's lookup decides anew
        self._promotions.leases.begin_to_expire(request, self._step.now)

    def end_step(self, started: Collection[str]) -> None:
        """Look up the first requests in the queue, unless their answers are known. Called at the
        end of each step, before promotions are sent. `started`: requests that the engine has
        started, maybe without a lookup."""
        if not self._by_id:
            return
        for req_id in started:
            queued = self._by_id.get(req_id)
            if queued is not None:
                queued.leave()
        room = self._room()
        num_blocks = 0
        for queued in list(islice(self._due(room), _MOST_IN_STEP)):
            is_prefetch = queued.request.context.is_prefetch
            queued.room = room[is_prefetch]
            if queued.room > 0 and num_blocks < _MOST_BLOCKS_IN_STEP:
                keys = self._blocks_of(queued)
                num_blocks += len(keys)
                room[is_prefetch] -= self._look_up(keys, queued)

    def has_some_to_look_up(self) -> bool:
        """True if the next step looks up a request."""
        return bool(self._by_id) and any(self._due(self._room()))

    def _room(self) -> dict[bool, int]:
        """Slots that prefetches may get now (True), and those that other requests may get."""
        promotions, room = self._promotions, dict(self._most_blocks)
        for is_prefetch, num_kept in promotions.leases.num_ahead.items():
            room[is_prefetch] -= num_kept
        for job in promotions.jobs.values():
            for_prefetch = are_for_prefetch(job.wanters)
            if for_prefetch is not None:
                room[for_prefetch] -= len(job.transfer.keys)
        return room

    def _due(self, room: Mapping[bool, int]) -> Iterator[Queued]:
        """The requests to look up now, in order."""
        now = self._step.now
        in_order = chain.from_iterable(self._by_rank[rank] for rank in self._ranks)
        for queued in islice(in_order, _MOST_CONSIDERED):
            if now >= queued.again_at and room[queued.request.context.is_prefetch] > 0:
                yield queued

    def _look_up(self, keys: Sequence[OffloadKey], queued: Queued) -> int:
        """Look up a request as the engine would. Returns how many slots it gets: for blocks to
        promote, and for those that are in host memory already."""
        request = queued.request
        request.wait.end()  # it waits for the engine, not for tiers
        queued.again_at = inf
        if not keys:
            return 0
        queued.is_being_looked_up = True
        num_hits, _ = self._lookup.prefix(keys, request)
        queued.is_being_looked_up = False
        request.sources.declined = set()
        if request.wait.asking:
            queued.look_up_next()  # a tier answers later
        num_kept = self._keep(keys[:num_hits], queued)
        num_wanted = request.wanted.num_blocks
        if num_wanted >= queued.room:
            queued.look_up_later(self._step.now)  # there may be more
        return num_wanted + num_kept

    def _keep(self, hits: Sequence[OffloadKey], queued: Queued) -> int:
        """Keep the leading blocks of these from eviction, as far as they are readable and there is
        room. Replaces what an earlier call has kept for the request. Returns how many are kept."""
        request, leases = queued.request, self._promotions.leases
        if queued.kept_lease is not None:
            leases.end_one(queued.kept_lease, request)
            queued.kept_lease = None
        most = max(0, queued.room - request.wanted.num_blocks)
        ready = islice(takewhile(self._primary.is_ready, hits), most)
        kept = [key for key in ready if key not in request.brought_up]  # the others have a lease
        if kept:
            lasts_s = request.wait.longest_s
            queued.kept_lease = leases.begin(
                kept, [request], request.context, self._step.now, lasts_s
            )
        return len(kept)

    def _blocks_of(self, queued: Queued) -> Sequence[OffloadKey]:
        """The blocks that the request will look up; none if the engine's function fails."""
        try:
            return queued.find_blocks()
        except Exception:
            if not self._has_failed:
                self._has_failed = True
                logger.exception(
                    "The engine cannot say which blocks a queued request will look up, so they are "
                    "not brought up before it asks for them. Further failures are not logged."
                )
            return ()
