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
"""A device cache that holds less than half of what the crowd asks for."""
NUM_FAMILIES, FAMILY_SIZE, NUM_ROUNDS = 4, 3, 3
FAMILY_TOKENS = PROMPT_TOKENS // 2
"""The beginning that prompts of a family have in common."""

Prompts = Sequence[Sequence[int]]
Answers = dict[str, Any]


class Probe:
    """One engine, and what it answered."""

    def __init__(self, engine: InProcessEngine) -> None:
        self.engine = engine
        self.answers: Answers = {}

    def ask(self, what: str, prompts: Prompts) -> None:
        """One after the other."""
        self.answers[what] = [
            asdict(self.engine.generate(f"{what}-{number}", prompt, _ANSWER_TOKENS))
            for number, prompt in enumerate(prompts)
        ]
        self.engine.settle()


def one_by_one(probe: Probe, order: dict[str, Any]) -> None:
    """Each prompt computed, from the device, and from where kvtier has it.

    `restart`: the prompts are there already, in a tier that lasts.
    """
    prompts = random_prompts(NUM_PROMPTS, PROMPT_TOKENS, "gpu")
    probe.ask("after a restart" if order["restart"] else "computed", prompts)
    probe.ask("from the device", prompts)
    probe.engine.reset_device_cache()
    probe.ask("from the host", prompts)
    if order["sleep"]:
        _sleep_in_the_middle(probe.engine)
        probe.ask("after a sleep", prompts)


def _sleep_in_the_middle(engine: InProcessEngine) -> None:
    """With a request under way whose blocks are being stored."""
    (prompt,) = random_prompts(1, PROMPT_TOKENS, "sleep")
    engine.add("interrupted", prompt, _ANSWER_TOKENS)
    while len(engine.answer("interrupted").tokens) < 2:
        engine.step()
    engine.abort("interrupted")
    engine.sleep()
    engine.wake_up()


def crowd(probe: Probe, _: dict[str, Any]) -> None:
    """Many prompts at the same time, again and again, with new ones among them.

    All that the device cannot keep comes back from the host while others are computed.
    """
    from tests.gpu.prompt_watch import PromptWatch

    engine, watch = probe.engine, PromptWatch(probe.engine)
    families = random_prompts(NUM_FAMILIES, FAMILY_TOKENS, "families")
    own_parts = random_prompts(NUM_FAMILIES * (FAMILY_SIZE + NUM_ROUNDS), FAMILY_TOKENS, "own")
    prompts = [
        families[number % NUM_FAMILIES][:FAMILY_TOKENS] + own
        for number, own in enumerate(own_parts)
    ]
    source = random.Random("crowd")
    # One by one at first: two requests that compute the same block do so in two ways.
    num_known = NUM_FAMILIES * FAMILY_SIZE
    for number in range(num_known):
        probe.ask(f"computed {number}", [prompts[number]])
    rounds = []
    for turn in range(NUM_ROUNDS):
        asked = source.sample(range(num_known + NUM_FAMILIES), num_known + NUM_FAMILIES)
        for number in asked:
            engine.add(f"{turn}-{number}", prompts[number], source.randint(8, 48))
        engine.run()
        rounds.append(
            {
                "known": [engine.answer(f"{turn}-{number}").cached_tokens for number in asked]
                if number < num_known
                else []
            }
        )
        engine.settle()
        num_known += NUM_FAMILIES
    probe.answers["rounds"] = rounds
    probe.answers["watch"] = {
        "wrong": watch.num_wrong,
        "compared": watch.num_compared,
        "busy steps": watch.num_busy_steps,
    }


if __name__ == "__main__":
    pass
