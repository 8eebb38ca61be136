"""Engine steps of stock vLLM with a stopwatch on its manager, in a process that has vLLM.

Started by `tests.bench.vllm_step`, which asks for one round after the other.
"""

from __future__ import annotations

import gc
import shutil
import sys
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kvtier.testing.vllm.in_process import BLOCK_TOKENS, InProcessEngine, contained_environment
from kvtier.testing.vllm.tiny_model import LLAMA, VOCABULARY, TinyModel
from tests.bench.vllm_chats import Chats
from tests.bench.worker import answer

KVTIER = "kvtier"
VLLM = "vllm"
EXAMPLE = "example"
FS = "fs"

_HIDDEN = 64
_HEAD = 32


@dataclass(frozen=True, slots=True)
class SmallestModel(TinyModel):
    """One layer with one narrow head: engine steps are short even where prompts are long."""

    def shapes(self) -> Iterator[tuple[str, tuple[int, ...]]]:
        inner = self.config["intermediate_size"]
        layer = "model.layers.0"
        yield "model.embed_tokens.weight", (VOCABULARY, _HIDDEN)
        for name in ("q_proj", "k_proj", "v_proj"):
            yield f"{layer}.self_attn.{name}.weight", (_HEAD, _HIDDEN)
        yield f"{layer}.self_attn.o_proj.weight", (_HIDDEN, _HEAD)
        yield f"{layer}.mlp.gate_proj.weight", (inner, _HIDDEN)
        yield f"{layer}.mlp.up_proj.weight", (inner, _HIDDEN)
        yield f"{layer}.mlp.down_proj.weight", (_HIDDEN, inner)
        for norm in self.layer_norms:
            yield f"{layer}.{norm}.weight", (_HIDDEN,)
        yield "model.norm.weight", (_HIDDEN,)
        yield "lm_head.weight", (VOCABULARY, _HIDDEN)

    def bytes_per_block(self, tokens: int) -> int:
        return tokens * 2 * _HEAD * 4


MODEL = SmallestModel(
    config=LLAMA.config
    | {
        "max_position_embeddings": 1 << 15,
        "hidden_size": _HIDDEN,
        "head_dim": _HEAD,
        "num_attention_heads": 1,
        "num_key_value_heads": 1,
        "intermediate_size": 64,
        "num_hidden_layers": 1,
    },
    layer_norms=LLAMA.layer_norms,
    neutral_norm=1.0,
    cache_tensors=1,
)

CHATS = Chats()
MAX_RUNNING = 4
SLOTS = CHATS.distinct_blocks // 2
"""Slots of host memory. The tiers below have room for all blocks."""
_PATIENT = {"load_timeout_ms": 60_000, "store_timeout_ms": 60_000, "lookup_timeout_ms": 60_000}


def kvtier_tier(kind: str, folder: Path) -> dict[str, Any]:
    if kind == FS:
        return {"type": "fs", "root_dir": str(folder), "max_bytes": "1GiB", **_PATIENT}
    return {
        "type": "example",
        "max_blocks": 2 * CHATS.distinct_blocks,
        "simulate_async": True,
        "max_pinned_share": 1,
        **_PATIENT,
    }


def vllm_tier(kind: str, folder: Path) -> dict[str, Any]:
    if kind == FS:
        return {"type": "fs", "root_dir": str(folder)}
    return {"type": "KeepingTier", "module_path": "tests.bench.vllm_host_tiering"}


def offloading(subject: str, kind: str, folder: Path) -> dict[str, Any]:
    """The arguments that start an engine."""
    host = {"cpu_bytes_to_use": SLOTS * MODEL.bytes_per_block(BLOCK_TOKENS)}
    if subject == KVTIER:
        # Computing is fast with this model. With the guard on, kvtier would load less than vLLM.
        tiers = [kvtier_tier(kind, folder)]
        return {
            "plug_in": "connector",
            "kvtier": host | {"prefill_tokens_per_s": 0, "secondary_tiers": tiers},
        }
    spec = {"spec_name": "HostTieringSpec", "spec_module_path": "tests.bench.vllm_host_tiering"}
    return {
        "plug_in": "spec",
        "kvtier": spec | host | {"secondary_tiers": [vllm_tier(kind, folder)]},
    }


