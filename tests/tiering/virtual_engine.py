"""An engine in virtual time over the real orchestrator: what a tier's speed does to requests.

Nothing is copied and nobody waits: a step takes as long as computing its tokens would, and a tier
moves as many blocks as its speed allows in that time. Hits and times to first token follow.
"""

from __future__ import annotations

import mmap
import random
from collections import OrderedDict, deque
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any, ClassVar

import numpy as np

from kvtier.base import (
    LookupResult,
    Medium,
    OffloadKey,
    ReqContext,
    ScheduleEndContext,
    make_offload_key,
)
from kvtier.tiering.base import JobResult, SecondaryTierManager, TransferJob
from kvtier.tiering.health import TierSettings
from kvtier.tiering.manager import (
    CPUPrimaryTierOffloadingManager,
    GroupShape,
    TieringOffloadingManager,
)
from tests.config.sample import make_config
from tests.tiering.driven_manager import Clock, PlainSpec

__all__ = ["Answered", "PacedTier", "Prompt", "VirtualEngine", "prompts", "zipf_prompts"]

BLOCK_BYTES = 8 << 20
TOKENS = 64
"""Of a block."""
_IDLE_STEP_S = 0.001

Prompt = list[OffloadKey]


class _NoMemory:
    """Slots that are never written, and so take no memory."""

    def __init__(self, num_blocks: int) -> None:
        flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
        self._memory = mmap.mmap(-1, num_blocks * BLOCK_BYTES, flags=flags)
        self._rows = np.frombuffer(self._memory, np.uint8).reshape(num_blocks, BLOCK_BYTES)

    def create_kv_memoryview(self) -> memoryview:
        return self._rows.data

    def cleanup(self) -> None:
        pass


class PacedTier(SecondaryTierManager):
    """One job after the other, loads first, block by block at a speed that may change."""

    medium: ClassVar[Medium | None] = Medium.STORAGE

    def __init__(
        self, clock: Callable[[], float], bytes_per_s: Callable[[float], float], **kwargs: Any
    ) -> None:
        super().__init__(**kwargs)
        self.kept: dict[OffloadKey, None] = {}
        self.note: bytes | None = None
        self.names_keys = True
        """True if it names its keys when the engine starts."""
        self._clock = clock
        self._bytes_per_s = bytes_per_s
        self._loads: deque[TransferJob] = deque()
        self._stores: deque[TransferJob] = deque()
        self._num_moved: dict[int, int] = {}
        self._began: dict[int, float] = {}
        self._worked_until = clock()
        self._results: list[JobResult] = []
        self.unused: set[OffloadKey] = set()
        """Blocks that it has loaded and that no request has used since."""
        self.num_loaded = 0
        self.num_loaded_again = 0
        """Blocks that were loaded again before a request has used them."""

    def lookup(self, key: OffloadKey, req_context: ReqContext) -> LookupResult:
        return LookupResult.HIT if key in self.kept else LookupResult.MISS

    def submit_store(self, job: TransferJob) -> None:
        self._work()
        self._stores.append(job)

    def submit_load(self, job: TransferJob) -> None:
        self._work()
        self._loads.append(job)
        self.num_loaded += len(job.keys)
        self.num_loaded_again += len(self.unused.intersection(job.keys))
        self.unused.update(job.keys)

    def get_finished_jobs(self) -> list[JobResult]:
        self._work()
        results, self._results = self._results, []
        return results

    def drain_jobs(self) -> None:
        pass

    def known_keys(self, most: int) -> list[OffloadKey]:
        return list(self.kept)[:most] if self.names_keys else []

    def keep_note(self, note: bytes) -> None:
        self.note = note

    def kept_note(self) -> bytes | None:
        return self.note

    def _work(self) -> None:
        """Move the blocks that its speed allows up to now."""
        now = self._clock()
        while queue := self._loads or self._stores:
            job = queue[0]
            began = self._began.setdefault(job.job_id, self._worked_until)
            seconds = BLOCK_BYTES / self._bytes_per_s(self._worked_until)
            if self._worked_until + seconds > now:
                return
            self._worked_until += seconds
            self._num_moved[job.job_id] = self._num_moved.get(job.job_id, 0) + 1
            if self._num_moved[job.job_id] == len(job.keys):
                queue.popleft()
                if not job.is_promotion:
                    self.kept.update(dict.fromkeys(job.keys))
                took = self._worked_until - began
                self._results.append(JobResult(job.job_id, True, transfer_time=took))
        self._worked_until = now


