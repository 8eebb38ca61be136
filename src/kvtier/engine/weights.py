"""Weights from a seed."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from kvtier.engine.config import ModelConfig
from kvtier.engine.products import Array

__all__ = ["LayerWeights", "Weights", "make_weights"]

# Queries and keys larger than the rest, to attend sharply: then one wrong block of the cache
# changes the logits, and mostly the tokens.
_SHARPNESS = 2.0


@dataclass(frozen=True, slots=True)
class LayerWeights:
    """One layer. Matrices have a row for every input and a column for every output."""

    attention_norm: Array
    query: Array
    key: Array
    value: Array
    output: Array
    mlp_norm: Array
    gate: Array
    up: Array
    down: Array


@dataclass(frozen=True, slots=True)
class Weights:
    """All of a model."""

    embedding: Array
    """(vocab, hidden)"""
    layers: tuple[LayerWeights, ...]
    norm: Array
    head: Array
    """(hidden, vocab)"""


def make_weights(config: ModelConfig) -> Weights:
    """The same for the same configuration, in every process."""
    generator = np.random.default_rng(config.seed)

    def matrix(inputs: int, outputs: int, size: float = 1.0) -> Array:
        # Keeps the size of what passes through.
        scale = np.float32(size / inputs**0.5)
        return generator.standard_normal((inputs, outputs), np.float32) * scale

    def norm() -> Array:
        return 1 + generator.standard_normal(config.hidden, np.float32) * np.float32(0.1)

    heads = config.num_heads * config.head_dim
    kv_heads = config.num_kv_heads * config.head_dim
    embedding = generator.standard_normal((config.vocab, config.hidden), np.float32)
    layers = tuple(
        LayerWeights(
            attention_norm=norm(),
            query=matrix(config.hidden, heads, _SHARPNESS),
            key=matrix(config.hidden, kv_heads, _SHARPNESS),
            value=matrix(config.hidden, kv_heads),
            output=matrix(heads, config.hidden),
            mlp_norm=norm(),
            gate=matrix(config.hidden, config.mlp_hidden),
            up=matrix(config.hidden, config.mlp_hidden),
            down=matrix(config.mlp_hidden, config.hidden),
        )
        for _ in range(config.num_layers)
    )
    final_norm = norm()
    if config.tied:
        head = np.ascontiguousarray(embedding.T) * np.float32(config.hidden**-0.5)
    else:
        head = matrix(config.hidden, config.vocab)
    return Weights(embedding, layers, final_norm, head)
