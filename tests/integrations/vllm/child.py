"""Everything the end-to-end test wants to know of stock vLLM, in one start of Python.

    PYTHON-WITH-VLLM -m tests.integrations.vllm.child

Prints one JSON document. Importing vLLM takes longer than any of the parts.
"""

from __future__ import annotations

import io
import json
import sys
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import redirect_stdout
from dataclasses import asdict
from pathlib import Path
from typing import Any

from kvtier.integrations.vllm import demo
from kvtier.integrations.vllm.comparison import (
    OffloadedAnswers,
    PlainAnswers,
    compare,
    random_prompts,
    run_offloaded,
    run_plain,
)
from kvtier.integrations.vllm.in_process import (
    BLOCK_TOKENS,
    Answer,
    InProcessEngine,
    contained_environment,
)
from kvtier.integrations.vllm.tiny_model import GEMMA3_HYBRID, LLAMA, TinyModel

PROMPT_TOKENS = 1024


# Long enough that with 1 and with 4 blocks per chunk the prompts are the same.
PROMPTS = random_prompts(4, PROMPT_TOKENS, "end to end", blocks_per_chunk=4)
_ENGINE_ARGS: dict[str, Any] = {"device_blocks": 512, "max_model_len": 2 * PROMPT_TOKENS}


class Models:
    """Each model is written once, and each run once without kvtier."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._known: dict[str, tuple[Path, PlainAnswers]] = {}

    def get(self, model: TinyModel) -> tuple[Path, PlainAnswers]:
        """Where it is, and what stock vLLM alone makes of the prompts."""
        name = model.config["model_type"]
        if name not in self._known:
            path = model.write(self._folder / name)
            self._known[name] = path, run_plain(path, PROMPTS, **_ENGINE_ARGS)
        return self._known[name]


def compared(
    models: Models,
    model: TinyModel = LLAMA,
    blocks_per_chunk: int = 1,
    slots: int = 512,
    warm_order: Sequence[int] | None = None,
    **extra_config: Any,
) -> dict[str, Any]:
    """With and without kvtier; `slots` is the capacity of the primary tier."""
    path, plain = models.get(model)
    slot_bytes = model.bytes_per_block(BLOCK_TOKENS) * blocks_per_chunk
    extra_config |= {"cpu_bytes_to_use": slots * slot_bytes, "blocks_per_chunk": blocks_per_chunk}
    offloaded = run_offloaded(path, PROMPTS, extra_config, warm_order=warm_order, **_ENGINE_ARGS)
    comparison = compare(PROMPTS, plain, offloaded)
    return asdict(comparison) | {"good": comparison.good}


def demo_as_a_user_runs_it(models: Models) -> dict[str, Any]:
    """The demo's own JSON and exit code."""
    output = io.StringIO()
    with redirect_stdout(output):
        exit_code = demo.main(["--json", "--requests", "2", "--prompt-tokens", "2048"])
    (line,) = output.getvalue().splitlines()
    result: dict[str, Any] = json.loads(line)
    return result | {"exit_code": exit_code}


def small_tier(models: Models) -> dict[str, Any]:
    """Room for two of the four prompts: the last two come back, the others are computed."""
    from tests.integrations.vllm import recording_spec

    result = compared(
        models,
        slots=2 * PROMPT_TOKENS // BLOCK_TOKENS,
        warm_order=[3, 2, 1, 0],
        spec_name="RecordingSpec",
        spec_module_path=recording_spec.__name__,
    )
    (recording,) = recording_spec.last_recording
    stores = [call.result for call in recording.calls if call.method == "prepare_store"]
    return result | {"evictions": sum(bool(store and store["evicted"]) for store in stores)}


