"""One life of an engine with offloading, from its start to the last byte released."""

from __future__ import annotations

import re
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from random import Random
from typing import Any
from unittest.mock import patch
from zlib import crc32

import kvtier.engine.engine
import kvtier.engine.offloading
import kvtier.tiering.spec
from kvtier.connector.worker import OffloadingConnectorWorker
from kvtier.cpu.manager import CPUOffloadingManager
from kvtier.engine import Engine, RequestResult
from kvtier.engine.offloading import Connector, make_connector, offloading_config
from kvtier.engine.request import FinishReason, Request, RequestState
from kvtier.tiering.manager import TieringOffloadingManager
from kvtier.tiering.metrics import tier_label
from tests.e2e.event_ledger import EventLedger, Where
from tests.e2e.parts import FaultyExampleTier, StepwiseWorker, VirtualClock, new_engine_id
from tests.e2e.reference import Answered, check_answers
from tests.e2e.violation import require
from tests.e2e.watched_scheduler import WatchedScheduler
from tests.e2e.workload import (
    MAX_PROMPT,
    VOCABULARY,
    Abort,
    Action,
    Arrive,
    Await,
    Reset,
    Simple,
    Workload,
    draw,
)

__all__ = ["Outcome", "live", "live_through"]

_MOST_STEPS = 3000
_FEW_STEPS = 10
_MOST_SECONDS = 60.0
"""Seconds to wait in lives with the real clock, for a busy machine."""
_IN_USE = ("pinned", "writing")
_NUM_EXAM_QUESTIONS = 4
_USED_ID = "again"
_HOST_MEMORY: Where = None
_BASES = [[Random(base).randrange(VOCABULARY) for _ in range(MAX_PROMPT)] for base in range(3)]
_SHARED_MEMORY = Path("/dev/shm")


@dataclass(slots=True)
class Outcome:
    """The outcome of a life."""

    seed: int
    violation: Exception | None = None
    tally: Counter[str] = field(default_factory=Counter)
    num_steps: int = 0
    digest: int = 0
    """Digest of all answers and events, in order. The same for the same seed in lives without
    threads."""


def live(seed: int) -> Outcome:
    """Run the life of this seed. A violation is returned, not raised."""
    return live_through(draw(seed))


def live_through(workload: Workload) -> Outcome:
    """Run the life of a workload. A violation is returned, not raised."""
    outcome = Outcome(workload.seed)
    threads = set(threading.enumerate())
    engine_id = new_engine_id()
    try:
        with _Life(workload, engine_id, outcome) as life:
            life.run()
        left = sorted(path.name for path in _SHARED_MEMORY.glob(f"*{engine_id}*"))
        require(not left, f"left in shared memory: {left}")
        names = sorted(thread.name for thread in set(threading.enumerate()) - threads)
        require(not names, f"threads left: {names}")
    except Exception as error:
        outcome.violation = error
    return outcome


