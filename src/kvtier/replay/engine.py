"""Serves a trace: `Counting` one request after the other, without time, and `TimedEngine` many at a
time, by a clock of its own. Nothing waits and nothing is copied; only the managers do real work.

The timed engine works in steps, as vLLM does: requests start in order of arrival, prompts are
computed in chunks, and every running request decodes one token in a step. A step lasts
`decode_step_s` plus the time that its prompt tokens take. What the engine's own cache holds is not
asked of the managers. Transfers run beside the steps: between device and host memory at host
memory's speeds, and between host memory and each tier at the tier's.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator
from functools import partial
from heapq import heappop, heappush
from itertools import count
from math import inf
from typing import TYPE_CHECKING

from kvtier.base import ReqContext, ScheduleEndContext
from kvtier.replay.caches import ALONE, Caches, Clock, Lane, Member
from kvtier.replay.figures import Figures, Timing

if TYPE_CHECKING:
    from kvtier.base import OffloadKey
    from kvtier.replay.settings import ReplaySettings, TierSettings
    from kvtier.replay.trace import Request

__all__ = ["Counting", "Serving", "SteppedEngine", "TimedEngine"]

_BETWEEN_REQUESTS_S = 1000.0
"""Enough for everything that the orchestrator limits by time."""
_IDLE_STEP_S = 0.001
"""The length of a step in which nothing can be computed and no transfer is about to end."""
_COUNTED_EVERY = 1000
"""Requests from one collection of the managers' statistics to the next."""
_NOTHING_STARTED = ScheduleEndContext()


