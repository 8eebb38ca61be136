"""Promoted blocks are kept for the requests that wanted them, for a while."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from kvtier.base import OffloadKey, ReqContext
    from kvtier.tiering.primary import CPUPrimaryTierOffloadingManager
    from kvtier.tiering.request import TierRequest


class _Lease:
    __slots__ = ("expires", "num_blocks", "requests")

    def __init__(self, requests: set[TierRequest], num_blocks: int, expires: float) -> None:
        self.requests = requests
        self.num_blocks = num_blocks
        self.expires = expires


class Leases:
    """Pins on promoted blocks that nobody reads yet. Scheduler thread only."""

    def __init__(self, primary: CPUPrimaryTierOffloadingManager) -> None:
        self._primary = primary
        self._leases: dict[int, _Lease] = {}
        self._last_id = 0
        self.num_blocks = 0

    def __len__(self) -> int:
        return len(self._leases)

    def num_blocks_of(self, request: TierRequest) -> int:
        """Blocks that are kept for this request, and maybe for others as well."""
        return sum(self._leases[lease_id].num_blocks for lease_id in request.leases)

    def begin(
        self,
        keys: Sequence[OffloadKey],
        requests: Collection[TierRequest],
        context: ReqContext,
        expires: float,
    ) -> None:
        """Keep blocks until all of these requests have loaded them or given up."""
        self._last_id -= 1  # below zero: jobs are numbered upwards
        kept, _ = self._primary.prepare_read(self._last_id, keys, context)
        self._leases[self._last_id] = _Lease(set(requests), len(kept), expires)
        self.num_blocks += len(kept)
        for request in requests:
            request.leases.add(self._last_id)

    def end_for(self, request: TierRequest) -> None:
        """The request needs no lease any more."""
        for lease_id in request.leases:
            lease = self._leases[lease_id]
            lease.requests.remove(request)
            if not lease.requests:
                self._end(lease_id)
        request.leases = set()

    def end_expired(self, now: float) -> None:
        """End what nobody came for in time. The blocks stay, but may be evicted."""
        if self._leases:
            for lease_id in [i for i, lease in self._leases.items() if lease.expires <= now]:
                self._drop(lease_id)

    def end_all(self) -> None:
        """End all of them: what they keep is not valid any more."""
        for lease_id in list(self._leases):
            self._drop(lease_id)

    def _drop(self, lease_id: int) -> None:
        for request in self._leases[lease_id].requests:
            request.leases.discard(lease_id)
        self._end(lease_id)

    def _end(self, lease_id: int) -> None:
        self.num_blocks -= self._leases.pop(lease_id).num_blocks
        self._primary.complete_read(lease_id)
