"""The options of the demo, and the sizes that follow from them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from kvtier.engine import EngineConfig, ModelConfig
from kvtier.engine.cache import array_page_bytes
from kvtier.tiering.disk.layout import Geometry

__all__ = [
    "BLOCK_TOKENS",
    "NEW_TOKENS",
    "WARM_UP_TOKENS",
    "DemoSettings",
    "Prompt",
    "WrongSetting",
    "disk_tier",
    "engine_config",
    "num_blocks_of",
    "reusable",
]

Prompt = tuple[int, ...]

BLOCK_TOKENS = 16
NEW_TOKENS = 8
"""Tokens generated for each prompt."""
WARM_UP_TOKENS = 2 * BLOCK_TOKENS

_WINDOW = 128
_MOST_SEED = 2**32 - 1
_LEAST_TOKENS = 2 * BLOCK_TOKENS
_MOST_TOKENS = ModelConfig().max_tokens - NEW_TOKENS
_MOST_REQUESTS = 64
_CACHE_TOKENS = 65_536
"""Largest number of tokens of all prompts and answers together. Their KV takes 128 MiB on the
device, and host memory has room for at least twice that."""


class WrongSetting(ValueError):
    """A value is invalid. The message says what was given, what is allowed, and what to do."""

    def __init__(self, option: str, message: str) -> None:
        super().__init__(message)
        self.option = option


@dataclass(frozen=True, slots=True, kw_only=True)
class DemoSettings:
    """Valid settings."""

    tokens: int
    requests: int
    lengths: tuple[int, ...]
    seed: int

    @classmethod
    def from_options(cls, tokens: int, requests: int, lengths: str, seed: int) -> DemoSettings:
        """Parse the options. Raises `WrongSetting`."""
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
        """A model in which every layer attends to all tokens."""
        return ModelConfig(seed=self.seed)

    @property
    def hybrid_model(self) -> ModelConfig:
        """A model in which every other layer attends to 128 tokens only: two KV-cache groups."""
        return ModelConfig(seed=self.seed, windowed_layers=(0, 2), window=_WINDOW)

    @property
    def prompts(self) -> list[Prompt]:
        """Prompts without common prefixes."""
        return [self._prompt(index, self.tokens) for index in range(self.requests)]

    @property
    def prompts_by_length(self) -> list[Prompt]:
        """One prompt for each of `lengths`."""
        return [self._prompt(_MOST_REQUESTS + n, n) for n in self.lengths]

    def _prompt(self, index: int, num_tokens: int) -> Prompt:
        generator = np.random.default_rng([self.seed, index])
        return tuple(generator.integers(0, 256, num_tokens).tolist())


def engine_config(model: ModelConfig, prompts: Sequence[Prompt]) -> EngineConfig:
    """Return the configuration of an engine whose device cache has room for all prompts and their
    generated tokens."""
    num_groups = len(model.groups)
    # Steps of 512 tokens are efficient. A group with a window needs blocks for the window and
    # for two such steps.
    config = EngineConfig(token_budget=512)
    least = (_WINDOW + 2 * config.token_budget) // BLOCK_TOKENS + 2
    num_blocks = max(least, sum(num_blocks_of(prompt) for prompt in prompts) + 8)
    return EngineConfig(
        block_tokens=(BLOCK_TOKENS,) * num_groups,
        num_blocks=(num_blocks,) * num_groups,
        token_budget=config.token_budget,
    )


def num_blocks_of(prompt: Prompt) -> int:
    """Return how many device blocks of one group a prompt and its generated tokens take."""
    return -(-(len(prompt) + NEW_TOKENS) // BLOCK_TOKENS)


def disk_tier(path: Path, model: ModelConfig, prompts: Sequence[Prompt]) -> dict[str, Any]:
    """Return an entry of `secondary_tiers`: a disk tier with room for all blocks of these prompts.

    Its deadlines are long, because the demo may run on a busy machine.
    """
    # One slot per token of the warm-up is more than it needs.
    num_slots = (sum(map(num_blocks_of, prompts)) + WARM_UP_TOKENS) * len(model.groups)
    block_bytes = sum(array_page_bytes(model, engine_config(model, prompts)))
    return {
        "type": "disk",
        "path": str(path),
        "max_bytes": Geometry(block_bytes, num_slots).needed_bytes,
        "max_pinned_share": 0.5,
        "lookup_timeout_ms": 60_000,
        "load_timeout_ms": 60_000,
        "store_timeout_ms": 60_000,
    }


def reusable(prompt: Prompt) -> int:
    """Return how many tokens of a prompt need not be computed again. These are whole blocks. The
    last token is not among them, because computing it gives the first logits."""
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