class Rounds:
    """Executes the commands of `tests.bench.vllm_step`."""

    def __init__(self, scratch: str) -> None:
        self._resources = ExitStack()
        folder = self._resources.enter_context(contained_environment())
        self._model = MODEL.write(folder / "model")
        self._folder = Path(scratch) / "tier"

    def run(self, what: dict[str, str]) -> dict[str, Any]:
        """One engine from start to end, with empty tiers."""
        from kvtier.integrations.vllm.connector import KVTierConnector
        from kvtier.integrations.vllm.vllm_api import OffloadingConnector
        from tests.bench.vllm_meters import CLOCKS, ConnectorMeter, ManagerMeter

        shutil.rmtree(self._folder, ignore_errors=True)
        self._folder.mkdir()
        now = CLOCKS[what["clock"]]
        start = offloading(what["subject"], what["tier"], self._folder)
        connector_meter = ConnectorMeter(now)
        with InProcessEngine(
            self._model,
            **start,
            device_blocks=MAX_RUNNING * CHATS.longest_blocks + 1,
            max_requests=MAX_RUNNING,
            max_model_len=CHATS.longest_blocks * BLOCK_TOKENS,
        ) as engine:
            warm_up(engine)
            gc.collect()
            gc.freeze()
            with connector_meter.on(KVTierConnector, OffloadingConnector):
                meter = ManagerMeter(engine._scheduler.connector, now)
                answers = CHATS.run(engine, meter.end_step)
            engine.settle()
            shown = engine.metrics()
        gc.unfreeze()
        return {
            "steps": whole_steps(meter.steps),
            "waiting_steps": whole_steps(meter.waiting_steps),
            "kinds": by_kind(meter.steps),
            "connector": connector_meter.added_ns() if what["subject"] == KVTIER else {},
            "tokens": {name: answer.tokens for name, answer in answers.items()},
            "cached_tokens": sum(answer.cached_tokens for answer in answers.values()),
            "prompt_tokens": sum(map(len, CHATS.prompts().values())),
            "loaded_tokens": loaded_tokens(shown),
            "promoted_blocks": promoted_blocks(shown),
        }

    def end(self) -> None:
        self._resources.close()


def warm_up(engine: InProcessEngine) -> None:
    """Run two requests, which pay for one-time setup."""
    for number in range(2):
        engine.generate(f"warm-up-{number}", [5 + number] * (4 * BLOCK_TOKENS + 8))
    engine.settle()


def loaded_tokens(shown: Sequence[Any]) -> int:
    """Prompt tokens that were loaded from outside the device."""
    found = [
        metric.value
        for metric in shown
        if metric.name == "vllm:prompt_tokens_cached_by_source"
        if metric.labels["source"] != "device"
    ]
    return int(sum(found))


def promoted_blocks(shown: Sequence[Any]) -> float:
    """Blocks that came from below host memory, from kvtier's or vLLM's counters."""
    row_bytes = MODEL.bytes_per_block(BLOCK_TOKENS)
    blocks = {
        "vllm:kvtier_cpu_promoted_blocks": 1,
        "vllm:kv_offload_tiering_read_bytes": 1 / row_bytes,
    }
    found = [metric.value * blocks[metric.name] for metric in shown if metric.name in blocks]
    return float(sum(found))


def whole_steps(steps: list[Any]) -> list[tuple[int, float]]:
    """For each step: nanoseconds of wall time, and in the manager."""
    return [(step.wall_ns, sum(step.ns.values())) for step in steps]


def by_kind(steps: list[Any]) -> dict[str, dict[str, float]]:
    """Calls and total nanoseconds by kind."""
    kinds: dict[str, dict[str, float]] = {}
    for step in steps:
        for name, calls in step.calls.items():
            kind = kinds.setdefault(name, {"calls": 0, "ns": 0.0})
            kind["calls"] += calls
            kind["ns"] += step.ns[name]
    return kinds


if __name__ == "__main__":
    answer(Rounds, [sys.argv[1]], __doc__)
