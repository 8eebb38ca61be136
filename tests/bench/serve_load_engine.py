"""One vLLM engine under load, in a process of its own, driven by `tests.bench.serve_load`.

Requests come in a closed loop: a limited number is active at a time, and a new one arrives when one
has ended. The file on the command line describes the engine; see `tests.bench.vllm_process`.
"""

from __future__ import annotations

import json
import random
import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from statistics import median
from typing import Any

from kvtier.testing.vllm.in_process import InProcessEngine, contain
from tests import traces
from tests.bench.vllm_process import answer_commands

_LOWEST_TOKEN = 10
_SETTLED_WITHIN_S = 120.0


@dataclass(slots=True)
class Question:
    """A request to send."""

    name: str
    prompt: list[int]
    num_answered: int
    """Tokens of its answer."""


class Session:
    """Executes the commands of `tests.bench.serve_load`. Each workload returns, for every part of
    it, the seconds it took, and what happened to each request and each step."""

    def __init__(self, order: dict[str, Any]) -> None:
        folder = Path(order["folder"])
        (folder / "model").mkdir()
        (folder / "model" / "config.json").write_text(json.dumps(order["model_config"]))
        (folder / "vllm").mkdir()
        (folder / "tier").mkdir()
        contain(folder / "vllm")
        engine_args = dict(order["engine_args"])
        if order["emulated"] is not None:
            from tests.bench import sleeping_gpu  # imports vLLM

            sleeping_gpu.install(getattr(sleeping_gpu, order["emulated"]))
            engine_args["worker_cls"] = sleeping_gpu.WORKER
        self._vocabulary = order["vocabulary"]
        self._random = random.Random(7)
        self._num_workloads = 0
        self._engine = InProcessEngine(
            folder / "model",
            order["kvtier"],
            device_blocks=order["device_blocks"],
            max_requests=order["max_requests"],
            **engine_args,
        )
        list(self._serve([Question("warm-up", self._text(order["warm_up_tokens"]), 8)], 1))

    # --- workloads ------------------------------------------------------------------------------

    def conversations(self, what: dict[str, Any]) -> list[dict[str, Any]]:
        """Conversations in turns: each asks once a turn, with all that was said before. All begin
        with the same instructions. One part for each turn; nothing can be reused in the first."""
        common = self._text(what["common_tokens"])
        first = what["first_tokens"] - what["common_tokens"]
        said = [common + self._text(first) for _ in range(what["conversations"])]
        parts = []
        for turn in range(what["turns"]):
            order = list(range(len(said)))
            random.Random(turn).shuffle(order)
            questions = [
                Question(self._name(f"turn-{turn}-of-{n}"), said[n], what["say_tokens"])
                for n in order
            ]
            parts.append(self._measure(questions, what["active"]))
            for n, question in zip(order, questions, strict=True):
                answer = self._engine.answer(question.name).tokens
                said[n] = said[n] + answer + self._text(what["ask_tokens"])
        return parts

    def agents(self, what: dict[str, Any]) -> list[dict[str, Any]]:
        """A part of the trace of coding agents. A block of the trace becomes a few tokens."""
        requests = islice(traces.coding_agents(), what["start"], what["start"] + what["requests"])
        questions = [
            Question(
                self._name(f"agent-{number}"),
                self._of_blocks(blocks, what["tokens_per_block"])[: what["longest"]],
                what["say_tokens"],
            )
            for number, blocks in enumerate(requests)
        ]
        return [self._measure(questions, what["active"])]

    def burst(self, what: dict[str, Any]) -> list[dict[str, Any]]:
        """Requests at once with a long common beginning, which is only on disk. Two parts: the
        first computes it and stores it."""
        common = self._text(what["common_tokens"])
        first = Question(self._name("before"), common + self._text(what["own_tokens"]), 4)
        parts = [self._measure([first], 1)]
        self._keep_on_disk_alone()
        questions = [
            Question(self._name(f"burst-{n}"), common + self._text(what["own_tokens"]), 4)
            for n in range(what["requests"])
        ]
        return [*parts, self._measure(questions, len(questions))]

    def long_prompt(self, what: dict[str, Any]) -> list[dict[str, Any]]:
        """One long prompt on an idle engine, again and again. The first part computes and stores
        it; in the others, it is only on disk."""
        prompt = self._text(what["tokens"])
        parts = []
        for n in range(1 + what["times"]):
            parts.append(self._measure([Question(self._name(f"time-{n}"), prompt, 1)], 1))
            self._keep_on_disk_alone()
        return parts

    def end(self) -> None:
        self._engine.close()

    # --- what they share ------------------------------------------------------------------------

    def _keep_on_disk_alone(self) -> None:
        """Empty the device's cache and host memory, once everything is stored."""
        self._engine.settle(_SETTLED_WITHIN_S)
        if not self._engine.reset_all():
            raise RuntimeError("vLLM could not reset its cache: some blocks are in use")

    def _measure(self, questions: list[Question], num_active: int) -> dict[str, Any]:
        before, cpu_s = self._engine.figures(), time.process_time()
        began = time.perf_counter()
        steps = list(self._serve(questions, num_active))
        seconds = time.perf_counter() - began
        cpu_s = time.process_time() - cpu_s
        figures = self._engine.figures()
        answers = [self._engine.answer(question.name) for question in questions]
        decoding = [took for took, only_decodes in steps if only_decodes]
        return {
            "seconds": seconds,
            "ttft": [answer.time_to_first_token for answer in answers],
            "found": sum(answer.cached_tokens for answer in answers),
            "prompt_tokens": sum(len(question.prompt) for question in questions),
            "steps": len(steps),
            "decode_step": median(decoding) if decoding else None,
            "cpu_seconds": cpu_s,
            "figures": {
                name: value - before.get(name, 0.0)
                for name, value in figures.items()
                if value != before.get(name, 0.0)
            },
        }

    def _serve(
        self, questions: Iterable[Question], num_active: int
    ) -> Iterator[tuple[float, bool]]:
        """Yields the seconds of each step, and True if every active request had its first token
        before it, so that it computes no prompt."""
        waiting = iter(questions)
        live: dict[str, Question] = {}
        while True:
            for question in islice(waiting, num_active - len(live)):
                live[question.name] = question
                self._engine.add(question.name, question.prompt, question.num_answered)
            if not live:
                return
            only_decodes = all(self._engine.answer(name).tokens for name in live)
            began = time.perf_counter()
            self._engine.step()
            yield time.perf_counter() - began, only_decodes
            for name, question in list(live.items()):
                if len(self._engine.answer(name).tokens) >= question.num_answered:
                    del live[name]

    def _name(self, what: str) -> str:
        self._num_workloads += 1
        return f"{self._num_workloads}-{what}"

    def _text(self, num_tokens: int) -> list[int]:
        return [self._random.randrange(_LOWEST_TOKEN, self._vocabulary) for _ in range(num_tokens)]

    def _of_blocks(self, blocks: Iterable[int], tokens_per_block: int) -> list[int]:
        tokens = []
        for block in blocks:
            source = random.Random(block)
            tokens += [
                source.randrange(_LOWEST_TOKEN, self._vocabulary) for _ in range(tokens_per_block)
            ]
        return [*tokens, *self._text(tokens_per_block)]


if __name__ == "__main__":
    raise SystemExit(answer_commands(Session))
