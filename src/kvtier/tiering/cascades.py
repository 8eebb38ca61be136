"""Sends what is in the primary tier down to the tiers below."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Sequence
from typing import TYPE_CHECKING

from kvtier.tiering.write_policy import WriteMoment

if TYPE_CHECKING:
    from kvtier.base import OffloadKey
    from kvtier.cpu.policies.base import BlockStatus
    from kvtier.tiering.link import TierLink
    from kvtier.tiering.primary import CPUPrimaryTierOffloadingManager
    from kvtier.tiering.request import TierRequest
    from kvtier.tiering.transfers import TransferFactory


class Cascades:
    """Asks each tier's write policy, pins the blocks, submits one job. Scheduler thread only."""

    def __init__(
        self,
        primary: CPUPrimaryTierOffloadingManager,
        transfers: TransferFactory,
        clock: Callable[[], float],
    ) -> None:
        self._primary = primary
        self._transfers = transfers
        self._clock = clock
        self.parked: dict[OffloadKey, dict[tuple[TierRequest, TierLink], None]] = {}
        """Blocks that tiers want which want whole requests, once someone else has written them."""

    def store(self, keys: Collection[OffloadKey], success: bool, request: TierRequest) -> None:
        """A store by the device has ended: its blocks go to every tier of the request."""
        in_order = _take_prepared(request.prepared, keys)
        stored = self._primary.finish_store(in_order, request.context, success)
        if stored and request.links:
            if len(stored) < len(in_order):
                in_order = [block.key for block in stored]
            self._send(in_order, request.links, WriteMoment.STORED, request, stored)

    def offer_again(self, keys: Sequence[OffloadKey], request: TierRequest) -> None:
        """A request brings blocks that are there already, or that someone else is writing: they go
        to its tiers that want whole requests."""
        ready = []
        for key in keys:
            if self._primary.is_ready(key):
                ready.append(key)
            elif self._primary.has(key):
                waiting = self.parked.setdefault(key, {})
                for link in request.request_level:
                    if (request, link) not in waiting:
                        waiting[request, link] = None
                        request.num_parked += 1
        if ready:
            self._send(ready, request.request_level, WriteMoment.HIT, request)

    def send_parked(self, keys: Iterable[OffloadKey]) -> Iterable[TierRequest]:
        """These blocks have been written, or will not be. Returns the requests that waited."""
        by_target: dict[tuple[TierRequest, TierLink], list[OffloadKey]] = {}
        for key in keys:
            for target in self.parked.pop(key, ()):
                by_target.setdefault(target, []).append(key)
        for (request, link), parked in by_target.items():
            request.num_parked -= len(parked)
            ready = [key for key in parked if self._primary.is_ready(key)]
            if ready and link in request.links:
                self._send(ready, (link,), WriteMoment.HIT, request)
        return dict.fromkeys(request for request, _ in by_target)

    def _send(
        self,
        keys: Sequence[OffloadKey],
        links: Iterable[TierLink],
        moment: WriteMoment,
        request: TierRequest,
        blocks: list[BlockStatus] | None = None,
    ) -> None:
        """Send blocks that can be read to tiers, one job for each. `blocks`: those of `keys`, if
        they are at hand."""
        context = request.context
        # Not the time of the step: that may have begun long before.
        now = self._clock()
        for link in links:
            chosen = link.write_policy.select(keys, moment, context)
            n = link.num_storable(len(chosen), now) if chosen else 0
            if not n:
                continue
            if n < len(chosen):
                chosen = chosen[:n]
            job_id = self._transfers.new_id()
            at_hand = blocks if chosen is keys else None
            kept, spec = self._primary.prepare_read(job_id, chosen, context, at_hand)
            link.submit_store(self._transfers.make(job_id, kept, spec, False, context), now)


def _take_prepared(
    prepared: dict[OffloadKey, list[OffloadKey]], keys: Collection[OffloadKey]
) -> Sequence[OffloadKey]:
    """The store that has ended, in prompt order; `keys`, if it is not clear which one has."""
    ended = keys if isinstance(keys, (set, frozenset)) else set(keys)
    for first, store in prepared.items():
        if first in ended and len(store) == len(ended) and ended.issuperset(store):
            del prepared[first]
            return store
    # Some of several stores: what is left of each is still to come. The lists are the engine's as
    # well, and stay as they are.
    for store in list(prepared.values()):
        if not ended.isdisjoint(store):
            del prepared[store[0]]
            left = [key for key in store if key not in ended]
            if left:
                prepared[left[0]] = left
    return list(keys)
