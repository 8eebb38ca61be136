"""The transformer: RMSNorm, RoPE, grouped-query attention and a gated MLP, in float32."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from kvtier.engine.attention import Attention
from kvtier.engine.cache import KVCache
from kvtier.engine.config import LayerGroup, ModelConfig
from kvtier.engine.products import TILE, Array, Product
from kvtier.engine.rope import Rope
from kvtier.engine.weights import LayerWeights, make_weights

__all__ = ["Model", "Span"]

_EPSILON = np.float32(1e-5)


@dataclass(frozen=True, slots=True)
class Span:
    """Tokens of one sequence that are computed in one step."""

    token_ids: Sequence[int]
    """Those at positions `start`, `start` + 1, ..."""
    start: int
    block_tables: Sequence[Sequence[int]]
    """For each KV-cache group. The KV of all tokens before `start` that these look at is there."""

    @property
    def end(self) -> int:
        return self.start + len(self.token_ids)

    @property
    def first_tile(self) -> int:
        return self.start // TILE

    @property
    def end_tile(self) -> int:
        return -(-self.end // TILE)


class _Layer:
    def __init__(self, weights: LayerWeights) -> None:
        self.attention_norm = weights.attention_norm
        self.query = Product(weights.query)
        self.key = Product(weights.key)
        self.value = Product(weights.value)
        self.output = Product(weights.output)
        self.mlp_norm = weights.mlp_norm
        self.gate = Product(weights.gate)
        self.up = Product(weights.up)
        self.down = Product(weights.down)


class Model:
    """Computes the KV of tokens into a cache, and the logits of what follows.

    Every K, V and logit has the same bits however the tokens are split into spans, whatever else
    is in the batch, and wherever the KV before them came from. See `products` for how.
    """

    def __init__(self, config: ModelConfig) -> None:
        self.config = config
        weights = make_weights(config)
        self._embedding = weights.embedding
        self._layers = [_Layer(layer) for layer in weights.layers]
        self._norm = weights.norm
        self._head = Product(weights.head)
        self._attention = Attention(config)
        self._rope = Rope(config, padded_tokens=-(-config.max_tokens // TILE) * TILE)
        self._place_of_layer = {
            layer: (group_idx, place)
            for group_idx, group in enumerate(config.groups)
            for place, layer in enumerate(group.layers)
        }

    def run(self, spans: Sequence[Span], cache: KVCache) -> Array:
        """Compute all spans, and return for each the logits of its last token."""
        config = self.config
        starts = [t * TILE for span in spans for t in range(span.first_tile, span.end_tile)]
        hidden = self._embed(spans)
        for layer_idx, layer in enumerate(self._layers):
            group_idx, place = self._place_of_layer[layer_idx]
            normed = _rms_norm(hidden, layer.attention_norm)
            shape = (len(starts), TILE, -1, config.head_dim)
            queries = self._rope.turn(layer.query(normed).reshape(shape), starts)
            keys = self._rope.turn(layer.key(normed).reshape(shape), starts)
            values = layer.value(normed).reshape(shape)
            attended = np.empty_like(queries)
            first = 0
            for span in spans:
                tiles = slice(first, first + span.end_tile - span.first_tile)
                rows = slice(span.start % TILE, span.start % TILE + len(span.token_ids))
                flat = (-1, config.num_kv_heads, config.head_dim)
                table = span.block_tables[group_idx]
                cache.write(
                    group_idx,
                    place,
                    table,
                    span.start,
                    keys[tiles].reshape(flat)[rows],
                    values[tiles].reshape(flat)[rows],
                )
                self._attend(span, group_idx, place, cache, queries[tiles], attended[tiles])
                first = tiles.stop
            hidden += layer.output(attended.reshape(len(starts), TILE, -1))
            normed = _rms_norm(hidden, layer.mlp_norm)
            hidden += layer.down(_silu(layer.gate(normed)) * layer.up(normed))
        return self._logits(spans, hidden)

    def _embed(self, spans: Sequence[Span]) -> Array:
        parts = []
        for span in spans:
            num_rows = (span.end_tile - span.first_tile) * TILE
            rows = np.zeros((num_rows, self.config.hidden), np.float32)
            first = span.start % TILE
            rows[first : first + len(span.token_ids)] = self._embedding[list(span.token_ids)]
            parts.append(rows.reshape(-1, TILE, self.config.hidden))
        return np.concatenate(parts)

    def _attend(
        self,
        span: Span,
        group_idx: int,
        place: int,
        cache: KVCache,
        queries: Array,
        attended: Array,
    ) -> None:
        """Fill `attended`, both (tiles, TILE, heads, head_dim)."""
        group: LayerGroup = self.config.groups[group_idx]
        ranges = [
            self._attention.keys_of(group, tile * TILE)
            for tile in range(span.first_tile, span.end_tile)
        ]
        gathered_from, gathered_to = ranges[0].start, ranges[-1].end
        keys, values = cache.read(
            group_idx,
            place,
            span.block_tables[group_idx],
            (group.first_needed_token(span.start), span.end),
            (gathered_from, gathered_to),
        )
        for index, (start, end) in enumerate(ranges):
            seen = slice(start - gathered_from, end - gathered_from)
            first = (span.first_tile + index) * TILE
            rows = slice(max(0, span.start - first), min(TILE, span.end - first))
            attended[index] = self._attention.attend(
                group, first, rows, queries[index], keys[:, seen], values[:, seen]
            )

    def _logits(self, spans: Sequence[Span], hidden: Array) -> Array:
        lasts = []
        first = 0
        for span in spans:
            first += span.end_tile - span.first_tile
            lasts.append(first - 1)
        logits = self._head(_rms_norm(hidden[lasts], self._norm))
        rows = [(span.end - 1) % TILE for span in spans]
        return np.ascontiguousarray(logits[np.arange(len(spans)), rows])


def _rms_norm(hidden: Array, weight: Array) -> Array:
    mean = np.square(hidden).sum(axis=-1, keepdims=True) / np.float32(hidden.shape[-1])
    normed: Array = hidden / np.sqrt(mean + _EPSILON) * weight
    return normed


def _silu(gate: Array) -> Array:
    # exp(-gate) may overflow to infinity, and then the result is 0, as it should be.
    with np.errstate(over="ignore"):
        silu: Array = gate / (1 + np.exp(-gate))
    return silu
