"""The size of the model, of the device cache and of a step."""

from __future__ import annotations

from dataclasses import dataclass
from math import gcd, lcm

__all__ = ["VOCABULARY", "EngineConfig", "LayerGroup", "ModelConfig"]

VOCABULARY = 258
"""Number of tokens: 256 byte values, and the two special tokens of `kvtier.engine.request`."""


@dataclass(frozen=True, slots=True)
class LayerGroup:
    """Layers that share block tables: one KV-cache group."""

    layers: tuple[int, ...]
    window: int | None
    """Number of tokens that a token attends to, itself included. None: no limit."""

    def first_needed_token(self, position: int) -> int:
        """Return the first token that the token at `position` attends to."""
        return 0 if self.window is None else max(0, position - self.window + 1)


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelConfig:
    """A decoder-only transformer. On one machine, equal configurations give bit-equal results."""

    num_layers: int = 4
    hidden: int = 256
    num_heads: int = 8
    num_kv_heads: int = 2
    head_dim: int = 32
    mlp_hidden: int = 512
    vocab: int = VOCABULARY
    windowed_layers: tuple[int, ...] = ()
    """The layers that attend to `window` tokens; the others attend to all."""
    window: int | None = None
    tied: bool = False
    """True if the output head is the embedding matrix, transposed and scaled."""
    max_tokens: int = 8192
    """Largest number of tokens of one request, prompt and output together."""
    rope_base: float = 10_000.0
    seed: int = 0

    def __post_init__(self) -> None:
        if self.num_heads % self.num_kv_heads:
            raise ValueError(
                f"num_heads={self.num_heads} with num_kv_heads={self.num_kv_heads}: every KV head "
                "serves the same number of heads, so give a multiple"
            )
        if self.head_dim % 2:
            raise ValueError(
                f"head_dim={self.head_dim}: RoPE rotates pairs, so give an even number"
            )
        if bool(self.windowed_layers) != (self.window is not None):
            raise ValueError(
                f"window={self.window} with windowed_layers={self.windowed_layers}: give both, or "
                "neither"
            )
        if self.window is not None and self.window < 1:
            raise ValueError(
                f"window={self.window}: a token attends at least to itself, so give 1 or more"
            )
        unknown = set(self.windowed_layers).difference(range(self.num_layers))
        if unknown:
            raise ValueError(
                f"windowed_layers names {sorted(unknown)}, but the layers are 0 to "
                f"{self.num_layers - 1}"
            )

    @property
    def groups(self) -> tuple[LayerGroup, ...]:
        """The KV-cache groups: layers that attend to all tokens, then those with a window."""
        windowed = tuple(sorted(set(self.windowed_layers)))
        full = tuple(layer for layer in range(self.num_layers) if layer not in windowed)
        groups = (LayerGroup(full, None), LayerGroup(windowed, self.window))
        return tuple(group for group in groups if group.layers)

    @property
    def kv_bytes_per_token_and_layer(self) -> int:
        """Bytes of the keys and values of one token in one layer, in float32."""
        return 2 * self.num_kv_heads * self.head_dim * 4


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineConfig:
    """The device cache, the size of a step, and the ranks."""

    block_tokens: tuple[int, ...] = (16,)
    """Tokens of one device block, for each KV-cache group."""
    num_blocks: tuple[int, ...] = (1024,)
    """Number of device blocks, for each KV-cache group."""
    token_budget: int = 512
    """Largest number of tokens that one step computes, over all requests."""
    max_running: int = 16
    """Largest number of requests that run or load at the same time."""
    world_size: int = 1
    """Number of ranks, each with an equal share of the KV heads."""
    device_events: bool = False
    """Whether `Engine.take_events` also returns the blocks of the device."""

    @property
    def tokens_per_hash(self) -> int:
        """Tokens of one hash. Chosen so that every block of every group ends where a hash ends."""
        return gcd(*self.block_tokens)

    @property
    def alignment(self) -> int:
        """The length of a cached prefix is a multiple of this number of tokens, so that the prefix
        ends at the end of a block in every group."""
        return lcm(*self.block_tokens)

    def check_against(self, model: ModelConfig) -> None:
        """Raise `ValueError` unless this engine can run that model."""
        groups = model.groups
        for name in ("block_tokens", "num_blocks"):
            values = getattr(self, name)
            if len(values) != len(groups) or min(values) < 1:
                raise ValueError(
                    f"{name}={values}: the model has {len(groups)} KV-cache group(s), so give "
                    f"{len(groups)} positive number(s)"
                )
        for name in ("token_budget", "max_running", "world_size"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name}={getattr(self, name)}: give 1 or more")
        if model.num_kv_heads % self.world_size:
            raise ValueError(
                f"world_size={self.world_size} with num_kv_heads={model.num_kv_heads}: every rank "
                "holds the same number of KV heads, so give a divisor"
            )
        for group, tokens, blocks in zip(groups, self.block_tokens, self.num_blocks, strict=True):
            if group.window is None:
                continue
            # Room for the window, for the tokens of the previous step, and for those of this step.
            needed = -(-(group.window + 2 * self.token_budget) // tokens) + 2
            if blocks < needed:
                raise ValueError(
                    f"num_blocks={self.num_blocks}: the group with window={group.window} needs "
                    f"{needed} blocks of {tokens} tokens to run one request with token_budget="
                    f"{self.token_budget}. Give more blocks, or a smaller token_budget"
                )
