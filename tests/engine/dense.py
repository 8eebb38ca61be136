"""The same transformer written down as plainly as possible, in float64, without any cache."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kvtier.engine import ModelConfig
from kvtier.engine.weights import make_weights

Floats = NDArray[np.float64]


def dense_logits(config: ModelConfig, tokens: Sequence[int]) -> Floats:
    """(tokens, vocab)"""
    weights = make_weights(config)
    hidden = weights.embedding[list(tokens)].astype(np.float64)
    positions = np.arange(len(tokens))
    for index, layer in enumerate(weights.layers):
        normed = _norm(hidden, layer.attention_norm)
        queries = _turn(_split(normed @ layer.query, config), config)
        keys = _turn(_split(normed @ layer.key, config), config)
        values = _split(normed @ layer.value, config)
        seen = positions[:, None] >= positions
        if index in config.windowed_layers:
            assert config.window is not None
            seen &= positions[:, None] - positions < config.window
        heads = []
        for head in range(config.num_heads):
            kv_head = head * config.num_kv_heads // config.num_heads
            scores = queries[head] @ keys[kv_head].T / np.sqrt(config.head_dim)
            scores = np.where(seen, scores, -np.inf)
            shares = np.exp(scores - scores.max(axis=1, keepdims=True))
            heads.append(shares / shares.sum(axis=1, keepdims=True) @ values[kv_head])
        hidden = hidden + np.concatenate(heads, axis=1) @ layer.output
        normed = _norm(hidden, layer.mlp_norm)
        gate = normed @ layer.gate
        hidden = hidden + (gate / (1 + np.exp(-gate)) * (normed @ layer.up)) @ layer.down
    logits: Floats = _norm(hidden, weights.norm) @ weights.head
    return logits


def _norm(hidden: Floats, weight: NDArray[Any]) -> Floats:
    size = np.sqrt(np.mean(hidden**2, axis=1, keepdims=True) + 1e-5)
    normed: Floats = hidden / size * weight
    return normed


def _split(projected: Floats, config: ModelConfig) -> Floats:
    """(heads, tokens, head_dim)"""
    return projected.reshape(len(projected), -1, config.head_dim).transpose(1, 0, 2)


def _turn(heads: Floats, config: ModelConfig) -> Floats:
    half = config.head_dim // 2
    turns = config.rope_base ** (-np.arange(half) / half)
    angles = np.arange(heads.shape[1])[:, None] * turns
    as_complex = (heads[..., :half] + 1j * heads[..., half:]) * np.exp(1j * angles)
    return np.concatenate([as_complex.real, as_complex.imag], axis=-1)
