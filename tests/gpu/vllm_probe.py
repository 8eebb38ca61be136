"""Stock vLLM on the GPU, in a process of its own: each prompt computed, from the device, and from
where kvtier has it. Prints one JSON document.

    python -m tests.gpu.vllm_probe '{"model": "llama", "door": "connector", "kvtier": {...}, ...}'
"""

from __future__ import annotations

import json
import os
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Any

from kvtier.integrations.vllm.comparison import random_prompts
from kvtier.integrations.vllm.in_process import InProcessEngine, contain

NUM_PROMPTS = 3
PROMPT_TOKENS = 1_024
_ANSWER_TOKENS = 6


def main(order: dict[str, Any]) -> dict[str, Any]:
    """`restart`: the prompts are there already, in a tier that lasts."""
    answers: dict[str, Any] = {}
    with InProcessEngine(
        Path(order["model"]),
        order["kvtier"],
        door=order["door"],
        dtype="bfloat16",
        max_model_len=2_048,
        gpu_memory_utilization=0.05,
        kv_cache_memory_bytes=1 << 30,
        distributed_executor_backend="uni",
    ) as engine:
        prompts = random_prompts(NUM_PROMPTS, PROMPT_TOKENS, "gpu")

        def ask(what: str) -> None:
            answers[what] = [
                asdict(engine.generate(f"{what}-{number}", prompt, _ANSWER_TOKENS))
                for number, prompt in enumerate(prompts)
            ]
            engine.settle()

        if not order["restart"]:
            ask("computed")
        else:
            ask("after a restart")
        ask("from the device")
        engine.reset_device_cache()
        ask("from the host")
        engine.settle()
        return answers | {"figures": engine.figures()}


if __name__ == "__main__":
    os.environ.setdefault("PYTHONHASHSEED", "0")
    told = json.loads(sys.argv[1])
    cache = os.environ.get("VLLM_CACHE_ROOT")
    folder = Path(told["folder"])
    folder.mkdir()
    contain(folder)
    if cache is not None:  # what vLLM has found out about models
        os.environ["VLLM_CACHE_ROOT"] = cache
    out = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    print(json.dumps(main(told)), file=out, flush=True)
