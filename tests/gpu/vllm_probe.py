"""Stock vLLM on the GPU, in a process of its own. Prints one JSON document.

python -m tests.gpu.vllm_probe '{"model": "llama", "plug_in": "connector", "kvtier": {...}, ...}'
"""

from __future__ import annotations

import json
import os
import random
import sys
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from kvtier.testing.vllm.in_process import InProcessEngine, contain
from kvtier.testing.vllm.tiny_model import random_prompts

NUM_PROMPTS = 3
PROMPT_TOKENS = 1_024
"""Tokens that can come from a cache. A prompt has a few more."""
_ANSWER_TOKENS = 6

CROWD = {"device_blocks": 160, "max_requests": 8}
"""A device cache for less than half of the blocks of a crowd."""
SLEEP = {"enable_sleep_mode": True, "device_blocks": None, "kv_cache_memory_bytes": 16 << 30}
"""vLLM requires that a sleep frees device memory although other processes come and go, so much of
it must be its own."""
NUM_FAMILIES, FAMILY_SIZE, NUM_ROUNDS = 4, 3, 3
FAMILY_TOKENS = PROMPT_TOKENS // 2
"""The common beginning of a family's prompts."""

Order = dict[str, Any]


class Probe:
    """One engine and its answers."""

    def __init__(self, engine: InProcessEngine) -> None:
        self.engine = engine
        self.answers: dict[str, Any] = {}

    def ask(self, what: str, prompts: Sequence[Sequence[int]]) -> None:
        """Run prompts one after the other."""
        self.answers[what] = [
            asdict(self.engine.generate(f"{what}-{number}", prompt, _ANSWER_TOKENS))
            for number, prompt in enumerate(prompts)
        ]
        self.engine.settle()


def one_by_one(probe: Probe, order: Order) -> None:
    """Each prompt computed, from the device, and from kvtier.

    `restart`: the prompts are there already, in a persistent tier. `sleep`: once more after a
    sleep.
    """
    prompts = random_prompts(NUM_PROMPTS, PROMPT_TOKENS, "gpu")
    probe.ask("after a restart" if order["restart"] else "computed", prompts)
    probe.ask("from the device", prompts)
    probe.engine.reset_device_cache()
    probe.ask("from the host", prompts)
    if order["sleep"]:
        _sleep_after_an_abort(probe.engine)
        probe.ask("after a sleep", prompts)


def _sleep_after_an_abort(engine: InProcessEngine) -> None:
    """Abort a request whose blocks are being stored. The stores end first: vLLM refuses to sleep
    while a store holds device blocks."""
    (prompt,) = random_prompts(1, PROMPT_TOKENS, "sleep")
    engine.add("aborted", prompt, _ANSWER_TOKENS)
    while len(engine.answer("aborted").tokens) < 2:
        engine.step()
    engine.abort("aborted")
    engine.settle()
    engine.sleep()
    engine.wake_up()


def crowd(probe: Probe, _: Order) -> None:
    """All prompts at the same time, again and again, with new ones among them. Blocks that the
    device cannot keep come back from the host while other requests compute and store."""
    from tests.gpu.prompt_watch import PromptWatch

    engine, watch = probe.engine, PromptWatch(probe.engine)
    num_known = NUM_FAMILIES * FAMILY_SIZE
    families = random_prompts(NUM_FAMILIES, FAMILY_TOKENS, "families")
    own_parts = random_prompts(num_known + NUM_FAMILIES * NUM_ROUNDS, FAMILY_TOKENS, "own parts")
    prompts = [
        families[number % NUM_FAMILIES][:FAMILY_TOKENS] + own
        for number, own in enumerate(own_parts)
    ]
    # One by one at first: two requests that compute the same block may do so in two ways.
    for number in range(num_known):
        probe.ask(f"prompt {number}", [prompts[number]])
    cached: dict[str, list[int]] = {"known": [], "new": []}
    chance = random.Random("crowd")
    for turn in range(NUM_ROUNDS):
        asked = chance.sample(range(num_known + NUM_FAMILIES), num_known + NUM_FAMILIES)
        for number in asked:
            engine.add(f"{turn}-{number}", prompts[number], chance.randint(8, 48))
        engine.run()
        engine.settle()
        for number in asked:
            which = "known" if number < num_known else "new"
            cached[which].append(engine.answer(f"{turn}-{number}").cached_tokens)
        num_known += NUM_FAMILIES
    probe.answers["cached"] = cached
    probe.answers["watch"] = {
        "wrong": watch.num_wrong,
        "compared": watch.num_compared,
        "busy steps": watch.num_busy_steps,
    }


def main(order: Order) -> dict[str, Any]:
    num_replays = _count_replays()
    options = {
        "dtype": "bfloat16",
        "max_model_len": 2_048,
        "gpu_memory_utilization": 0.05,
        "kv_cache_memory_bytes": 1 << 30,
        "distributed_executor_backend": "uni",
    }
    if order["sleep"]:
        options |= SLEEP
    if order["crowd"]:
        options |= CROWD
    with InProcessEngine(
        Path(order["model"]),
        order["kvtier"],
        plug_in=order["plug_in"],
        **(options | order["engine"]),
    ) as engine:
        probe = Probe(engine)
        (crowd if order["crowd"] else one_by_one)(probe, order)
        engine.settle()
        settings = engine._engine.vllm_config
        return probe.answers | {
            "figures": engine.figures(),
            "mode": {
                "asynchronous": settings.scheduler_config.async_scheduling,
                "tokens per step": settings.scheduler_config.max_num_batched_tokens,
                "graph replays": num_replays[0],
            },
        }


def _count_replays() -> list[int]:
    """CUDA graphs launched from now on; the one item grows."""
    import torch

    count, replay = [0], torch.cuda.CUDAGraph.replay

    def counted(graph: Any) -> None:
        count[0] += 1
        replay(graph)

    torch.cuda.CUDAGraph.replay = counted
    return count


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
