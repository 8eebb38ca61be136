"""The reference engine over a valkey tier. Host memory has room for one prompt, so that a prompt
which was served before another one is only in the tier."""

from __future__ import annotations

import time
import uuid
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from kvtier.connector import OffloadingConnectorScheduler
from kvtier.engine import Engine, EngineConfig, make_connector, offloading_config
from kvtier.tiering.manager import TieringOffloadingManager
from tests.engine.models import FULL, random_tokens
from tests.engine.oracle import assert_same
from tests.tiering.patience import wait_until

__all__ = ["BLOCKS", "LONGEST_S", "PROMPTS", "TOKENS", "Serving", "serving"]

_BLOCK_TOKENS, TOKENS = 8, 96
BLOCKS = TOKENS // _BLOCK_TOKENS
ENGINE = EngineConfig(block_tokens=(_BLOCK_TOKENS,), num_blocks=(32,), token_budget=40)
PROMPTS = [random_tokens(seed, TOKENS + 1) for seed in range(4)]

_LOOKUP_TIMEOUT_MS, _LOAD_TIMEOUT_MS = 200, 400
LONGEST_S = 4.0
"""A request waits 0.6 s for the tier at most. The rest is for a busy machine, and is less than the
5 s for which a connection waits."""


class Serving:
    """Serves prompts, and compares every token and logit with those of a run without offloading."""

    def __init__(self, engine: Engine, scheduler: OffloadingConnectorScheduler) -> None:
        self.engine = engine
        self._scheduler = scheduler
        self.figures: dict[str, float] = {}
        """The sums of all counters, and the latest gauges."""
        self.longest_s = 0.0

    def serve(self, prompt: Sequence[int]) -> int:
        """Serve a prompt that is not on the device. Returns how many tokens were loaded."""
        self.engine.drop_device_cache()
        began = time.monotonic()
        [result] = self.engine.generate([list(prompt)], 2, keep_logits=True)
        seconds = time.monotonic() - began
        self.longest_s = max(self.longest_s, seconds)
        assert seconds < LONGEST_S, f"a request was held for {seconds:.1f} s"
        assert_same(result, FULL, prompt)
        assert self.engine.drain()
        self._note_figures()
        return result.num_loaded_tokens

    def _note_figures(self) -> None:
        stats = self._scheduler.manager.get_stats()
        assert stats is not None
        for name, value in stats.counters.items():
            self.figures[name] = self.figures.get(name, 0) + value
        self.figures |= stats.gauges

    def counted(self, name: str) -> float:
        """A counter of the valkey tier."""
        return self.figures.get(f'kvtier_valkey_{name}{{tier="0:valkey"}}', 0)

    def serve_all(self) -> list[int]:
        return [self.serve(prompt) for prompt in PROMPTS]

    def serve_until_loaded(self) -> None:
        """Serve until every prompt comes from the tier in one round. Raises if it never does."""
        wait_until(lambda: self.serve_all() == [TOKENS] * len(PROMPTS), "all prompts are loaded")

    def step_for(self, seconds: float) -> None:
        """Let the engine idle."""
        end = time.monotonic() + seconds
        while time.monotonic() < end:
            self.engine.step()


@contextmanager
def serving(
    url: str, *, namespace: str = "ours", prefill_tokens_per_s: float = 0, **tier: Any
) -> Iterator[Serving]:
    """`tier`: further keys of the tier's entry."""
    entry = {
        "type": "valkey",
        "url": url,
        "max_pinned_share": 1,
        "lookup_timeout_ms": _LOOKUP_TIMEOUT_MS,
        "load_timeout_ms": _LOAD_TIMEOUT_MS,
        "store_timeout_ms": 1000,
        **tier,
    }
    extra: dict[str, Any] = {
        "cpu_bytes_to_use": "1MiB",
        "cache_namespace": namespace,
        "prefill_tokens_per_s": prefill_tokens_per_s,
        "shutdown_timeout_ms": 1000,
        "secondary_tiers": [entry],
    }
    engine_id = f"test-{uuid.uuid4().hex}"
    row_bytes = offloading_config(FULL, ENGINE, extra, engine_id).row_bytes
    extra["cpu_bytes_to_use"] = (BLOCKS + 3) * row_bytes
    connector = make_connector(offloading_config(FULL, ENGINE, extra, engine_id))
    engine = Engine(FULL, ENGINE, connector)
    try:
        assert isinstance(connector.scheduler, OffloadingConnectorScheduler)
        assert isinstance(connector.scheduler.manager, TieringOffloadingManager)
        yield Serving(engine, connector.scheduler)
    finally:
        engine.shutdown()
