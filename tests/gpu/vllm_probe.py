"""Stock vLLM on the GPU, in a process of its own. Prints one JSON document.

python -m tests.gpu.vllm_probe '{"model": "llama", "door": "connector", "kvtier": {...}, ...}'
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

from kvtier.integrations.vllm.comparison import random_prompts
from kvtier.integrations.vllm.in_process import InProcessEngine, contain

NUM_PROMPTS = 3
PROMPT_TOKENS = 1_024
"""That can come from a cache. A prompt has a few more."""
_ANSWER_TOKENS = 6

CROWD = {"device_blocks": 160, "max_requests": 8}
"""A device cache that holds less than half of what a crowd asks for."""
SLEEP = {"enable_sleep_mode": True, "device_blocks": None, "kv_cache_memory_bytes": 16 << 30}
"""vLLM wants the device to have more free memory when it sleeps, though others come and go: much of
it has to be its own."""
NUM_FAMILIES, FAMILY_SIZE, NUM_ROUNDS = 4, 3, 3
FAMILY_TOKENS = PROMPT_TOKENS // 2
"""The beginning that the prompts of a family have in common."""

Order = dict[str, Any]


class Probe:
    """One engine, and what it has answered."""

    def __init__(self, engine: InProcessEngine) -> None:
        self.engine = engine
        self.answers: dict[str, Any] = {}

    def ask(self, what: str, prompts: Sequence[Sequence[int]]) -> None:
        """One after the other."""
        self.answers[what] = [
            asdict(self.engine.generate(f"{what}-{number}", prompt, _ANSWER_TOKENS))
            for number, prompt in enumerate(prompts)
        ]
        self.engine.settle()


def one_by_one(probe: Probe, order: Order) -> None:
    """Each prompt computed, from the device, and from where kvtier has it.

    `restart`: the prompts are there already, in a tier that lasts. `sleep`: once more after that.
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
    """Of a request whose blocks are being stored. They get there first: vLLM itself refuses to
    sleep while a store holds blocks of the device."""
    (prompt,) = random_prompts(1, PROMPT_TOKENS, "sleep")
    engine.add("aborted", prompt, _ANSWER_TOKENS)
    while len(engine.answer("aborted").tokens) < 2:
        engine.step()
    engine.abort("aborted")
    engine.settle()
    engine.sleep()
    engine.wake_up()


def crowd(probe: Probe, _: Order) -> None:
    """All prompts at the same time, again and again, with new ones among them.

    What the device cannot keep comes back from the host while others are computed and stored.
    """
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
        Path(order["model"]), order["kvtier"], door=order["door"], **(options | order["engine"])
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
    """How many CUDA graphs have been launched since; the one item grows."""
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