def tier_below(models: Models, model: TinyModel, blocks_per_prompt: int) -> dict[str, Any]:
    """Host memory has room for two of the four prompts, a tier below for all of them."""
    path, plain = models.get(model)
    slots = 2 * blocks_per_prompt
    tier = {
        "type": "example",
        "simulate_async": True,
        "latency_ms": 5,
        # Nothing is to depend on how fast this machine is.
        "load_timeout_ms": 60_000,
        "store_timeout_ms": 60_000,
        "max_pinned_share": 1,
    }
    extra_config = {
        "cpu_bytes_to_use": slots * model.bytes_per_block(BLOCK_TOKENS),
        "prefill_tokens_per_s": 0,
        "secondary_tiers": [tier],
    }
    threads = set(threading.enumerate())
    answers: dict[str, list[Answer]] = {"cold": [], "warm": []}
    with InProcessEngine(path, extra_config, **_ENGINE_ARGS, disable_log_stats=False) as engine:
        for name, collected in answers.items():
            for index, prompt in enumerate(PROMPTS):
                collected.append(engine.generate(f"{name}-{index}", prompt))
                engine.settle()
            engine.reset_device_cache()
        shown = engine.metrics()
    comparison = compare(PROMPTS, plain, OffloadedAnswers(**answers))
    return asdict(comparison) | {
        "figures": {
            metric.name.removeprefix("vllm:kvtier_"): metric.value
            for metric in shown
            if metric.name.startswith("vllm:kvtier_") and hasattr(metric, "value")
        },
        "threads_left": [thread.name for thread in set(threading.enumerate()) - threads],
        "memory_left": [
            line for line in Path("/proc/self/maps").read_text().splitlines() if "kvtier-" in line
        ],
    }


def one_wrong_bit(models: Models) -> dict[str, Any]:
    """The comparison has to fail."""
    from tests.integrations.vllm import corrupting_spec

    return compared(models, spec_name="CorruptingSpec", spec_module_path=corrupting_spec.__name__)


def metrics(models: Models) -> dict[str, Any]:
    """What vLLM shows of kvtier, in the second of two engines of this process."""
    path, _ = models.get(LLAMA)
    prompt = PROMPTS[0]
    engine_args = _ENGINE_ARGS | {"disable_log_stats": False}
    shown: list[Any] = []
    for _ in range(2):
        with InProcessEngine(path, {"cpu_bytes_to_use": "16MiB"}, **engine_args) as engine:
            engine.generate("cold", prompt)
            engine.settle()
            engine.reset_device_cache()
            engine.generate("warm", prompt)
            engine.settle()
            shown = engine.metrics()
    return {
        "by_name": {
            metric.name: metric.value for metric in shown if metric.name.startswith("vllm:kvtier")
        },
        "by_source": {
            metric.labels["source"]: metric.value
            for metric in shown
            if metric.name == "vllm:prompt_tokens_cached_by_source"
        },
    }


def adapters(models: Models) -> dict[str, Any]:
    """Without an engine."""
    from tests.integrations.vllm import adapter_probe

    return {
        "cost": adapter_probe.lookup_cost(),
        "mapped": adapter_probe.mapped_answers(),
        "failed": adapter_probe.failed_transfers(),
        "refused": adapter_probe.refused_configuration(),
        "disk_without_namespace": adapter_probe.disk_without_namespace(),
        "files_of_replicas": adapter_probe.files_of_replicas(),
        "file_of_an_only_engine": adapter_probe.file_of_an_only_engine(),
        "version_warnings": adapter_probe.version_warnings(),
    }


PARTS: dict[str, Callable[[Models], dict[str, Any]]] = {
    "demo": demo_as_a_user_runs_it,
    "adapters": adapters,
    "metrics": metrics,
    "chunks": lambda models: compared(models, blocks_per_chunk=4),
    "hybrid": lambda models: compared(models, GEMMA3_HYBRID),
    "hybrid_chunks": lambda models: compared(models, GEMMA3_HYBRID, blocks_per_chunk=4),
    "small_tier": small_tier,
    "tier_below": lambda models: tier_below(models, LLAMA, blocks_per_prompt=32),
    # Of the two groups with a window of 128 tokens, vLLM keeps the last four blocks.
    "hybrid_tier_below": lambda models: tier_below(models, GEMMA3_HYBRID, 32 + 2 * 4),
    "one_wrong_bit": one_wrong_bit,
}


def main() -> None:
    """Run all parts and print what came out."""
    results: dict[str, Any] = {}
    with contained_environment() as folder, demo.stdout_for_the_result_alone():
        models = Models(folder)
        for name, part in PARTS.items():
            began = time.perf_counter()
            results[name] = part(models) | {"seconds": round(time.perf_counter() - began, 1)}
    json.dump(results, sys.stdout)


if __name__ == "__main__":
    main()
