"""Sends what is in the primary tier down to the tiers below."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Sequence
from typing import TYPE_CHECKING

from kvtier.tiering.write_policy import WriteMoment

if TYPE_CHECKING:
    from kvtier.base import OffloadKey
    from kvtier.cpu.policies.base import BlockStatus
    from kvtier.tiering.jobs import Job
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

    def offer_used(self, used: Sequence[OffloadKey], link: TierLink, request: TierRequest) -> None:
        """A request that used these blocks has ended: what the tier lacks of them goes to it, as
        far as it may. The rest is not kept for later: the next request that uses it offers it."""
        if not link.takes_offers:
            return
        missing = link.missing(used, request.context)
        ready = [key for key in missing if self._primary.is_ready(key)]
        if not ready:
            return
        chosen = link.write_policy.select(ready, WriteMoment.USED, request.context)
        now = self._clock()
        part = chosen[: link.num_offerable(now)]
        link.count("held_back_blocks", len(chosen) - len(part))
        if part:
            link.count("offered_again_blocks", len(part))
            link.note_offer(self._submit(part, link, request, now), now)

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

    def send_backlog(self, link: TierLink) -> Iterable[TierRequest]:
        """Once in a step: what waits for a tier is sent, as far as it may. Returns the requests
        whose blocks do not wait any more."""
        now = self._clock()
        served: dict[TierRequest, None] = {}
        while link.backlog:
            if link.stands_still or not link.lets_store(now):
                reason = "dropped_blocks" if link.stands_still else "shed_blocks"
                return served | dict.fromkeys(self.drop_backlog(link, reason))
            n = link.num_storable
            if not n:
                break
            keys, request = _take_first(link, n)
            served[request] = None
            ready = []
            if link in request.links:  # else it was told that the request has ended
                ready = [key for key in keys if self._primary.is_ready(key)]
            link.count("dropped_blocks", len(keys) - len(ready))
            if ready:
                self._submit(ready, link, request, now)
        while (excess := link.num_waiting - self._primary.num_blocks) > 0:
            # More than can be in host memory: some are gone, and the oldest are the first to go.
            keys, request = _take_first(link, excess)
            served[request] = None
            link.count("dropped_blocks", len(keys))
        return served

    def drop_backlog(self, link: TierLink, reason: str = "dropped_blocks") -> Iterable[TierRequest]:
        """What waits for a tier will not be stored, and is counted under this name. Returns the
        requests that had blocks there."""
        requests: dict[TierRequest, None] = {}
        for keys, request in link.backlog:
            request.num_parked -= len(keys)
            requests[request] = None
        link.count(reason, link.num_waiting)
        link.backlog.clear()
        link.num_waiting = 0
        return requests

    def _send(
        self,
        keys: Sequence[OffloadKey],
        links: Iterable[TierLink],
        moment: WriteMoment,
        request: TierRequest,
        blocks: list[BlockStatus] | None = None,
    ) -> None:
        """Send blocks that can be read to tiers. `blocks`: those of `keys`, if they are at hand."""
        # Not the time of the step: that may have begun long before.
        now = self._clock()
        for link in links:
            chosen = link.write_policy.select(keys, moment, request.context)
            at_hand = blocks if chosen is keys else None
            num_sent = 0
            while num_sent < len(chosen):
                if not link.lets_store(now):
                    link.count("shed_blocks", len(chosen) - num_sent)
                    break
                n = 0 if link.backlog else link.num_storable
                if not n:
                    self._let_wait(chosen[num_sent:], link, request)
                    break
                if num_sent or n < len(chosen):
                    part = chosen[num_sent : num_sent + n]
                    parts = at_hand[num_sent : num_sent + n] if at_hand is not None else None
                    self._submit(part, link, request, now, parts)
                else:
                    self._submit(chosen, link, request, now, at_hand)
                num_sent += n

    def _submit(
        self,
        keys: Sequence[OffloadKey],
        link: TierLink,
        request: TierRequest,
        now: float,
        blocks: list[BlockStatus] | None = None,
    ) -> Job:
        """Pin blocks, and give them to a tier in one job."""
        context = request.context
        job_id = self._transfers.new_id()
        kept, spec = self._primary.prepare_read(job_id, keys, context, blocks)
        job = link.submit_store(self._transfers.make(job_id, kept, spec, False, context), now)
        if job.is_done:
            self._primary.complete_read(job_id)
        return job

    def _let_wait(self, keys: Sequence[OffloadKey], link: TierLink, request: TierRequest) -> None:
        """A tier's stores pin their share: these blocks are sent when some have ended. They are not
        kept for that: whoever needs their slots gets them."""
        if link.stands_still:
            link.count("dropped_blocks", len(keys))
            return
        link.backlog.append((keys, request))
        link.num_waiting += len(keys)
        request.num_parked += len(keys)


def _take_first(link: TierLink, most: int) -> tuple[Sequence[OffloadKey], TierRequest]:
    """Blocks of one request that wait for a tier no longer: the first ones, at most so many."""
    keys, request = link.backlog.popleft()
    if most < len(keys):
        link.backlog.appendleft((keys[most:], request))
        keys = keys[:most]
    link.num_waiting -= len(keys)
    request.num_parked -= len(keys)
    return keys, request


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
