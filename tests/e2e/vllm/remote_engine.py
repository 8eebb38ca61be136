"""The test's side of a vLLM engine in a process of its own."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import count
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from kvtier.testing.vllm.in_process import Answer
from tests.e2e.vllm.processes import VLLM
from tests.e2e.vllm.scenarios.engine import Engine


class RemoteEngine:
    """The methods of `InProcessEngine`, in another process. Use it as a context manager."""

    def __init__(
        self,
        vllm: VLLM,
        model: Path,
        kvtier: Mapping[str, Any] | None = None,
        **engine_args: Any,
    ) -> None:
        """Start the engine. `engine_args`: `plug_in`, `device_blocks` and arguments of vLLM."""
        options = None if kvtier is None else dict(kvtier)
        self.process = vllm.start(Engine, str(model), options, **engine_args)
        self._numbers = count()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        exc_type: type[BaseException] | None,
        exc_value: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        if exc_type is not None:
            self.process.kill()
        else:
            self.close()

    def close(self) -> None:
        """Stop the engine as vLLM does, and let the process end. May be called again.

        Raises if the engine leaves anything behind in the process, or the process on this machine.
        """
        if self.process.is_there:
            left = self.process.ask("close")
            self.process.end()
            assert not left, f"left behind in the process: {left}"

    def kill(self) -> None:
        """Kill the process with SIGKILL."""
        self.process.kill()

    def add(self, name: str, prompt: Sequence[int], max_tokens: int = 4) -> None:
        self.process.ask("add", name, list(prompt), max_tokens)

    def abort(self, *names: str) -> None:
        self.process.ask("abort", *names)

    def step(self, steps: int = 1) -> None:
        self.process.ask("step", steps)

    def run(self) -> None:
        """Step until every request has ended."""
        self.process.ask("run")

    def settle(self) -> None:
        """Step until all transfers have ended, stores in particular."""
        self.process.ask("settle")

    def rest(self) -> None:
        """Step while vLLM reports work: pause, sleep and drain wait for that."""
        self.process.ask("rest")

    def answer(self, name: str) -> Answer:
        return Answer(**self.process.ask("answer", name))

    def generate(self, *prompts: Sequence[int], max_tokens: int = 4) -> list[Answer]:
        """Run prompts one by one; each is answered and stored before the next begins."""
        answers = []
        for prompt in prompts:
            name = f"request-{next(self._numbers)}"
            self.add(name, prompt, max_tokens)
            self.run()
            self.settle()
            answers.append(self.answer(name))
        return answers

    def generate_together(self, *prompts: Sequence[int], max_tokens: int = 4) -> list[Answer]:
        """Run all prompts at once."""
        names = [f"request-{next(self._numbers)}" for _ in prompts]
        for name, prompt in zip(names, prompts, strict=True):
            self.add(name, prompt, max_tokens)
        self.run()
        self.settle()
        return [self.answer(name) for name in names]

    def reset_device_cache(self) -> None:
        """Empty the device cache; tiers keep their blocks."""
        self.process.ask("reset_device_cache")

    def reset_all(self, *, running: bool = False) -> bool:
        """Empty the device cache and every tier. `running`: preempt running requests."""
        return bool(self.process.ask("reset_all", running=running))

    def figures(self) -> dict[str, float]:
        """kvtier's metrics in vLLM's endpoint, such as `cpu_loaded_blocks`."""
        figures: dict[str, float] = self.process.ask("figures")
        return figures

    def metrics(self) -> list[dict[str, Any]]:
        """All of vLLM's metrics that are one number: `name`, `labels`, `value`."""
        metrics: list[dict[str, Any]] = self.process.ask("metrics")
        return metrics

    def told(self) -> list[tuple[str, str]]:
        """Level and text of kvtier's log lines, from INFO up."""
        return [(level, text) for level, text in self.process.ask("told")]
