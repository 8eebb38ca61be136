"""What the user may choose, and the sizes that follow from it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from kvtier.engine import EngineConfig, ModelConfig

__all__ = ["BLOCK_TOKENS", "NEW_TOKENS", "DemoSettings", "Prompt", "WrongSetting", "reusable"]

Prompt = tuple[int, ...]

BLOCK_TOKENS = 16
NEW_TOKENS = 8
"""Generated for each prompt."""
WARM_UP_TOKENS = 2 * BLOCK_TOKENS

_WINDOW = 128
_MOST_SEED = 2**32 - 1
_LEAST_TOKENS = 2 * BLOCK_TOKENS
_MOST_TOKENS = ModelConfig().max_tokens - NEW_TOKENS
_MOST_REQUESTS = 64
_CACHE_TOKENS = 65_536
"""Of all prompts together: 128 MiB, on the device and again in host memory."""


class WrongSetting(ValueError):
    """A value that cannot work. Says what was given, what is allowed, and what to do."""

    def __init__(self, option: str, message: str) -> None:
        super().__init__(message)
        self.option = option


@dataclass(frozen=True, slots=True, kw_only=True)
class DemoSettings:
    """Checked: what is here can be run."""

    tokens: int
    requests: int
    lengths: tuple[int, ...]
    seed: int

    @classmethod
    def from_options(cls, tokens: int, requests: int, lengths: str, seed: int) -> DemoSettings:
        """What the user wrote, or `WrongSetting`."""
        return cls(tokens=tokens, requests=requests, lengths=_parse_lengths(lengths), seed=seed)

    def __post_init__(self) -> None:
        _require_length("--tokens", self.tokens)
        for length in self.lengths:
            _require_length("--lengths", length)
        if not 1 <= self.requests <= _MOST_REQUESTS:
            raise WrongSetting(
                "--requests", f"{self.requests} prompts: give a number from 1 to {_MOST_REQUESTS}"
            )
        if not 0 <= self.seed <= _MOST_SEED:
            raise WrongSetting("--seed", f"{self.seed}: give a number from 0 to {_MOST_SEED}")
        total = self.requests * (self.tokens + NEW_TOKENS)
        if total > _CACHE_TOKENS:
            raise WrongSetting(
                "--tokens",
                f"{self.requests} prompts of {self.tokens} tokens, with {NEW_TOKENS} generated for "
                f"each, are {total} tokens: the demo's cache has room for {_CACHE_TOKENS}. Give at "
                f"most --tokens {_CACHE_TOKENS // self.requests - NEW_TOKENS}, or fewer --requests",
            )

    @property
    def model(self) -> ModelConfig:
        """Every layer looks at all tokens."""
        return ModelConfig(seed=self.seed)

    @property
    def hybrid_model(self) -> ModelConfig:
        """Every other layer looks back 128 tokens: two KV-cache groups."""
        return ModelConfig(seed=self.seed, windowed_layers=(0, 2), window=_WINDOW)

    @property
    def prompts(self) -> list[Prompt]:
        """No two begin alike."""
        return [self._prompt(index, self.tokens) for index in range(self.requests)]

    @property
    def prompts_by_length(self) -> list[Prompt]:
        """One for each of `lengths`."""
        return [self._prompt(_MOST_REQUESTS + n, n) for n in self.lengths]

    def _prompt(self, index: int, num_tokens: int) -> Prompt:
        generator = np.random.default_rng([self.seed, index])
        return tuple(generator.integers(0, 256, num_tokens).tolist())


def engine_config(model: ModelConfig, prompts: Sequence[Prompt]) -> EngineConfig:
    """A device cache in which all prompts, and what is generated for each, have room."""
    num_groups = len(model.groups)
    # A step of this many tokens is long enough to be efficient. A window needs some blocks for it.
    config = EngineConfig(token_budget=512)
    least = (_WINDOW + 2 * config.token_budget) // BLOCK_TOKENS + 2
    num_blocks = max(least, sum(num_blocks_of(prompt) for prompt in prompts) + 8)
    return EngineConfig(
        block_tokens=(BLOCK_TOKENS,) * num_groups,
        num_blocks=(num_blocks,) * num_groups,
        token_budget=config.token_budget,
    )


def num_blocks_of(prompt: Prompt) -> int:
    """Device blocks of one group, what is generated included."""
    return -(-(len(prompt) + NEW_TOKENS) // BLOCK_TOKENS)


def reusable(prompt: Prompt) -> int:
    """Tokens of a prompt that need not be computed again: whole blocks, and never the last token,
    which the first logits come from."""
    return (len(prompt) - 1) // BLOCK_TOKENS * BLOCK_TOKENS


def _parse_lengths(text: str) -> tuple[int, ...]:
    try:
        return tuple(dict.fromkeys(int(part) for part in text.split(",")))
    except ValueError:
        raise WrongSetting(
            "--lengths", f"{text!r}: give numbers separated by commas, such as 256,1024"
        ) from None


def _require_length(option: str, num_tokens: int) -> None:
    if not _LEAST_TOKENS <= num_tokens <= _MOST_TOKENS:
        raise WrongSetting(
            option,
            f"{num_tokens}: give a number from {_LEAST_TOKENS} (two blocks) to {_MOST_TOKENS} (the "
            f"model takes {_MOST_TOKENS + NEW_TOKENS} tokens, of which {NEW_TOKENS} are generated)",
        )