class Counting:
    """Serves requests one after the other: look up, use what is there, store what is missing.

    Tiers take no time, and each request finds them idle. So the figures depend only on the order of
    requests, the sizes and the policies. With tiers, a prompt is stored in the engine's steps,
    because write policies work in steps.
    """

    def __init__(self, settings: ReplaySettings, block_tokens: int, member: Member = ALONE) -> None:
        self._clock = Clock()
        self._new_caches = partial(Caches, settings, block_tokens, self._clock, member)
        self.caches = self._new_caches()
        self.figures: Figures = self.caches.figures(settings, block_tokens)
        self._step_blocks = max(1, settings.engine.step_tokens // block_tokens)

    def serve(self, requests: Iterable[Request]) -> Iterator[None]:
        """Serve all requests. Yields after each one."""
        first_s: float | None = None
        for number, request in enumerate(requests):
            first_s = request.arrives_s if first_s is None else first_s
            self.figures.trace_s = request.arrives_s - first_s
            self.serve_one(str(number), request)
            yield

    def serve_one(self, name: str, request: Request) -> None:
        """Serve a request. `name`: no other request has it."""
        serve = self._serve_from_host if self.caches.tiering is None else self._serve_from_tiers
        device = self.caches.device
        num_on_device = 0 if device is None else device.num_hits(request.keys)
        serve(request, ReqContext(name), num_on_device)
        if device is not None:
            device.release(device.hold(request.keys))

    def die(self) -> None:
        """Everything that the engine had is lost. It goes on with empty caches."""
        self.caches.die(self.figures)
        self.caches = self._new_caches()

    def end(self) -> Figures:
        """The figures of everything served so far."""
        self.caches.count_into(self.figures)
        # Every hit is read once from host memory.
        self.figures.places[0].read_blocks = sum(p.hit_blocks for p in self.figures.places)
        return self.figures

    def _serve_from_host(self, request: Request, context: ReqContext, num_on_device: int) -> None:
        manager, keys = self.caches.manager, request.keys
        manager.on_new_request(context)
        num_hits = manager.lookup_prefix(keys[num_on_device:], context).num_hits
        manager.touch(keys, context)
        output = manager.prepare_store(keys, context)
        assert output is not None, "nothing is in flight, so there is always something to evict"
        manager.complete_store(output.keys_to_store, context)
        manager.on_request_finished(context)
        self.figures.note_lookup(len(keys), request.prompt_tokens, [num_hits], num_on_device)

    def _serve_from_tiers(self, request: Request, context: ReqContext, num_on_device: int) -> None:
        manager, keys = self.caches.manager, request.keys
        asked = keys[num_on_device:]
        manager.on_new_request(context)
        found = manager.lookup_prefix(asked, context)
        while not found.is_final:
            manager.on_schedule_end(_NOTHING_STARTED)  # promotes what was found
            found = manager.lookup_prefix(asked, context)
        hits = self.caches.hits_by_place(asked, found.num_hits, context)
        if hits[0] < found.num_hits:  # ends the leases of promoted blocks
            manager.prepare_load(asked[: found.num_hits], context)
            manager.complete_load(asked[: found.num_hits], context)
        manager.touch(keys, context)
        # Blocks on the device are offered, too: host memory may have evicted them.
        first = 0 if num_on_device else found.num_hits
        for start in range(first, len(keys), self._step_blocks):
            output = manager.prepare_store(keys[start : start + self._step_blocks], context)
            if output is not None and output.keys_to_store:
                manager.complete_store(output.keys_to_store, context)
            manager.on_schedule_end(_NOTHING_STARTED)
        manager.on_request_finished(context)
        self.figures.note_lookup(len(keys), request.prompt_tokens, hits, num_on_device)
        tiering = self.caches.tiering
        assert tiering is not None
        manager.on_schedule_end(_NOTHING_STARTED)
        while tiering.is_moving_blocks():
            manager.on_schedule_end(_NOTHING_STARTED)
        self._clock.now += _BETWEEN_REQUESTS_S


class Serving:
    """A request and how far it is."""

    __slots__ = (
        "arrived_s",
        "context",
        "conversation",
        "has_answered",
        "held",
        "is_loaded",
        "keys",
        "num_computed",
        "num_hits",
        "num_kept",
        "num_offered",
        "num_on_device",
        "output_tokens",
        "prompt_tokens",
        "request",
    )

    def __init__(
        self,
        name: str,
        request: Request,
        arrived_s: float,
        conversation: int = 0,
        *,
        has_answered: bool = False,
    ) -> None:
        self.context = ReqContext(name, num_prompt_tokens=request.prompt_tokens)
        self.request = request
        self.conversation = conversation
        """For the router of a fleet."""
        self.has_answered = has_answered
        """True once its user has the first token."""
        self.keys = request.keys
        self.prompt_tokens = request.prompt_tokens
        self.output_tokens = request.output_tokens
        self.arrived_s = arrived_s
        self.is_loaded = False
        """True once it has been looked up and its hits are on the device."""
        self.num_on_device = 0
        """Blocks at the start of the prompt that were on the device when it started."""
        self.num_hits = 0
        """Blocks after these that are loaded."""
        self.num_kept = 0
        """Blocks that the engine's own cache was given."""
        self.held: list[OffloadKey] = []
        """Those of them that it keeps."""
        self.num_computed = 0
        """Prompt tokens that are on the device."""
        self.num_offered = 0
        """Blocks that need not be stored any more."""

    @property
    def hits(self) -> list[OffloadKey]:
        """The blocks that are loaded."""
        return self.keys[self.num_on_device : self.num_on_device + self.num_hits]


class _HostCopies:
    """Blocks on their way between the device and host memory."""

    def __init__(self, host: TierSettings, block_bytes: int, clock: Clock) -> None:
        self._block_bytes = block_bytes
        self._to_device = Lane(host.read_bytes_per_s, host.latency_s, clock)
        self._to_host = Lane(host.write_bytes_per_s, host.latency_s, clock)
        self.loading: deque[tuple[float, Serving]] = deque()
        """Requests whose hits are on their way to the device, by the time of their end."""
        self.storing: deque[tuple[float, Serving, list[OffloadKey]]] = deque()
        """Blocks on their way to host memory."""

    def load(self, serving: Serving) -> None:
        ends_s, _ = self._to_device.end_of(len(serving.hits) * self._block_bytes)
        self.loading.append((ends_s, serving))

    def store(self, serving: Serving, keys: list[OffloadKey]) -> None:
        ends_s, _ = self._to_host.end_of(len(keys) * self._block_bytes)
        self.storing.append((ends_s, serving, keys))

    def next_ends_s(self) -> list[float]:
        """When the next load and the next store end, as far as there are some."""
        ends = [self.loading[0][0]] if self.loading else []
        return [*ends, self.storing[0][0]] if self.storing else ends


class _Decoding:
    """The requests that have their first token."""

    def __init__(self) -> None:
        self._ends: list[tuple[int, int, Serving]] = []
        """A heap of the steps in which requests end."""
        self._num_steps = 0
        self._order = count()

    def __len__(self) -> int:
        return len(self._ends)

    def enter(self, serving: Serving) -> None:
        ends_at = self._num_steps + max(0, serving.output_tokens - 1)
        heappush(self._ends, (ends_at, next(self._order), serving))

    def leave(self) -> list[Serving]:
        """All of them stop."""
        stopped = [serving for _, _, serving in self._ends]
        self._ends.clear()
        return stopped

    def pass_steps(self, num_steps: int) -> None:
        self._num_steps += num_steps

    def num_steps_left(self) -> int:
        """Steps until the first of them ends."""
        return self._ends[0][0] - self._num_steps

    def ended(self) -> Iterator[Serving]:
        """Take those that have their last token."""
        while self._ends and self._ends[0][0] <= self._num_steps:
            yield heappop(self._ends)[2]


class SteppedEngine:
    """The engine, its queue, and its clock.

    The caller passes requests with `accept`, and calls `begin_step` and `end_step` in turns:
    `end_step` at `step_ends_s`, which `cut_short` may change when a request arrives.
    """

    def __init__(self, settings: ReplaySettings, block_tokens: int, member: Member = ALONE) -> None:
        self._clock = Clock()
        self._new_caches = partial(Caches, settings, block_tokens, self._clock, member)
        self._use(self._new_caches())
        self.figures: Figures = self.caches.figures(settings, block_tokens)
        self._timing = self.figures.timing = Timing()
        self._model = settings.engine
        self._block_tokens = block_tokens
        self._new_copies = partial(
            _HostCopies, settings.host, settings.block_bytes(block_tokens), self._clock
        )
        self._copies = self._new_copies()
        self._unstored: dict[Serving, None] = {}
        """Requests with blocks for which there was no room."""
        self._waiting: deque[Serving] = deque()
        self._prefilling: list[Serving] = []
        self._decoding = _Decoding()
        self._arrived: list[Serving] = []
        """Requests that have arrived since the present step began."""
        self._work: list[tuple[Serving, int]] = []
        """What the present step computes: requests with their numbers of tokens."""
        self._equal_steps = 0
        """The present step stands for this many that only decode; 0: nothing is computed."""
        self._step_s = 0.0
        """The length of the present step, if anything is computed."""
        self.step_ends_s = inf
        """When the present step ends; infinite while there is nothing to do until a request
        arrives."""
        self.num_pending_tokens = 0
        """Tokens of prompts that are not computed yet, nor known to be cached."""
        self._num_finished = 0
        self.last_finish_s = 0.0
        """When the last request ended."""

    def _use(self, caches: Caches) -> None:
        self.caches = caches
        self._manager = caches.manager
        self._device = caches.device

    def end(self) -> Figures:
        """The figures of everything served so far. `Timing.seconds` is for the caller to set."""
        self.caches.count_into(self.figures)
        return self.figures

    # --- requests come, and the engine dies -----------------------------------------------------

    def accept(self, serving: Serving) -> None:
        """A request arrives. The engine sees it when the next step begins."""
        self._arrived.append(serving)
        self.num_pending_tokens += serving.prompt_tokens

    def start(self, now_s: float) -> None:
        """The engine is ready from now on."""
        self._clock.now = now_s

    def park(self) -> None:
        """Nothing is to be done until a request arrives."""
        self._work, self._equal_steps, self.step_ends_s = [], 0, inf

    def wait_briefly(self) -> None:
        """End the present step soon, in which nothing is computed."""
        self.step_ends_s = self._clock.now + _IDLE_STEP_S

    def die(self) -> list[Serving]:
        """Everything that the engine had is lost. Returns the requests that were not finished, in
        order of arrival. `start` begins a new life, with empty caches."""
        self.caches.die(self.figures)
        self._use(self._new_caches())
        lost = {
            *self._arrived,
            *self._waiting,
            *self._prefilling,
            *(serving for _, serving in self._copies.loading),
            *self._decoding.leave(),
        }
        for queue in (self._arrived, self._waiting, self._prefilling):
            queue.clear()
        self._unstored.clear()
        self._copies = self._new_copies()
        self.num_pending_tokens = 0
        self.park()
        return sorted(lost, key=lambda serving: (serving.arrived_s, serving.context.req_id))

    def has_requests(self) -> bool:
        """True if requests have been accepted that have not ended."""
        return bool(
            self._waiting
            or self._prefilling
            or self._decoding
            or self._copies.loading
            or self._arrived
        )

    def is_moving_blocks(self) -> bool:
        """True if blocks are on their way, or wait for a tier."""
        tiering = self.caches.tiering
        return bool(self._copies.storing) or (tiering is not None and tiering.is_moving_blocks())

    def _enter(self, serving: Serving) -> None:
        self._manager.on_new_request(serving.context)
        if self.caches.tiers:
            self._manager.on_request_queued(
                serving.context, partial(self._blocks_to_look_up, serving)
            )
        self._waiting.append(serving)

    def _blocks_to_look_up(self, serving: Serving) -> list[OffloadKey]:
        """The blocks of a request that are not on the device. Managers call it while the request
        waits."""
        if self._device is None:
            return serving.keys
        serving.num_on_device = self._device.num_hits(serving.keys)
        return serving.keys[serving.num_on_device :]

    # --- one step -------------------------------------------------------------------------------

    def begin_step(self) -> None:
        """Begin a step. `step_ends_s` says when it ends, unless `cut_short` changes that."""
        for serving in self._arrived:
            self._enter(serving)
        self._arrived.clear()
        self._end_transfers()
        work, started = self._schedule()
        self._manager.on_schedule_end(ScheduleEndContext(started) if started else _NOTHING_STARTED)
        for serving in list(self._unstored):
            self._store(serving, serving.num_computed)
        for serving, num_tokens in work:
            self._store(serving, serving.num_computed + num_tokens)
        self._work = work
        if not work and not self._decoding:
            self._equal_steps = 0
            self.step_ends_s = self._next_event_s()
            return
        is_alone = not (work or self._waiting or self._unstored)
        self._set_length(self._num_equal_steps() if is_alone else 1)

    def cut_short(self, arrives_s: float) -> None:
        """A request arrives during the present step. If the step stands for several, those of them
        that begin later are left out; if nothing is computed, the step ends now."""
        if not self._equal_steps:
            self.step_ends_s = min(self.step_ends_s, arrives_s)
        elif self._equal_steps > 1:
            before_s = arrives_s - self._clock.now
            num_steps = int(before_s / self._model.decode_step_s) + 1
            if num_steps < self._equal_steps:
                self._set_length(num_steps)

    def end_step(self) -> None:
        """The present step has ended."""
        if self._equal_steps:
            self._compute()
        else:
            self._clock.now = self.step_ends_s

    def _set_length(self, num_steps: int) -> None:
        self._equal_steps = num_steps
        seconds = num_steps * self._model.decode_step_s
        for serving, n in self._work:
            seconds += self._model.prefill_s(serving.num_computed, n)
        self._step_s = seconds
        self.step_ends_s = self._clock.now + seconds

    def _end_transfers(self) -> None:
        """Report the copies that have ended. Loaded requests go on before those that wait."""
        now, manager = self._clock.now, self._manager
        storing, loading = self._copies.storing, self._copies.loading
        while storing and storing[0][0] <= now:
            _, serving, keys = storing.popleft()
            manager.complete_store(keys, serving.context)
        if not loading:
            return
        loaded = []
        while loading and loading[0][0] <= now:
            _, serving = loading.popleft()
            manager.complete_load(serving.hits, serving.context)
            serving.is_loaded = True
            self._keep(serving)
            loaded.append(serving)
        self._waiting.extendleft(reversed(loaded))

    def _schedule(self) -> tuple[list[tuple[Serving, int]], list[str]]:
        """The requests that compute in this step, with their numbers of tokens; and the ids of
        those that have started."""
        budget = self._model.step_tokens
        work: list[tuple[Serving, int]] = []
        for serving in self._prefilling:
            num_tokens = min(budget, serving.prompt_tokens - serving.num_computed)
            if num_tokens:
                work.append((serving, num_tokens))
                budget -= num_tokens
        started: list[str] = []
        deferred: list[Serving] = []
        num_free = self._model.most_running - len(self._prefilling) - len(self._decoding)
        num_free -= len(self._copies.loading)
        while self._waiting and budget > 0 and len(deferred) < num_free:
            serving = self._waiting.popleft()
            if not serving.is_loaded:
                if not self._look_up(serving):
                    deferred.append(serving)
                    continue
                started.append(serving.context.req_id)
                if serving.num_hits:
                    self._load(serving)
                    num_free -= 1
                    continue
            num_tokens = min(budget, serving.prompt_tokens - serving.num_computed)
            work.append((serving, num_tokens))
            budget -= num_tokens
            num_free -= 1
            self._prefilling.append(serving)
        self._waiting.extendleft(reversed(deferred))
        return work, started

    def _look_up(self, serving: Serving) -> bool:
        """Look up the prompt. False: ask again in the next step."""
        keys = self._blocks_to_look_up(serving)
        num_hits, is_final = self._manager.lookup_prefix(keys, serving.context)
        if not is_final:
            return False
        serving.num_hits = num_hits
        # Blocks on the device are offered for storing: host memory may have evicted them.
        serving.num_offered = 0 if serving.num_on_device else num_hits
        # The last token is always computed: the first new one follows from it.
        cached = (serving.num_on_device + num_hits) * self._block_tokens
        serving.num_computed = max(0, min(cached, serving.prompt_tokens - 1))
        hits = self.caches.hits_by_place(keys, num_hits, serving.context)
        self.num_pending_tokens -= serving.num_computed
        self.figures.note_lookup(
            len(serving.keys), serving.prompt_tokens, hits, serving.num_on_device
        )
        if self._device is not None:
            serving.num_kept = serving.num_on_device
            serving.held = self._device.hold(serving.keys[: serving.num_kept])
        return True

    def _keep(self, serving: Serving) -> None:
        """The engine's own cache gets the blocks that have been loaded or computed."""
        end = serving.num_computed // self._block_tokens
        if self._device is not None and end > serving.num_kept:
            serving.held += self._device.hold(serving.keys[serving.num_kept : end])
            serving.num_kept = end

    def _load(self, serving: Serving) -> None:
        hits = serving.hits
        self._manager.prepare_load(hits, serving.context)
        self._copies.load(serving)
        self.figures.places[0].read_blocks += len(hits)

    def _store(self, serving: Serving, num_tokens: int) -> None:
        """Offer the blocks that lie within the first `num_tokens` tokens. If there is no room, they
        are offered again in the next step."""
        end = min(len(serving.keys), num_tokens // self._block_tokens)
        if end <= serving.num_offered:
            return
        output = self._manager.prepare_store(
            serving.keys[serving.num_offered : end], serving.context
        )
        if output is None:
            self._unstored[serving] = None
            return
        self._unstored.pop(serving, None)
        serving.num_offered = end
        keys = output.keys_to_store
        if keys:
            self._copies.store(serving, keys)

    # --- time passes ----------------------------------------------------------------------------

    def _compute(self) -> None:
        work, clock, seconds = self._work, self._clock, self._step_s
        num_tokens = sum(n for _, n in work)
        clock.now += seconds
        self._timing.busy_s += seconds
        self._decoding.pass_steps(self._equal_steps)
        self.num_pending_tokens -= num_tokens
        if num_tokens and self.caches.tiers:
            position = sum(n * (s.num_computed + n / 2) for s, n in work) / num_tokens
            self._manager.note_prefill(num_tokens, position, seconds)
        is_done = False
        for serving, n in work:
            serving.num_computed += n
            self._keep(serving)
            if serving.num_computed >= serving.prompt_tokens:
                is_done = True
                if not serving.has_answered:
                    serving.has_answered = True
                    self._timing.first_token_s.append(clock.now - serving.arrived_s)
                self._decoding.enter(serving)
        if is_done:
            self._prefilling = [s for s in self._prefilling if s.num_computed < s.prompt_tokens]
        for serving in self._decoding.ended():
            self._finish(serving)

    def _num_equal_steps(self) -> int:
        """Steps that only decode, until something else happens. With tiers it is always one: the
        manager of tiers works in each step."""
        if self.caches.tiers:
            return 1
        num_steps = self._decoding.num_steps_left()
        events = self._copies.next_ends_s()
        if events:
            left_s = min(events) - self._clock.now
            num_steps = min(num_steps, int(left_s / self._model.decode_step_s) + 1)
        return max(1, num_steps)

    def _next_event_s(self) -> float:
        """Nothing can be computed: when the next transfer ends."""
        events = self._copies.next_ends_s()
        events += [end_s for tier in self.caches.tiers if (end_s := tier.next_end_s) is not None]
        now = self._clock.now
        following = min((when for when in events if when > now), default=inf)
        if self._waiting:  # for an answer that may come without an event, such as a deadline
            following = min(following, now + _IDLE_STEP_S)
        return following

    def _finish(self, serving: Serving) -> None:
        self._num_finished += 1
        self.last_finish_s = self._clock.now
        if self._num_finished % _COUNTED_EVERY == 0:
            self.caches.count_into(self.figures)  # the manager keeps a list of times until then
        self._timing.prompt_tokens += serving.prompt_tokens
        self._timing.output_tokens += serving.output_tokens
        if serving in self._unstored:
            del self._unstored[serving]
            self.figures.places[0].refused_blocks += len(serving.keys) - serving.num_offered
        if self._device is not None:
            self._device.release(serving.held)
        self._manager.on_request_finished(serving.context)


class TimedEngine(SteppedEngine):
    """One engine that serves a trace alone."""

    def __init__(self, settings: ReplaySettings, block_tokens: int) -> None:
        super().__init__(settings, block_tokens)
        self._speed_up = settings.speed_up
        self._first_arrival_s: float | None = None
        self._ended_s: float | None = None
        """When the last request ended. Stores may go on."""

    def serve(self, requests: Iterable[Request]) -> Iterator[None]:
        """Serve all requests, and end their stores. Yields after each step."""
        coming = enumerate(requests)
        following = self._next(coming)
        while following is not None or self.has_requests():
            while following is not None and following.arrived_s <= self._clock.now:
                self.accept(following)
                following = self._next(coming)
            self.begin_step()
            if following is not None:
                self.cut_short(following.arrived_s)
            elif self.step_ends_s == inf:
                self.wait_briefly()
            self.end_step()
            yield
        self._ended_s = self._clock.now
        while self.is_moving_blocks():
            self.begin_step()
            if self.step_ends_s == inf:
                self.wait_briefly()
            self.end_step()
            yield

    def end(self) -> Figures:
        super().end()
        ended_s = self._clock.now if self._ended_s is None else self._ended_s
        self._timing.seconds = ended_s - (self._first_arrival_s or 0.0)
        return self.figures

    def _next(self, coming: Iterator[tuple[int, Request]]) -> Serving | None:
        for number, request in coming:
            arrives_s = request.arrives_s / self._speed_up
            if self._first_arrival_s is None:
                self._first_arrival_s = self._clock.now = arrives_s
            self.figures.trace_s = arrives_s - self._first_arrival_s
            return Serving(str(number), request, arrives_s)
        return None
