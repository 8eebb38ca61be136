"""A workload of chats: prompts with common prefixes, more than host memory holds.

All chats begin with the same instructions. Every turn of a chat repeats all turns before it. Chats
take turns, so that the blocks of a chat have left the device, and mostly host memory too, before
its next turn.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable
from dataclasses import dataclass

from kvtier.testing.vllm.in_process import BLOCK_TOKENS, Answer, InProcessEngine
from kvtier.testing.vllm.tiny_model import VOCABULARY

_TAIL_TOKENS = 8
"""A prompt ends a little after the end of a block."""


@dataclass(frozen=True)
class Chats:
    """Number and length of the chats."""

    num_chats: int = 12
    num_turns: int = 6
    common_blocks: int = 64
    turn_blocks: int = 40
    answer_tokens: int = 12
    in_flight: int = 6
    """Requests that wait or run at the same time."""

    @property
    def longest_blocks(self) -> int:
        """Blocks of the longest prompt and its answer."""
        return self.common_blocks + self.num_turns * self.turn_blocks + 1

    @property
    def distinct_blocks(self) -> int:
        """Distinct blocks of all prompts together."""
        return self.common_blocks + self.num_chats * self.num_turns * self.turn_blocks

    def prompts(self) -> dict[str, list[int]]:
        """Prompts by name of the request, in order of arrival."""
        source = random.Random("chats")

        def text(blocks: int) -> list[int]:
            return [source.randrange(3, VOCABULARY) for _ in range(blocks * BLOCK_TOKENS)]

        common = text(self.common_blocks)
        chats = [common + text(self.num_turns * self.turn_blocks) for _ in range(self.num_chats)]
        prompts = {}
        for turn in range(1, self.num_turns + 1):
            blocks = self.common_blocks + turn * self.turn_blocks
            for number, chat in enumerate(chats):
                tail = [source.randrange(3, VOCABULARY) for _ in range(_TAIL_TOKENS)]
                prompts[f"turn-{turn}-chat-{number}"] = chat[: blocks * BLOCK_TOKENS] + tail
        return prompts

    def run(self, engine: InProcessEngine, step_ended: Callable[[int], None]) -> dict[str, Answer]:
        """Run all chats. Calls `step_ended` with the nanoseconds of each engine step.

        Requests arrive by number of steps, not by time.
        """
        waiting = list(self.prompts().items())[::-1]
        names = [name for name, _ in waiting][::-1]
        under_way: list[str] = []
        while waiting or under_way:
            while waiting and len(under_way) < self.in_flight:
                name, prompt = waiting.pop()
                engine.add(name, prompt, self.answer_tokens)
                under_way.append(name)
            began = time.perf_counter_ns()
            engine.step()
            step_ended(time.perf_counter_ns() - began)
            under_way = [
                name for name in under_way if len(engine.answer(name).tokens) < self.answer_tokens
            ]
        return {name: engine.answer(name) for name in names}
