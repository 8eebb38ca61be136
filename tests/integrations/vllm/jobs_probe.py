"""Which metrics vLLM gets while tiers are busy, and when."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

from vllm.v1.kv_offload.base import ReqContext, ScheduleEndContext, make_offload_key

from kvtier.integrations.vllm.manager import ManagerAdapter
from kvtier.testing.vllm.in_process import InProcessEngine
from tests.integrations.vllm.adapter_probe import started, vllm_config
from tests.integrations.vllm.held_tier import HELD, HeldTier

_PATIENCE_S = 60.0
_SERIES = {
    "stored_blocks": "vllm:kvtier_tier_blocks:('0:HeldTier', 'store')",
    "late_stores": "vllm:kvtier_tier_late_jobs:('0:HeldTier', 'store')",
}
"""Counters of the tier, in the words of `OffloadingConnectorStats.reduce`."""


class _Engine:
    """The part of vLLM that asks for metrics, with a simulated clock."""

    def __init__(self, adapter: ManagerAdapter) -> None:
        self.adapter = adapter
        self.now = 10.0
        adapter._metrics._now = lambda: self.now
        self._told: Counter[str] = Counter()

    def store(self, name: str) -> None:
        """Store one block in host memory and in the tier."""
        context = ReqContext(name)
        key = make_offload_key(name.encode().ljust(32), 0)
        self.adapter.on_new_request(context)
        assert self.adapter.prepare_store([key], context) is not None
        self.adapter.complete_store({key}, context)
        self.adapter.on_request_finished(context)

    def step(self, after_s: float = 0.0) -> bool:
        """Take a step. Returns whether vLLM got a report at its end."""
        self.now += after_s
        self.adapter.on_schedule_end(ScheduleEndContext((), ()))
        stats = self.adapter.get_stats()
        if stats is None:
            return False
        self._told.update(stats.reduce())
        return True

    def counted(self, name: str) -> float:
        """The value of a counter of the tier, as reported to vLLM."""
        return self._told[_SERIES[name]]


@contextmanager
def _engine(**tier_keys: Any) -> Iterator[_Engine]:
    HeldTier.is_held = True
    tier = HELD | {"max_pinned_share": 1, "store_timeout_ms": 60_000} | tier_keys
    with started(vllm_config(secondary_tiers=[tier])) as (adapter, _):
        try:
            yield _Engine(adapter)
        finally:
            HeldTier.is_held = False


def stores() -> dict[str, Any]:
    """A store that is held for a while: whether vLLM gets a report at the end of each step."""
    with _engine() as engine:
        engine.store("first")
        begun = engine.step()
        waiting = [engine.step(0.001) for _ in range(5)]
        later = engine.step(0.03)
        HeldTier.is_held = False
        ended = engine.step(0.001)
        stored = engine.counted("stored_blocks")
        idle = engine.step(0.03)
    return {
        "begun": begun,
        "waiting": waiting,
        "later": later,
        "ended": ended,
        "stored": stored,
        "idle": idle,
    }


def late_store() -> dict[str, float]:
    """A store that a tier never reports, in an otherwise idle engine: the metrics when the engine
    takes no more steps."""
    with _engine(store_timeout_ms=150) as engine:
        engine.store("lost")
        deadline = time.monotonic() + _PATIENCE_S
        while engine.adapter.has_pending_work():
            assert time.monotonic() < deadline
            engine.step()
            time.sleep(0.002)
        return {"late_stores": engine.counted("late_stores")}


def unsettled() -> str:
    """The error if a tier does not end its jobs."""
    with _engine() as engine:
        engine.store("held")
        engine.step()
        scheduler = SimpleNamespace(
            has_requests=engine.adapter.has_pending_work,
            get_num_unfinished_requests=lambda: 0,
            connector=SimpleNamespace(connector_scheduler=SimpleNamespace(manager=engine.adapter)),
        )
        core = SimpleNamespace(scheduler=scheduler, batch_queue=None)
        vllm = InProcessEngine.__new__(InProcessEngine)
        vllm._engine = SimpleNamespace(engine_core=SimpleNamespace(engine_core=core))
        try:
            vllm.settle(timeout=0.0)
        except TimeoutError as error:
            return str(error)
        return "it has settled"
