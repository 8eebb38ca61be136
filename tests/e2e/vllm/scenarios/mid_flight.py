"""Requests arrive and are aborted, and caches are reset, while copies are under way: stories drawn
from a seed, in one engine."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from random import Random
from typing import Any

from kvtier.testing.vllm.in_process import Answer
from tests.e2e.vllm.scenarios.faulty_transfers import FAULTS, FaultyEngine

MAX_TOKENS = 6


@dataclass
class Story:
    """The outcome of a story."""

    answers: list[tuple[int, Answer]] = field(default_factory=list)
    """The requests that were not aborted: number of the prompt, and the answer."""
    happened: Counter[str] = field(default_factory=Counter)


class MidFlight(FaultyEngine):
    """An engine that runs such stories, one after the other."""

    def live(self, seed: int, num_events: int, prompts: list[list[int]]) -> dict[str, Any]:
        """Run one story. At its end, no copy is under way."""
        chance = Random(seed)
        story = Story()
        requests: dict[str, int] = {}
        events: list[Callable[[], None]] = [
            lambda: self._begin(story, requests, chance, prompts),
            self._engine.step,
            lambda: self._abort_one(story, requests, chance),
            lambda: self._hold(chance.random() < 0.6),
            lambda: self._reset_device(story),
            lambda: self._reset_all(story),
        ]
        # Frequent resets leave little to load, so a story has either resets or loads.
        weights = [4, 8, 2, 3, 1, 1.5 if seed % 2 else 0.2]
        for number in range(num_events):
            story.happened["events"] += 1
            (event,) = chance.choices(events, weights=weights)
            if len(requests) < 6 or number % 2:
                event()
        self._hold(False)
        self._engine.run()
        self._engine.settle()
        story.answers = [(prompt, self._engine.answer(name)) for name, prompt in requests.items()]
        return {"answers": story.answers, "happened": dict(story.happened)}

    def _begin(
        self, story: Story, requests: dict[str, int], chance: Random, prompts: list[list[int]]
    ) -> None:
        story.happened["requests"] += 1
        number = chance.randrange(len(prompts))
        name = f"{id(story)}-{story.happened['requests']}"
        requests[name] = number
        self._engine.add(name, prompts[number], MAX_TOKENS)

    def _abort_one(self, story: Story, requests: dict[str, int], chance: Random) -> None:
        under_way = sorted(requests.keys() & self._engine._unfinished)
        if not under_way:
            return
        story.happened["aborts"] += 1
        name = chance.choice(under_way)
        self._engine.abort(name)
        del requests[name]

    def _hold(self, are_held: bool) -> None:
        FAULTS.are_held = are_held

    def _reset_device(self, story: Story) -> None:
        # Not while blocks are in use.
        story.happened["device resets"] += bool(self._engine._llm.reset_prefix_cache())

    def _reset_all(self, story: Story) -> None:
        try:
            self._engine.reset_all(running=True)
        except RuntimeError as error:
            # vLLM's own error: it cannot reset while a request waits for a load.
            if "waiting for remote KV transfer" not in str(error):
                raise
            story.happened["refused resets"] += 1
            return
        story.happened["resets"] += 1
