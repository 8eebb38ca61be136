"""The transformer: RMSNorm, RoPE, grouped-query attention and a gated MLP, in float32."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from kvtier.engine.cache import KVCache
from kvtier.engine.config import LayerGroup, ModelConfig
from kvtier.engine.weights import TILE, Array, LayerWeights, Product, columns_per_call, make_weights

__all__ = ["Attention", "KeyRange", "Model", "Span"]

_NEVER = np.float32(-np.inf)


class KeyRange(NamedTuple):
    """Positions [start, end). Both are multiples of `key_tile`."""

    start: int
    end: int


class Attention:
    """Attention that adds the same numbers in the same order, whether keys were computed or loaded.

    Keys are read in tiles of `key_tile` tokens that start at multiples of `key_tile`. Which key
    tiles a query tile reads depends only on the position of the query tile. Keys that a row must
    not see get the weight 0, so it does not matter whether they have been computed yet.
    """

    def __init__(self, config: ModelConfig) -> None:
        self._queries_per_kv_head = config.num_heads // config.num_kv_heads
        self._scale = np.float32(config.head_dim**-0.5)
        rows = self._queries_per_kv_head * TILE
        self.key_tile = columns_per_call(rows, config.head_dim)

    def keys_of(self, group: LayerGroup, first_position: int) -> KeyRange:
        """Return the keys that the query tile at `first_position` reads."""
        start = group.first_needed_token(first_position) // self.key_tile * self.key_tile
        end = -(-(first_position + TILE) // self.key_tile) * self.key_tile
        return KeyRange(start, end)

    def attend(
        self,
        group: LayerGroup,
        first_position: int,
        rows: slice,
        queries: Array,
        keys: Array,
        values: Array,
    ) -> Array:
        """Return the attention of `queries`, in their shape (TILE, heads, head_dim).

        It is computed for `rows` only; the other rows are zeros. `keys`, `values`: (KV heads,
        positions of `keys_of`, head_dim), with zeros where there is no token.
        """
        kv_heads, num_keys, dim = keys.shape
        sharing = self._queries_per_kv_head
        tiled = (kv_heads, num_keys // self.key_tile, self.key_tile, dim)
        by_kv_head = (
            (queries * self._scale)
            .reshape(TILE, kv_heads, sharing, dim)
            .transpose(1, 2, 0, 3)
            .reshape(kv_heads, 1, sharing * TILE, dim)
        )
        scores = np.matmul(by_kv_head, keys.reshape(tiled).swapaxes(-1, -2))
        by_row = scores.reshape(kv_heads, -1, sharing, TILE, self.key_tile)
        # Matrix products always use the whole tile. Everything else is computed for `rows` only.
        is_whole = rows == slice(0, TILE)
        wanted = by_row if is_whole else by_row[:, :, :, rows].copy()
        self._mask(wanted, group, first_position, rows)
        wanted -= wanted.max(axis=(1, 4), keepdims=True)
        np.exp(wanted, out=wanted)
        totals = _sum_over_tiles(wanted.sum(axis=-1))
        if not is_whole:
            by_row.fill(0)
            by_row[:, :, :, rows] = wanted
        sums = _sum_over_tiles(np.matmul(scores, values.reshape(tiled)))
        attended = np.zeros((kv_heads, sharing, TILE, dim), np.float32)
        # Keys that a row must not see may turn a sum of zeros into -0.0. Adding 0 makes it 0.0.
        attended[:, :, rows] = sums.reshape(attended.shape)[:, :, rows] / totals[
            ..., None
        ] + np.float32(0)
        return attended.transpose(2, 0, 1, 3).reshape(TILE, -1, dim)

    def _mask(self, scores: Array, group: LayerGroup, first_position: int, rows: slice) -> None:
        """Set the score of keys that a row must not see to minus infinity.

        `scores`: (KV heads, key tiles, heads of a KV head, rows, keys of a tile).
        """
        positions = first_position + np.arange(TILE)[rows, None]
        first_key = self.keys_of(group, first_position).start
        for tile in range(scores.shape[1]):
            start = first_key + tile * self.key_tile
            is_past = start + self.key_tile <= first_position + 1
            is_in_window = start >= group.first_needed_token(first_position + TILE - 1)
            if is_past and (group.window is None or is_in_window):
                continue
            keys = np.arange(start, start + self.key_tile)
            unseen = keys > positions
            if group.window is not None:
                unseen |= keys <= positions - group.window
            np.copyto(scores[:, tile], _NEVER, where=unseen)


def _sum_over_tiles(parts: Array) -> Array:
    """Sum over axis 1, in the order of the key tiles."""
    total = parts[:, 0].copy()
    for tile in range(1, parts.shape[1]):
        total += parts[:, tile]
    return total


_EPSILON = np.float32(1e-5)


@dataclass(frozen=True, slots=True)
class Span:
    """Tokens of one sequence that are computed in one step."""

    token_ids: Sequence[int]
    """The tokens at positions `start`, `start` + 1, ..."""
    start: int
    block_tables: Sequence[Sequence[int]]
    """The block table of each KV-cache group. Its blocks hold the KV of all earlier tokens that
    these tokens attend to."""

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


class Rope:
    """Rotates each pair (i, i + half) of a head by an angle that grows with the position."""

    def __init__(self, config: ModelConfig, padded_tokens: int) -> None:
        self._half = config.head_dim // 2
        frequencies = config.rope_base ** (-np.arange(self._half) / self._half)
        # One table for all positions, because the bits of a cosine may depend on its index in the
        # array that numpy computes.
        angles = np.arange(padded_tokens)[:, None] * frequencies
        self._cos = np.cos(angles).astype(np.float32)
        self._sin = np.sin(angles).astype(np.float32)

    def turn(self, heads: Array, first_positions: list[int]) -> Array:
        """Rotate `heads`, an array (tiles, TILE, heads, head_dim). `first_positions`: one for each
        tile."""
        rows = heads.shape[1]
        positions = np.asarray(first_positions)[:, None] + np.arange(rows)
        cos, sin = self._cos[positions][:, :, None], self._sin[positions][:, :, None]
        low, high = heads[..., : self._half], heads[..., self._half :]
        return np.concatenate([low * cos - high * sin, high * cos + low * sin], axis=-1)


class Model:
    """Computes the KV of tokens into a cache, and the logits of the next token.

    The bits of every key, value and logit depend only on the tokens and the weights: not on how the
    tokens are split into spans, on the other spans of the batch, or on whether earlier KV was
    computed or loaded. See `kvtier.engine.weights`.
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
        """Write the attention of `queries` into `attended`. Both are arrays (tiles, TILE, heads,
        head_dim)."""
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
    # exp(-gate) may overflow to infinity. The result is then 0, which is correct.
    with np.errstate(over="ignore"):
        silu: Array = gate / (1 + np.exp(-gate))
    return silu
