"""Small models, and ways to run them outside of an engine."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import numpy as np

from kvtier.engine import EngineConfig, ModelConfig
from kvtier.engine.cache import KVCache, first_block_ids
from kvtier.engine.model import Model, Span
from kvtier.engine.weights import Array

FULL = ModelConfig(
    num_layers=2,
    hidden=64,
    num_heads=4,
    num_kv_heads=2,
    head_dim=16,
    mlp_hidden=96,
    max_tokens=512,
)
HYBRID = ModelConfig(
    num_layers=4,
    hidden=64,
    num_heads=4,
    num_kv_heads=2,
    head_dim=16,
    mlp_hidden=96,
    windowed_layers=(0, 1, 2),
    window=24,
    max_tokens=512,
)
ODD = ModelConfig(
    num_layers=2,
    hidden=50,
    num_heads=3,
    num_kv_heads=1,
    head_dim=10,
    mlp_hidden=70,
    vocab=101,
    windowed_layers=(1,),
    window=7,
    max_tokens=512,
    tied=True,
)
"""No size is a power of two, or a multiple of one."""
MODELS = {"full": FULL, "hybrid": HYBRID, "odd": ODD}

_BLOCK_TOKENS = (8, 4)
NUM_BLOCKS = 40


def engine_config(model: ModelConfig, world_size: int = 1) -> EngineConfig:
    """With different block sizes for different groups."""
    num_groups = len(model.groups)
    return EngineConfig(
        block_tokens=_BLOCK_TOKENS[:num_groups],
        num_blocks=(NUM_BLOCKS, 2 * NUM_BLOCKS)[:num_groups],
        token_budget=64,
        world_size=world_size,
    )


def random_tokens(seed: int, num: int, vocab: int = 101) -> list[int]:
    tokens: list[int] = np.random.default_rng(seed).integers(0, vocab, num).tolist()
    return tokens


class Sequences:
    """Runs sequences span by span, each with blocks of its own in random order."""

    def __init__(
        self, config: ModelConfig, world_size: int = 1, seed: int = 0, garbage: bool = True
    ) -> None:
        self.model = Model(config)
        self.engine = engine_config(config, world_size)
        self.cache = KVCache(config, self.engine)
        if garbage:
            for rank in range(world_size):
                for tensor in self.cache.canonical(rank).tensors:
                    tensor.tensor[:] = 255  # not a number, in every place
        generator = np.random.default_rng(seed)
        self._free = [
            (first + generator.permutation(num)).tolist()
            for first, num in zip(first_block_ids(self.engine), self.engine.num_blocks, strict=True)
        ]

    def tables(self, num_tokens: int) -> list[list[int]]:
        """Allocate blocks for a sequence of `num_tokens` tokens."""
        return [
            [free.pop() for _ in range(-(-num_tokens // tokens))]
            for free, tokens in zip(self._free, self.engine.block_tokens, strict=True)
        ]

    def run(self, *spans: Span) -> Array:
        return self.model.run(spans, self.cache)

    def kv(self, tables: Sequence[Sequence[int]], num_tokens: int) -> bytes:
        """All keys and values of a sequence."""
        parts = []
        for group_idx, group in enumerate(self.model.config.groups):
            for place in range(len(group.layers)):
                both = self.cache.read(
                    group_idx, place, tables[group_idx], (0, num_tokens), (0, num_tokens)
                )
                parts += [part.tobytes() for part in both]
        return b"".join(parts)


def spans_of(
    tokens: Sequence[int], cuts: Sequence[int], tables: Sequence[Sequence[int]]
) -> list[Span]:
    """The sequence in pieces that end at `cuts`, and at its end."""
    bounds = [0, *sorted(set(cuts) - {0, len(tokens)}), len(tokens)]
    return [Span(tokens[start:end], start, tables) for start, end in pairwise(bounds)]


def whole(config: ModelConfig, tokens: Sequence[int]) -> tuple[Array, bytes]:
    """The logits after the last token, all tokens computed at once, and the KV."""
    sequences = Sequences(config, garbage=False)
    tables = sequences.tables(len(tokens))
    logits = sequences.run(Span(tokens, 0, tables))[0]
    return logits, sequences.kv(tables, len(tokens))