class Answered:
    """A request and its outcome."""

    def __init__(self, req_id: str, prompt: Prompt, arrives: float, num_answered: int) -> None:
        self.prompt = prompt
        self.context = ReqContext(req_id, num_prompt_tokens=len(prompt) * TOKENS)
        self.arrives = arrives
        self.first_token = 0.0
        self.num_hits = 0
        """Blocks that were not computed."""
        self._num_left = num_answered
        self.is_loaded = False
        """True once its hits are on the device, so that it is not looked up any more."""
        self.num_computed = 0
        self.num_offered = 0
        self.waited_for_tiers = 0.0
        """Seconds of the steps in which its lookup was not final."""

    @property
    def ttft(self) -> float:
        return self.first_token - self.arrives

    @property
    def num_tokens(self) -> int:
        return len(self.prompt) * TOKENS

    def answers_a_token(self) -> bool:
        """True if it was the last one."""
        self._num_left -= 1
        return self._num_left <= 0


class VirtualEngine:
    """Schedules as vLLM does: prompts in chunks, first come first served, a cache on the device."""

    def __init__(
        self,
        bytes_per_s: float | Callable[[float], float] | None,
        *,
        host_blocks: int = 600,
        device_blocks: int = 200,
        tokens_per_s: float = 10_000,
        step_s: float = 0.010,
        budget: int = 8192,
        prefill_tokens_per_s: float | None = None,
        kept: Iterable[OffloadKey] = (),
        note: bytes | None = None,
        names_keys: bool = True,
        announces: bool = True,
        most_running: int = 64,
        pool_blocks: int = 1_000_000,
        **settings: Any,
    ) -> None:
        """`bytes_per_s`: speed of the tier, or a function of the time since the start; None: no
        tier. `tokens_per_s`: speed of computing prompts. `step_s`: length of a step that only
        decodes. `budget`: tokens that a step computes at most. `prefill_tokens_per_s`: what the
        manager is configured with: None to learn it, 0 to load always. `kept`, `note`: what an
        earlier engine has left in the tier. `names_keys`: the tier names the kept blocks at the
        start. `announces`: the manager hears of requests when they are queued. `most_running`: the
        most requests that run at the same time. `pool_blocks`: device blocks for the prompts that
        run or are loaded; a prompt that does not fit ends the lookups of a step."""
        self.clock = Clock()
        self.start = self.clock.now
        self.primary = CPUPrimaryTierOffloadingManager(
            host_blocks,
            _NoMemory(host_blocks),  # type: ignore[arg-type]
        )
        self.tiers: list[PacedTier] = []
        if bytes_per_s is not None:
            self.tiers = [
                PacedTier(
                    self.clock,
                    self._since_the_start(bytes_per_s),
                    offloading_spec=PlainSpec(make_config()),
                    primary_kv_view=self.primary.get_kv_memoryview(),
                    tier_type="paced",
                )
            ]
            self.tiers[0].kept.update(dict.fromkeys(kept))
            self.tiers[0].note = note
            self.tiers[0].names_keys = names_keys
        self.manager = TieringOffloadingManager(
            self.primary,
            self.tiers,
            settings=[TierSettings(**settings) for _ in self.tiers],
            groups={0: GroupShape(TOKENS)},
            prefill_tokens_per_s=prefill_tokens_per_s,
            clock=self.clock,
        )
        self._announces = announces
        self._most_running = most_running
        self._pool_left = pool_blocks
        self._step_s = step_s
        self._budget = budget
        self._device: OrderedDict[OffloadKey, None] = OrderedDict()
        self._device_blocks = device_blocks
        self._tokens_per_s = tokens_per_s
        self._waiting: deque[Answered] = deque()
        self._running: list[Answered] = []
        self._deferred: Iterable[Answered] = ()
        """Requests that wait for tiers in this step."""
        self._storing: list[tuple[Answered, list[OffloadKey]]] = []
        self.num_refused_stores = 0
        self.answered: list[Answered] = []

    def _since_the_start(
        self, bytes_per_s: float | Callable[[float], float]
    ) -> Callable[[float], float]:
        if callable(bytes_per_s):
            return lambda now: bytes_per_s(now - self.start)
        return lambda _: bytes_per_s

    def serve(self, arrivals: Iterable[tuple[float, Prompt]], num_answered: int = 20) -> None:
        """Serve prompts that come at these times, from now on, until all are answered."""
        start = self.clock.now
        coming = deque(
            Answered(f"{len(self.answered)}-{n}", prompt, start + when, num_answered)
            for n, (when, prompt) in enumerate(arrivals)
        )
        while coming or self._waiting or self._running:
            arrived = []
            while coming and coming[0].arrives <= self.clock.now:
                arrived.append(coming.popleft())
            is_idle = not (arrived or self._waiting or self._running)
            if is_idle and not self.manager.has_pending_work():
                self.clock.now = coming[0].arrives
            else:
                self.step(arrived)

    def converse(
        self, num_conversations: int, num_active: int, num_turns: int, *, num_blocks: int = 94
    ) -> float:
        """Clients ask in turns: in each turn, every conversation gets one question, `num_active` at
        a time. Prompts begin with `num_blocks` and grow from turn to turn. Returns the seconds for
        all turns but the first."""
        lengths = [num_blocks] * num_conversations
        began = self.clock.now
        for turn in range(num_turns):
            if turn == 1:
                began = self.clock.now
            order = list(range(num_conversations))
            random.Random(turn).shuffle(order)
            num_before = len(self.answered)
            live: dict[str, int] = {}
            while order or len(self.answered) - num_before < num_conversations:
                arrived = []
                while order and len(live) < num_active:
                    n = order.pop(0)
                    prompt = [_key(n, block) for block in range(lengths[n])]
                    request = Answered(f"{turn}-{n}", prompt, self.clock.now, 48)
                    live[request.context.req_id] = n
                    arrived.append(request)
                num_answered = len(self.answered)
                self.step(arrived)
                for request in self.answered[num_answered:]:
                    lengths[live.pop(request.context.req_id)] += 5
        return self.clock.now - began

    def step(self, arrived: Sequence[Answered] = ()) -> None:
        manager = self.manager
        for request, keys in self._storing:
            manager.complete_store(set(keys), request.context)
        self._storing = []
        for request in arrived:
            manager.on_new_request(request.context)
            if self._announces:
                manager.on_request_queued(
                    request.context, partial(self._blocks_to_load, request.prompt)
                )
            self._waiting.append(request)
        work, loads = self._schedule()
        new = [request.context.req_id for request, _ in loads]
        manager.on_schedule_end(ScheduleEndContext(new, []))
        for request, num_tokens in work:
            self._offer(request, num_tokens)
        self._compute(work)
        for request, keys in loads:
            manager.complete_load(set(keys), request.context)
            self._cache_on_device(keys)
            request.is_loaded = True
        self._waiting.extendleft(request for request, _ in reversed(loads))

    def _schedule(
        self,
    ) -> tuple[list[tuple[Answered, int]], list[tuple[Answered, list[OffloadKey]]]]:
        """The requests with the tokens they compute in this step, and those whose hits are copied
        to the device in this step: these compute in the next one."""
        budget = self._budget
        work = []
        for request in self._running:
            num_tokens = min(budget, max(1, request.num_tokens - request.num_computed))
            work.append((request, num_tokens))
            budget -= num_tokens
        loads = []
        waiting: deque[Answered] = deque()
        while self._waiting and budget > 0 and len(self._running) < self._most_running:
            request = self._waiting.popleft()
            if not request.is_loaded:
                rest = self._blocks_to_load(request.prompt)
                num_cached = len(request.prompt) - 1 - len(rest)
                num_hits, is_final = self.manager.lookup_prefix(rest, request.context)
                if not is_final:
                    waiting.append(request)
                    continue
                if self._pool_left < len(request.prompt):
                    waiting.append(request)
                    break
                self._pool_left -= len(request.prompt)
                request.num_hits = request.num_offered = num_cached + num_hits
                request.num_computed = request.num_hits * TOKENS
                if num_hits:
                    self.manager.prepare_load(rest[:num_hits], request.context)
                    for tier in self.tiers:
                        tier.unused.difference_update(rest[:num_hits])
                    loads.append((request, rest[:num_hits]))
                    continue
            num_tokens = min(budget, request.num_tokens - request.num_computed)
            work.append((request, num_tokens))
            budget -= num_tokens
            self._running.append(request)
        self._waiting.extendleft(reversed(waiting))
        self._deferred = waiting
        return work, loads

    def _offer(self, request: Answered, num_tokens: int) -> None:
        end = min(len(request.prompt), (request.num_computed + num_tokens) // TOKENS)
        if end > request.num_offered:
            keys = request.prompt[request.num_offered : end]
            output = self.manager.prepare_store(keys, request.context)
            if output is None:
                self.num_refused_stores += 1
                return
            request.num_offered = end
            if output.keys_to_store:
                self._storing.append((request, output.keys_to_store))

    def _compute(self, work: list[tuple[Answered, int]]) -> None:
        prefills = [(r, n) for r, n in work if r.num_computed < r.num_tokens]
        num_tokens = sum(n for _, n in prefills)
        seconds = self._step_s + num_tokens / self._tokens_per_s if work else _IDLE_STEP_S
        self.clock.now += seconds
        for request in self._deferred:
            request.waited_for_tiers += seconds
        if num_tokens:
            position = sum(n * (r.num_computed + n / 2) for r, n in prefills) / num_tokens
            self.manager.note_prefill(num_tokens, position, seconds)
        for request, n in work:
            if request.num_computed < request.num_tokens:
                request.num_computed += n
                if request.num_computed == request.num_tokens:
                    request.first_token = self.clock.now
                    self._cache_on_device(request.prompt)
            elif request.answers_a_token():
                self._running.remove(request)
                self._pool_left += len(request.prompt)
                self.answered.append(request)
                self.manager.on_request_finished(request.context)

    def _blocks_to_load(self, prompt: Prompt) -> Prompt:
        """The blocks from the first one that the device does not have, without the last one."""
        for n, key in enumerate(prompt[:-1]):
            if key not in self._device:
                return prompt[n:-1]
        return []

    def _cache_on_device(self, keys: Sequence[OffloadKey]) -> None:
        for key in reversed(keys):
            self._device[key] = None
            self._device.move_to_end(key)
        while len(self._device) > self._device_blocks:
            self._device.popitem(last=False)

    # --- what came of it ------------------------------------------------------------------------

    def between(self, first: float, last: float) -> list[Answered]:
        """The requests that arrived between these times."""
        return [r for r in self.answered if first <= r.arrives - self.start < last]


def hit_share(answered: Sequence[Answered]) -> float:
    """Share of the prompt tokens that were not computed."""
    return sum(r.num_hits for r in answered) / sum(len(r.prompt) for r in answered)


def mean_ttft(answered: Sequence[Answered]) -> float:
    return sum(r.ttft for r in answered) / len(answered)


def prompts(count: int, num_blocks: int) -> list[Prompt]:
    """Prompts without common blocks."""
    return [[_key(n, block) for block in range(num_blocks)] for n in range(count)]


def zipf_prompts(
    count: int, per_s: float, *, num_known: int = 40, num_blocks: int = 100, seed: int = 1
) -> list[tuple[float, Prompt]]:
    """Questions about a few long documents, some more popular than others. Yields the arrival time
    and the prompt: a document followed by one block of its own."""
    rng = random.Random(seed)
    known = prompts(num_known, num_blocks)
    weights = [1 / (n + 1) for n in range(num_known)]
    now = 0.0
    coming = []
    for n in range(count):
        now += rng.expovariate(per_s)
        (document,) = rng.choices(known, weights)
        coming.append((now, [*document, _key(2**30 + n, 0)]))
    return coming


def _key(prompt: int, block: int) -> OffloadKey:
    return make_offload_key(((prompt << 20) + block).to_bytes(8, "big") * 4, 0)
