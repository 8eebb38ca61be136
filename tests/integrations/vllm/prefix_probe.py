"""vLLM's own loop over the keys of a prompt, with and without an announcement of the keys."""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence
from functools import partial
from inspect import signature
from types import SimpleNamespace
from typing import Any, cast

from vllm.distributed.kv_transfer.kv_connector.v1.offloading.scheduler import (
    OffloadingConnectorScheduler,
)
from vllm.v1.kv_offload.base import ReqContext, ScheduleEndContext, make_offload_key

from kvtier.base import OffloadKey
from kvtier.integrations.vllm.manager import ManagerAdapter
from kvtier.integrations.vllm.manager_state import announce_prefix_lookups
from tests.integrations.vllm.adapter_probe import is_moving_blocks, started, vllm_config

_PATIENCE_S = 60.0
_SLOT = 4096
_LOOP = OffloadingConnectorScheduler._maximal_prefix_lookup
_OTHERS = (None, None, 0)[: len(signature(_LOOP).parameters) - 3]
"""Additional arguments of later releases, for events."""


def _prompt(name: str, num_blocks: int) -> list[OffloadKey]:
    return [make_offload_key(f"{name}{n}".encode().ljust(32), 0) for n in range(num_blocks)]


def _scheduler(adapter: ManagerAdapter) -> Any:
    """The part of vLLM's scheduler that the loop needs."""
    tracker = SimpleNamespace(record_lookup=lambda *_: None)
    scheduler = SimpleNamespace(manager=adapter, _events_tracker=tracker)
    scheduler._maximal_prefix_lookup = partial(_LOOP, scheduler)
    return scheduler


class _Engine:
    def __init__(self, adapter: ManagerAdapter) -> None:
        self.adapter = adapter
        self.one_by_one = _scheduler(adapter)
        self.announced = _scheduler(adapter)
        announce_prefix_lookups(self.announced, adapter)
        self._num_requests = 0

    def begin(self) -> ReqContext:
        self._num_requests += 1
        context = ReqContext(str(self._num_requests))
        self.adapter.on_new_request(context)
        return context

    def end_step(self) -> None:
        self.adapter.on_schedule_end(ScheduleEndContext((), ()))

    def store(self, prompt: Sequence[OffloadKey]) -> None:
        """Store a prompt in host memory and in tiers."""
        context = self.begin()
        assert self.adapter.prepare_store(prompt, context) is not None
        self.adapter.complete_store(set(prompt), context)
        self.adapter.on_request_finished(context)
        deadline = time.monotonic() + _PATIENCE_S
        while self.adapter.has_pending_work() or is_moving_blocks(self.adapter):
            assert time.monotonic() < deadline
            self.end_step()
        self.end_step()

    def asked(
        self, scheduler: Any, prompt: list[OffloadKey], *, may_load: bool = True
    ) -> list[int | None]:
        """The answers to a new request, step by step, until it need not wait. Repeated answers to
        wait are given once."""
        context = self.begin()
        if not may_load:
            self.adapter.give_up_loading(context.req_id)
        told: list[int | None] = []
        deadline = time.monotonic() + _PATIENCE_S
        while not told or told[-1] is None:
            assert time.monotonic() < deadline
            answer = scheduler._maximal_prefix_lookup(prompt, context, *_OTHERS)
            if answer is not None or not told:
                told.append(answer)
            self.end_step()
        self.adapter.on_request_finished(context)
        self.end_step()
        return told


def without_the_loop() -> dict[str, Any]:
    """What is changed in the scheduler of a release without the loop, and what is logged."""
    said: list[str] = []

    class Lines(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            said.append(record.getMessage())

    logger, lines = logging.getLogger("kvtier.integrations.vllm.manager_state"), Lines()
    logger.addHandler(lines)
    logger.setLevel(logging.INFO)
    scheduler = SimpleNamespace()
    announce_prefix_lookups(scheduler, cast("ManagerAdapter", None))
    logger.removeHandler(lines)
    return {"changed": sorted(vars(scheduler)), "said": said}


def report() -> dict[str, Any]:
    """The answers with an announcement and without, by case."""
    found: dict[str, Any] = {"without_the_loop": without_the_loop()}
    tier = {
        "type": "example",
        "max_blocks": 64,
        "max_pinned_share": 1,
        "lookup_timeout_ms": 60_000,
        "load_timeout_ms": 60_000,
        "store_timeout_ms": 60_000,
    }
    config = vllm_config(cpu_bytes_to_use=6 * _SLOT, secondary_tiers=[tier], prefill_tokens_per_s=0)
    with started(config) as (adapter, _):
        engine = _Engine(adapter)
        for way in ("announced", "one_by_one"):
            scheduler = getattr(engine, way)
            above, below = _prompt(f"{way} above", 3), _prompt(f"{way} below", 2)
            for prompt in (below, _prompt(f"{way} others", 3), above):
                engine.store(prompt)
            found[way] = {
                "all above": engine.asked(scheduler, above),
                "head above": engine.asked(scheduler, [*above[:2], *_prompt("new", 2)]),
                "nothing": engine.asked(scheduler, _prompt("new", 2)),
                "given up": engine.asked(scheduler, above, may_load=False),
                "below": engine.asked(scheduler, below),
            }
    return found
