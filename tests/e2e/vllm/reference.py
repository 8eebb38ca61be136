"""The answers of stock vLLM alone, which no tier may change.

Tokens must be the same everywhere. Logprobs must be the same to the last bit if the same tokens
were computed: the whole prompt, or the part that was not in the device cache. With any other part
in a cache, sums are rounded differently, with or without kvtier.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from kvtier.testing.vllm.in_process import Answer
from tests.e2e.vllm.processes import VLLM
from tests.e2e.vllm.remote_engine import RemoteEngine

ROUNDING = 1e-3
"""Tolerance of a logprob: more than rounding changes, and less than one wrong block does."""


class Reference:
    """One model in an engine without kvtier, which starts with the first question."""

    def __init__(self, vllm: VLLM, model: Path, **engine_args: Any) -> None:
        self._vllm = vllm
        self._model = model
        self._engine_args = engine_args
        self._engine: RemoteEngine | None = None
        self._known: dict[tuple[tuple[int, ...], int], tuple[Answer, Answer]] = {}

    def answers(self, prompt: Sequence[int], max_tokens: int = 4) -> tuple[Answer, Answer]:
        """The answers with the whole prompt computed, and with the prompt from the device cache."""
        key = tuple(prompt), max_tokens
        if key not in self._known:
            if self._engine is None:
                self._engine = RemoteEngine(self._vllm, self._model, **self._engine_args)
            self._engine.reset_device_cache()
            cold, device = self._engine.generate(prompt, prompt, max_tokens=max_tokens)
            assert cold.cached_tokens == 0
            assert cold.tokens == device.tokens
            self._known[key] = cold, device
        return self._known[key]

    def check(
        self,
        prompts: Sequence[Sequence[int]],
        answers: Sequence[Answer],
        *,
        max_tokens: int = 4,
        exact: bool = True,
    ) -> None:
        """Raise AssertionError unless the answers are right.

        `exact`: every prompt was computed alone, and as a whole or from the end of its last
        block. Else only the tokens are the same, and the logprobs up to rounding.
        """
        for prompt, answer in zip(prompts, answers, strict=True):
            cold, device = self.answers(prompt, max_tokens)
            asked = f"{len(prompt)} tokens, {answer.cached_tokens} of them from a cache"
            assert answer.tokens == cold.tokens, (
                f"{asked}: got tokens {answer.tokens}, without kvtier {cold.tokens}"
            )
            expected: object
            if not exact:
                expected = pytest.approx(cold.logprobs, abs=ROUNDING)
            elif answer.cached_tokens in {0, device.cached_tokens}:
                expected = (device if answer.cached_tokens else cold).logprobs
            else:
                raise AssertionError(f"{asked}: vLLM alone takes {device.cached_tokens}, or none")
            assert answer.logprobs == expected, (
                f"{asked}: got logprobs {answer.logprobs}, without kvtier {expected}"
            )

    def close(self) -> None:
        if self._engine is not None:
            self._engine.close()
