"""Leases: pins on blocks in host memory, for the requests that are going to load them."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from math import inf
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from kvtier.base import OffloadKey, ReqContext
    from kvtier.tiering.primary import CPUPrimaryTierOffloadingManager
    from kvtier.tiering.request import TierRequest

_PREFETCH_KEPT_S = 60.0
"""Seconds for which blocks of a prefetch are kept from eviction, unless it ends earlier: the
request that needs them may never come."""


def are_for_prefetch(requests: Iterable[TierRequest]) -> bool | None:
    """Whether those of the requests that are in the engine's queue are all prefetches. None if none
    is there."""
    queued = [each.context.is_prefetch for each in requests if each.queued is not None]
    return all(queued) if queued else None


class _Lease:
    __slots__ = ("expires", "for_prefetch", "lasts_s", "num_blocks", "requests")

    def __init__(self, requests: set[TierRequest], num_blocks: int, lasts_s: float) -> None:
        self.requests = requests
        self.num_blocks = num_blocks
        self.lasts_s = lasts_s
        """Seconds for which it lasts once none of its requests is in the engine's queue."""
        self.expires = 0.0
        """Infinite while a request that somebody waits for is in the engine's queue."""
        self.for_prefetch: bool | None = None
        """`are_for_prefetch` of its requests."""


class Leases:
    """Pins on blocks, for the requests that are going to load them. Scheduler thread only.

    A lease ends when all of its requests have loaded the blocks or do not want them any more, or
    when its time is up.
    """

    def __init__(self, primary: CPUPrimaryTierOffloadingManager) -> None:
        self._primary = primary
        self._leases: dict[int, _Lease] = {}
        self._last_id = 0
        self.num_blocks = 0
        self.num_ahead = {False: 0, True: 0}
        """Blocks kept for requests in the engine's queue: for prefetches alone (True), or for
        others."""

    def __len__(self) -> int:
        return len(self._leases)

    def num_blocks_of(self, request: TierRequest) -> int:
        """Blocks that are leased to this request, and maybe to others as well."""
        return sum(self._leases[lease_id].num_blocks for lease_id in request.leases)

    def begin(
        self,
        keys: Sequence[OffloadKey],
        requests: Collection[TierRequest],
        context: ReqContext,
        now: float,
        lasts_s: float,
    ) -> int:
        """Pin readable blocks for these requests. `lasts_s`: how long, once none of them is in the
        engine's queue. Returns the lease's id."""
        self._last_id -= 1  # negative, because the primary tier also records jobs, by positive ids
        kept, _ = self._primary.prepare_read(self._last_id, keys, context)
        lease = _Lease(set(requests), len(kept), lasts_s)
        lease.expires = now + lasts_s
        self._leases[self._last_id] = lease
        self._settle(lease, now)
        self.num_blocks += len(kept)
        for request in requests:
            request.leases.add(self._last_id)
        return self._last_id

    def end_for(self, request: TierRequest) -> None:
        """The request does not need its leases any more."""
        for lease_id in list(request.leases):
            self.end_one(lease_id, request)

    def end_one(self, lease_id: int, request: TierRequest) -> None:
        """The request does not need this lease any more. It may have ended."""
        if lease_id not in request.leases:
            return
        request.leases.remove(lease_id)
        lease = self._leases[lease_id]
        lease.requests.remove(request)
        if not lease.requests:
            self._end(lease_id)

    def begin_to_expire(self, request: TierRequest, now: float) -> None:
        """The request has left the engine's queue."""
        for lease_id in request.leases:
            self._settle(self._leases[lease_id], now)

    def extend(self, request: TierRequest, now: float) -> None:
        """The engine has looked up the request again, and has not started it yet."""
        for lease_id in request.leases:
            lease = self._leases[lease_id]
            lease.expires = max(lease.expires, now + lease.lasts_s)

    def end_expired(self, now: float) -> None:
        """End leases whose time is up. The blocks stay, but may be evicted."""
        if self._leases:
            for lease_id in [i for i, lease in self._leases.items() if lease.expires <= now]:
                self._drop(lease_id)

    def end_all(self) -> None:
        """The cache was reset: leased blocks are not valid any more."""
        for lease_id in list(self._leases):
            self._drop(lease_id)

    def _settle(self, lease: _Lease, now: float) -> None:
        """Which of its requests are in the engine's queue decides how long a lease lasts."""
        for_prefetch = are_for_prefetch(lease.requests)
        if for_prefetch is lease.for_prefetch:
            return
        self._count(lease, -lease.num_blocks)
        lease.for_prefetch = for_prefetch
        self._count(lease, lease.num_blocks)
        if for_prefetch is None:
            lease.expires = now + lease.lasts_s
        else:
            lease.expires = now + _PREFETCH_KEPT_S if for_prefetch else inf

    def _count(self, lease: _Lease, num_blocks: int) -> None:
        if lease.for_prefetch is not None:
            self.num_ahead[lease.for_prefetch] += num_blocks

    def _drop(self, lease_id: int) -> None:
        for request in self._leases[lease_id].requests:
            request.leases.discard(lease_id)
        self._end(lease_id)

    def _end(self, lease_id: int) -> None:
        lease = self._leases.pop(lease_id)
        self.num_blocks -= lease.num_blocks
        self._count(lease, -lease.num_blocks)
        self._primary.complete_read(lease_id)