class _Life:
    def __init__(self, workload: Workload, engine_id: str, outcome: Outcome) -> None:
        self._workload = workload
        self._setup = workload.setup
        self._outcome = outcome
        self._tally = outcome.tally
        self._clock = VirtualClock()
        self._answers: dict[str, Answered] = {}
        """Requests by name, in order of arrival."""
        self._name_of: dict[str, str] = {}
        """Requests by id. An id may be used again."""
        self._weights = self._setup.model.seed
        self._deadline = time.monotonic() + _MOST_SECONDS
        connector = self._make_connector(engine_id)
        assert isinstance(connector.scheduler, WatchedScheduler)
        self._scheduler = connector.scheduler
        self._scheduler.tally = self._tally
        self._workers = connector.workers
        manager = self._scheduler.manager
        self._tiering = manager if isinstance(manager, TieringOffloadingManager) else None
        primary = manager if self._tiering is None else self._tiering.primary_tier
        assert isinstance(primary, CPUOffloadingManager)
        self._primary = primary
        self._tiers: list[FaultyExampleTier] = []
        if self._tiering is not None:
            self._tiers = [
                tier
                for tier in self._tiering.secondary_tiers
                if isinstance(tier, FaultyExampleTier)
            ]
        engine = self._setup.engine
        bpc = self._setup.options["blocks_per_chunk"]
        self._ledger = EventLedger(
            engine.tokens_per_hash,
            tuple(tokens * bpc for tokens in engine.block_tokens),
            self._setup.options["self_describing_kv_events"],
            untimely=[
                tier_label(place, tier.tier_type)
                for place, (tier, its) in enumerate(
                    zip(self._tiers, self._setup.tiers, strict=True)
                )
                if its.weather == "wild"
            ],
        )
        self._engine = Engine(self._setup.model, engine, connector)

    def _make_connector(self, engine_id: str) -> Connector:
        setup = self._setup
        spec = "UnreliableTieringSpec" if setup.has_tiering else "UnreliableCPUSpec"
        extra: dict[str, Any] = {
            **setup.options,
            "spec_name": spec,
            "spec_module_path": "tests.e2e.parts",
            "secondary_tiers": [tier.entry for tier in setup.tiers],
            "engine_config": (setup.worker, self._workload.seed),
            "cpu_bytes_to_use": "1MiB",
        }
        config = offloading_config(
            setup.model, setup.engine, extra, engine_id, enable_kv_cache_events=True
        )
        extra["cpu_bytes_to_use"] = setup.cpu_blocks * config.row_bytes
        with ExitStack() as patches:
            patches.enter_context(
                patch.object(
                    kvtier.engine.offloading, "OffloadingConnectorScheduler", WatchedScheduler
                )
            )
            if setup.step_s is not None:
                patches.enter_context(
                    patch.object(
                        kvtier.tiering.spec,
                        "TieringOffloadingManager",
                        partial(TieringOffloadingManager, clock=self._clock),
                    )
                )
            return make_connector(replace(config, extra_config=extra))

    def __enter__(self) -> _Life:
        return self

    def __exit__(self, *_: object) -> None:
        self._heal()
        self._engine.shutdown()

    def _heal(self) -> None:
        for tier in self._tiers:
            tier.heal()
        for worker in self._stepwise():
            worker.heal()

    def _stepwise(self) -> Iterator[StepwiseWorker]:
        for worker in self._workers:
            assert isinstance(worker, OffloadingConnectorWorker)
            if isinstance(worker._worker, StepwiseWorker):
                yield worker._worker

    # --- what happens ---------------------------------------------------------------------------

    def run(self) -> None:
        """The whole life, and the checks at its end."""
        with self._without_pauses():
            for action, num_steps in self._workload.actions:
                self._do(action)
                for _ in range(num_steps):
                    self._step()
            self._finish()
            questions = list({tuple(a.prompt): a.prompt for a in self._answers.values()}.values())
            for first in range(0, len(questions), _NUM_EXAM_QUESTIONS):
                self._examine(questions[first : first + _NUM_EXAM_QUESTIONS])
            self._heal()
            self._finish()
            self._examine(questions[:_NUM_EXAM_QUESTIONS])
        self._check_answers()
        self._check_nothing_is_held()
        self._check_tiers()
        self._count()

    @contextmanager
    def _without_pauses(self) -> Iterator[None]:
        if self._setup.step_s is None:
            yield
            return
        # With the simulated clock, time passes with engine steps only.
        with patch.object(kvtier.engine.engine, "_IDLE_S", 0.0):
            yield

    def _do(self, action: Action) -> None:
        if isinstance(action, Arrive):
            request_id = None
            if action.takes_used_id and not self._engine._scheduler.is_known(_USED_ID):
                request_id = _USED_ID
                self._tally["ids used again"] += _USED_ID in self._name_of
            self._ask(self._prompt_of(action), action.max_tokens, action.params, request_id)
        elif isinstance(action, Abort):
            self._abort(action.number)
        elif isinstance(action, Reset):
            self._reset(action)
        elif action is Simple.DROP_DEVICE_CACHE:
            self._engine.drop_device_cache()
        elif action is Simple.GO_DARK:
            self._tally["black holes"] += 1
            for tier in self._tiers:
                tier.go_dark()
        else:
            for tier in self._tiers:
                tier.recover()
        self._hear()

    def _prompt_of(self, arrival: Arrive) -> list[int]:
        begin = _BASES[arrival.base][: arrival.length]
        if arrival.follows is not None:
            earlier = self._answers[f"r{arrival.follows}"]
            if earlier.result is not None:
                self._tally["requests that follow an answer"] += 1
                begin = earlier.prompt + earlier.result.token_ids
            else:
                begin = earlier.prompt
        return (begin[: MAX_PROMPT - len(arrival.ending)]) + arrival.ending

    def _ask(
        self,
        prompt: list[int],
        max_tokens: int,
        params: dict[str, Any] | None = None,
        request_id: str | None = None,
    ) -> None:
        name = f"r{len(self._answers)}"
        request_id = request_id or name
        self._name_of[request_id] = name
        self._answers[name] = Answered(prompt, [(0, self._weights)])
        self._engine.add_request(
            prompt,
            max_tokens,
            request_id=request_id,
            keep_logits=True,
            kv_transfer_params=params,
        )

    def _abort(self, number: int | None) -> None:
        request_id = f"r{number}"
        if number is None:
            self._step_until(lambda: bool(self._loading_ids()))
            request_id = next(iter(self._loading_ids()), "")
        elif self._name_of.get(_USED_ID) == request_id:
            request_id = _USED_ID
        is_loading = request_id in self._loading_ids()
        result = self._engine.abort(request_id)
        if result is not None:
            self._tally["aborts"] += 1
            self._tally["aborts during a load"] += is_loading
            self._note(result)

    def _loading_ids(self) -> list[str]:
        alive = self._alive().values()
        return [r.request_id for r in alive if r.state is RequestState.LOADING]

    def _reset(self, reset: Reset) -> None:
        if reset.during is not Await.NOTHING:
            is_store = reset.during is Await.STORE
            self._step_until(lambda: self._scheduler.is_moving(is_store))
        if not reset.brings_weights:
            self._engine.reset_cache()
            return
        self._weights += 1
        for request_id, request in self._alive().items():
            num_tokens = request.num_tokens - request.num_prompt_tokens
            answer = self._answers[self._name_of[request_id]]
            answer.weights.append((num_tokens, self._weights))
        self._engine.load_weights(self._weights)
        self._tally["other weights"] += 1

    def _step_until(self, is_so: Callable[[], bool]) -> None:
        """Take a few steps at most."""
        for _ in range(_FEW_STEPS):
            if is_so():
                return
            self._step()

    def _alive(self) -> dict[str, Request]:
        requests = self._engine._scheduler.requests
        return {request.request_id: request for request in requests}

    def _step(self) -> None:
        self._outcome.num_steps += 1
        for result in self._engine.step():
            self._note(result)
        self._hear()
        if self._setup.step_s is not None:
            self._clock.now += self._setup.step_s

    def _note(self, result: RequestResult) -> None:
        answer = self._answers[self._name_of[result.request_id]]
        require(answer.result is None, f"{result.request_id} has ended twice")
        answer.result = result
        self._digest(result.request_id, result.token_ids, result.num_loaded_tokens)
        self._tally["tokens loaded"] += result.num_loaded_tokens
        self._tally["requests that loaded"] += result.num_loaded_tokens > 0
        self._tally["preemptions"] += result.num_preemptions
        self._tally["requests"] += result.finish_reason is not FinishReason.ABORTED

    def _hear(self) -> None:
        events = self._engine.take_events()
        self._ledger.hear(events)
        self._digest(events)
        self._ledger.check(_HOST_MEMORY, self._primary.resident_keys())

    def _digest(self, *what: object) -> None:
        self._outcome.digest = crc32(repr(what).encode(), self._outcome.digest)

    def _finish(self) -> None:
        """Step until no request and no transfer is left."""
        most = self._outcome.num_steps + _MOST_STEPS
        while self._engine.has_requests or self._scheduler.has_pending_push_work():
            if self._setup.step_s is None:
                require(time.monotonic() < self._deadline, "it does not end")
            else:
                require(self._outcome.num_steps < most, "it does not end")
            self._step()

    def _examine(self, questions: list[list[int]]) -> None:
        """Repeat earlier prompts, now without the device cache."""
        self._engine.drop_device_cache()
        loaded_before = self._tally["tokens loaded"]
        for prompt in questions:
            self._ask(prompt, 1)
        self._finish()
        self._tally["tokens loaded in exams"] += self._tally["tokens loaded"] - loaded_before

    # --- what must hold -------------------------------------------------------------------------

    def _check_answers(self) -> None:
        unanswered = [name for name, answer in self._answers.items() if answer.result is None]
        require(not unanswered, f"without an answer: {unanswered}")
        self._tally["tokens compared"] += check_answers(self._setup.model, self._answers.values())

    def _check_nothing_is_held(self) -> None:
        self._scheduler.check_nothing_is_left()
        engine = self._engine
        require(
            engine.blocks.num_unused_blocks == self._setup.engine.num_blocks,
            f"device blocks still in use: {engine.blocks.num_unused_blocks} are not",
        )
        for worker in self._stepwise():
            require(worker.num_open == 0, f"{worker.num_open} copies were never reported")
        unreported = [job for tier in self._tiers for job in tier.unreported.values()]
        held = Counter(slot for job in unreported for slot in job.block_ids.tolist())
        if self._tiering is not None:
            require(
                self._tiering.primary_tier.tier_pins() == held,
                "other slots are kept for tiers than those of jobs that were never reported",
            )
            work = self._tiering.open_work()
            jobs, slots = work.pop("jobs"), work.pop("slots of tiers")
            require((jobs, slots) == (len(unreported), len(held)), f"jobs left: {jobs}, {slots}")
            promotions = work.pop("promotions")
            require(promotions <= len(unreported), f"promotions left: {promotions}")
            require(not any(work.values()), f"left in the manager: {work}")
        stats = self._scheduler.get_stats()
        assert stats is not None
        pinned, writing = (stats.gauges[f"kvtier_cpu_{what}_blocks"] for what in _IN_USE)
        require(pinned + writing <= len(held), f"slots in use: {pinned} pinned, {writing} written")
        for name, n in stats.counters.items():
            self._tally["counted: " + re.sub(r"^kvtier_(tier_\d_)?", "", name)] += int(n)

    def _check_tiers(self) -> None:
        self._hear()
        if self._tiering is None:
            return
        for place, tier in enumerate(self._tiers):
            guarded = self._tiering._tiers[place]
            if guarded.is_broken or guarded.is_resting(guarded._clock()):
                self._tally["tiers that were not heard at the end"] += 1
            else:
                self._tally["tiers compared with their events"] += 1
                self._ledger.check(tier_label(place, tier.tier_type), tier.example.blocks)

    def _count(self) -> None:
        self._tally["lives"] += 1
        self._tally[f"ranks: {self._setup.engine.world_size}"] += 1
        self._tally[f"blocks per chunk: {self._setup.options['blocks_per_chunk']}"] += 1
        self._tally[f"groups: {len(self._setup.model.groups)}"] += 1
        self._tally["lives by the real clock"] += self._setup.step_s is None
        self._tally["events"] += self._ledger.num_events
        for worker in self._stepwise():
            self._tally += worker.tally
        for tier in self._tiers:
            for fault in tier.injected:
                self._tally[f"fault: {fault.kind}"] += 1
