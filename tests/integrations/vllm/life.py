"""One life of stock vLLM with a disk tier, in a process of its own.

    PYTHON-WITH-VLLM -m tests.integrations.vllm.life FOLDER [plain]

With `plain`, one without kvtier follows. Prints one JSON document. What is in FOLDER outlives the
process: the model, and the slab file.
"""

from __future__ import annotations

import json
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Any

from kvtier.integrations.vllm.comparison import random_prompts, run_plain
from kvtier.integrations.vllm.demo import stdout_for_the_result_alone
from kvtier.integrations.vllm.in_process import (
    BLOCK_TOKENS,
    Answer,
    InProcessEngine,
    contained_environment,
)
from kvtier.integrations.vllm.tiny_model import LLAMA

BLOCKS_PER_PROMPT = 16
PROMPTS = random_prompts(3, BLOCKS_PER_PROMPT * BLOCK_TOKENS, "two lives")
_ENGINE_ARGS: dict[str, Any] = {"device_blocks": 256, "max_model_len": 1024}


def disk_options(folder: Path) -> dict[str, Any]:
    """Host memory for a prompt and a half, and a disk tier for all of them."""
    return {
        "cpu_bytes_to_use": BLOCKS_PER_PROMPT * 3 // 2 * LLAMA.bytes_per_block(BLOCK_TOKENS),
        "cache_namespace": "random weights, seed 0",
        # Nothing is to depend on how fast this machine is.
        "prefill_tokens_per_s": 0,
        "secondary_tiers": [
            {
                "type": "disk",
                "path": str(folder / "kv.slab"),
                "max_bytes": "64MiB",
                "load_timeout_ms": 60_000,
                "store_timeout_ms": 60_000,
                "max_pinned_share": 1,
            }
        ],
    }


def offloaded(folder: Path) -> dict[str, Any]:
    """Every prompt once."""
    answers: list[Answer] = []
    engine_args = _ENGINE_ARGS | {"disable_log_stats": False}
    with InProcessEngine(folder / "model", disk_options(folder), **engine_args) as engine:
        for index, prompt in enumerate(PROMPTS):
            answers.append(engine.generate(f"prompt-{index}", prompt))
            engine.settle()
        shown = engine.metrics()
    return {
        "answers": [asdict(answer) for answer in answers],
        # Some counters are there only once they have counted something.
        "figures": {
            metric.name.removeprefix("vllm:kvtier_"): metric.value
            for metric in shown
            if metric.name.startswith("vllm:kvtier_") and hasattr(metric, "value")
        },
    }


def plain(folder: Path) -> dict[str, Any]:
    """Without kvtier: computed, and from the device cache."""
    answers = run_plain(folder / "model", PROMPTS, **_ENGINE_ARGS)
    return asdict(answers)


def main() -> None:
    """Live, and print what came out."""
    folder = Path(sys.argv[1])
    with contained_environment(), stdout_for_the_result_alone():
        if not (folder / "model").exists():
            LLAMA.write(folder / "model")
        results: dict[str, Any] = offloaded(folder)
        if "plain" in sys.argv[2:]:
            results["plain"] = plain(folder)
    json.dump(results, sys.stdout)


if __name__ == "__main__":
    main()
