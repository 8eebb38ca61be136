"""A model of an engine: requests that share prompts, looked up, loaded, computed and stored.

It calls the manager in the order in which vLLM does (see tests/data/vllm_calls), and does at random
what a real engine does too: preempt, abort, reset, run out of room, take long steps.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

from kvtier.base import (
    BlockIDsLoadStoreSpec,
    Locality,
    LookupResult,
    Medium,
    OffloadKey,
    OffloadPolicy,
    ReqContext,
    TierFilter,
    TierMatcher,
)
from kvtier.tiering.manager import GroupShape
from tests.tiering.simulation.calls import WatchedCalls
from tests.tiering.simulation.device import Device
from tests.tiering.simulation.request import (
    TOKENS_PER_CHUNK,
    Group,
    Phase,
    PromptTree,
    Request,
)
from tests.tiering.simulation.world import World

_FILTERS = (
    TierFilter(),
    TierFilter((TierMatcher(Medium.STORAGE),)),
    TierFilter((TierMatcher(Medium.CPU),)),
    TierFilter((TierMatcher(locality=Locality.LOCAL),)),
    TierFilter((TierMatcher(Medium.CPU), TierMatcher(Medium.STORAGE, Locality.REMOTE))),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Habits:
    """The habits of an engine. Rates are per step or per request."""

    groups: Sequence[Group]
    max_requests: int
    arrivals: float
    """Rate of new requests while there is room."""
    num_own_chunks: int
    """The longest part of a prompt that no other prompt shares."""
    chunks_per_step: int
    step_scale: float
    """Typical seconds of a step."""
    asks_by_prefix: bool
    offers_again_after_preemption: bool
    preemptions: float
    aborts: float
    resets: float
    filters: float
    reused_ids: float
    unannounced: float
    queued: float
    """Rate of requests that the manager hears of while they wait for their turn."""


class Engine:
    """One engine over one manager."""

    def __init__(
        self,
        world: World,
        calls: WatchedCalls,
        habits: Habits,
        prompts: PromptTree,
        on_wait: Callable[[Request], None],
    ) -> None:
        """`on_wait` is called whenever a request has to wait."""
        self._world = world
        self._on_wait = on_wait
        self._calls = calls
        self._habits = habits
        self._prompts = prompts
        self.device = Device(world)
        self.requests: list[Request] = []
        self.shortest_step = 0.0
        self.is_at_peace = False
        """True once nothing is preempted, aborted or reset any more."""
        self._used_ids: list[str] = []
        self._num_requests = 0

    @property
    def is_busy(self) -> bool:
        """True if there is a request, or a transfer that has not ended."""
        return bool(self.requests or self.device.under_way)

    # --- between steps -------------------------------------------------------------------------

    def arrive(self) -> None:
        """New requests arrive."""
        habits, rng = self._habits, self._world.rng
        while len(self.requests) < habits.max_requests and rng.random() < habits.arrivals:
            self._arrive(self._prompts.prompt(rng, rng.randint(0, habits.num_own_chunks)))

    def arrive_twice(self, num_own_chunks: int) -> None:
        """Two requests with the same prompt arrive."""
        chunks = self._prompts.prompt(self._world.rng, num_own_chunks)
        self._arrive(chunks)
        self._arrive(chunks)

    def _arrive(self, chunks: list[bytes]) -> None:
        habits, rng = self._habits, self._world.rng
        self._num_requests += 1
        req_id = f"r{self._num_requests}"
        live = {request.context.req_id for request in self.requests}
        if self._used_ids and rng.random() < habits.reused_ids:
            again = rng.choice(self._used_ids)
            req_id = req_id if again in live else again
        chosen = rng.choice(_FILTERS) if rng.random() < habits.filters else TierFilter.ALL
        context = ReqContext(req_id, load_tier_filter=chosen)
        policy = OffloadPolicy.BLOCK_LEVEL
        if req_id in self._used_ids or not self._world.happens(habits.unannounced):
            policy = self._calls.on_new_request(context)
        request = Request(context, chunks, habits.groups, policy)
        self.requests.append(request)
        if self._world.happens(habits.queued) and [g.shape() for g in habits.groups] == [
            GroupShape(TOKENS_PER_CHUNK)
        ]:
            self._calls.on_request_queued(
                context,
                partial(self._blocks_to_load, request, rng.randrange(len(chunks))),
                rng.randrange(3),
            )
        self._used_ids.append(req_id)
        self._world.tally["requests"] += 1

    def reset(self) -> None:
        """The weights change. Nothing computed before is valid."""
        for request in self.requests:
            if request.is_ending:
                self._calls.on_request_finished(request.context)
                request.phase = Phase.GONE
        self._drop_gone()
        if self._world.resets_change_weights:
            self._world.version += 1
        self._world.num_resets += 1
        self._world.tally["resets"] += 1
        if self.device.under_way:
            self._world.tally["resets during device transfers"] += 1
        if self._world.promoting:
            self._world.tally["resets during promotions"] += 1
        self._calls.reset_cache()
        self.device.reset()
        for request in self.requests:
            request.num_offered = [0] * len(request.groups)
            request.waits_since = None
            if request.phase is Phase.LOADING:
                request.phase = Phase.READY  # its load is flushed before anything else starts

    def _abort_some(self) -> None:
        for request in self.requests:
            if not request.is_ending and self._world.happens(self._habits.aborts):
                request.is_ending = request.is_aborted = True
                self._world.tally["aborts"] += 1

    # --- one step ------------------------------------------------------------------------------

    def step(self) -> None:
        """One scheduling step, followed by the time of the model run."""
        world, calls = self._world, self._calls
        world.step += 1
        world.step_began = world.time.now
        preempted = self._preempt_some()
        new = self._schedule(preempted)
        calls.on_schedule_end(new, [request.context.req_id for request in preempted])
        self._offer()
        self._end_requests()
        for request in preempted:
            self.device.flush(request)
        duration = self._duration()
        self.device.start_all(self._habits.step_scale * world.rng.choice((0.1, 0.5, 2.0, 5.0)))
        world.time.advance(duration)
        world.note(f"step {world.step} took {duration:.6f}")
        self._complete()
        if not self.is_at_peace:
            self._abort_some()
            if world.happens(self._habits.resets):
                self.reset()

    def idle(self, seconds: float) -> None:
        """Time passes without a step, because there is no work."""
        self._world.time.advance(seconds)

    def _duration(self) -> float:
        rng = self._world.rng
        if rng.random() < 0.05:
            return max(10 ** rng.uniform(-5, 1.5), self.shortest_step)
        return max(self._habits.step_scale * 10 ** rng.uniform(-1, 0.5), self.shortest_step)

    def _preempt_some(self) -> list[Request]:
        preempted: list[Request] = []
        if self.is_at_peace:
            return preempted
        for request in self.requests:
            if request.phase is Phase.RUNNING and not request.is_ending:
                is_stale = request.version != self._world.version
                if self._world.happens(self._habits.preemptions * (3 if is_stale else 1)):
                    preempted.append(request)
        for request in preempted:
            request.lose_device_blocks()
            self._world.end_wait(request.context)
            if self._habits.offers_again_after_preemption:
                request.num_offered = [0] * len(request.groups)
            self._world.tally["preemptions"] += 1
        return preempted

    def _schedule(self, preempted: list[Request]) -> list[str]:
        """Look up the prompts of waiting requests, and begin those that can begin. Returns their
        ids."""
        new = []
        for request in self.requests:
            if request.is_ending or request in preempted:
                continue
            if request.phase is Phase.WAITING and not request.num_transfers:
                self._try_to_load(request)
            if request.phase is Phase.READY:
                request.phase = Phase.RUNNING
                if not request.has_begun:
                    request.has_begun = True
                    new.append(request.context.req_id)
        return new

    def _try_to_load(self, request: Request) -> None:
        found = self._look_up(request)
        world, rng = self._world, self._world.rng
        if found is None:
            self._on_wait(request)
            return
        request.waits_since = None
        if found and rng.random() < 0.08:
            world.tally["hits not used at once"] += 1
            return
        request.version = world.version
        if not found or rng.random() < 0.03:
            request.phase = Phase.READY
            return
        keys = []
        for group, group_keys in zip(request.groups, request.keys, strict=True):
            end = found // group.chunks_per_block
            start = 0 if group.window_blocks is None else max(0, end - group.window_blocks)
            keys += group_keys[start:end]
            request.first_on_device[group.index] = start
            if request.policy is OffloadPolicy.BLOCK_LEVEL:
                request.num_offered[group.index] = end
        slots = self._calls.prepare_load(keys, request.context)
        request.phase = Phase.LOADING
        request.num_computed = found
        self.device.accept(request, keys, slots, is_store=False)
        world.tally["loads"] += 1
        world.tally["loaded blocks"] += len(keys)

    def _offer(self) -> None:
        """Compute, and store what was computed."""
        for request in self.requests:
            if request.phase is Phase.RUNNING:
                if not request.is_ending:
                    self._compute(request)
                self._offer_new_blocks(request)

    def _compute(self, request: Request) -> None:
        most = 50 if self.is_at_peace else self._habits.chunks_per_step
        chunks = self._world.rng.randint(1, most)
        request.num_computed = min(request.num_computed + chunks, len(request.chunks))
        if request.num_computed == len(request.chunks) and self._world.happens(0.6):
            request.is_ending = True

    def _offer_new_blocks(self, request: Request) -> None:
        offered: list[OffloadKey] = []
        ends = []
        for group, keys in zip(request.groups, request.keys, strict=True):
            end = request.num_computed // group.chunks_per_block
            start = max(request.num_offered[group.index], request.first_on_device[group.index])
            offered += keys[start:end]
            ends.append(max(end, request.num_offered[group.index]))
        if not offered:
            return
        output = self._calls.prepare_store(offered, request.context)
        if output is None:
            self._world.tally["refused stores"] += 1
            return
        request.num_offered = ends
        if output.keys_to_store:
            assert isinstance(output.store_spec, BlockIDsLoadStoreSpec)
            slots = output.store_spec.block_ids.tolist()
            self.device.accept(request, output.keys_to_store, slots, is_store=True)
            self._world.tally["stored blocks"] += len(slots)

    def _end_requests(self) -> None:
        for request in self.requests:
            if request.is_ending:
                if not request.is_aborted or self._world.happens(0.5):
                    self._calls.touch(request.all_keys(), request.context)
                self._calls.on_request_finished(request.context)
                request.phase = Phase.GONE
        self._drop_gone()

    def _drop_gone(self) -> None:
        self.requests = [request for request in self.requests if request.phase is not Phase.GONE]

    def _complete(self) -> None:
        """Deliver the ends of transfers."""
        for transfer in self.device.take_ended():
            request = transfer.request
            keys = self._world.rng.sample(transfer.keys, len(transfer.keys))
            as_a_set = dict.fromkeys(keys).keys()
            if transfer.is_store:
                self._calls.complete_store(as_a_set, request.context, transfer.succeeds)
                continue
            self._calls.complete_load(as_a_set, request.context)
            if request.phase is Phase.LOADING:
                request.phase = Phase.READY

    # --- lookups -------------------------------------------------------------------------------

    @staticmethod
    def _blocks_to_load(request: Request, num_on_device: int) -> list[OffloadKey]:
        """Called by the manager for a queued request, which the device may have a part of."""
        assert request.phase is Phase.WAITING, "it has been looked up, or has ended"
        return request.keys[0][num_on_device:]

    def _look_up(self, request: Request) -> int | None:
        """How many leading chunks can be loaded; None: ask again in the next step.

        Groups of full attention come first. If a group shortens what the others have found, all are
        looked up again.
        """
        limit = len(request.chunks) - (len(request.groups) > 1)
        groups = sorted(request.groups, key=lambda group: group.window_blocks is not None)
        while True:
            before, must_wait = limit, False
            for group in groups:
                keys = request.keys[group.index][: limit // group.chunks_per_block]
                if not keys:
                    return 0
                scan = self._scan_forwards if group.window_blocks is None else self._scan_window
                found = scan(keys, group, request.context)
                if found is None:
                    must_wait = True
                else:
                    limit = min(limit, found * group.chunks_per_block)
            if limit == 0:
                return 0
            if limit == before:
                return None if must_wait else limit

    def _scan_forwards(
        self, keys: list[OffloadKey], group: Group, context: ReqContext
    ) -> int | None:
        if self._habits.asks_by_prefix:
            found = self._calls.lookup_prefix(keys, context)
            return found.num_hits if found.is_final else None
        num_hits = 0
        must_wait = False
        for key in keys:
            answer = self._calls.lookup(key, context)
            if answer is LookupResult.MISS:
                break
            must_wait |= answer is not LookupResult.HIT
            num_hits += answer is not LookupResult.RETRY
        return None if must_wait else num_hits

    def _scan_window(self, keys: list[OffloadKey], group: Group, context: ReqContext) -> int | None:
        """Look up from the end: the last position with a whole window before it."""
        assert group.window_blocks is not None
        is_unknown = is_pending = False
        run = 0
        for index in reversed(range(len(keys))):
            answer = self._calls.lookup(keys[index], context)
            if answer in (LookupResult.HIT, LookupResult.HIT_PENDING):
                run += 1
                is_pending |= answer is LookupResult.HIT_PENDING
            else:
                run, is_pending = 0, False
                is_unknown |= answer is LookupResult.RETRY
            if run == group.window_blocks:
                return None if is_unknown or is_pending else index + run
        return None if is_unknown or is_pending else run
