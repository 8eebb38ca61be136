"""What the engine says about itself: its model, its KV cache, and how it is spread over ranks."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum


class AttentionKind(StrEnum):
    """Which of a request's earlier tokens a layer looks at."""

    FULL = "full"
    SLIDING_WINDOW = "sliding_window"
    """The last `window_tokens` tokens."""
    CHUNKED_LOCAL = "chunked_local"
    """The tokens since the last multiple of `window_tokens`."""
    STATE_SPACE = "state_space"
    """None of them: a state takes their place."""
    UNKNOWN = "unknown"
    """The engine does not say."""

    @property
    def has_window(self) -> bool:
        """Whether a group of this kind has `window_tokens`."""
        return self in (AttentionKind.SLIDING_WINDOW, AttentionKind.CHUNKED_LOCAL)


@dataclass(frozen=True, slots=True)
class OffloadingGroupConfig:
    """Layers that share block tables: one KV-cache group."""

    tokens_per_block: int
    """Tokens that one device block spans, over all context-parallel ranks."""
    layer_names: tuple[str, ...]
    """In the order in which their data stands in a block."""
    group_id: int = 0
    """The group index inside the keys of this group's blocks. Unique among the groups."""
    kind: AttentionKind = AttentionKind.FULL
    window_tokens: int | None = None
    """Set exactly for the kinds that have a window."""


@dataclass(frozen=True, slots=True)
class OffloadingModelConfig:
    """Which weights computed the cache, and in which type."""

    name: str
    dtype: str
    """The element type of the KV cache, such as "bfloat16" or "fp8_e4m3"."""
    weights_revision: str | None = None
    """Identifies the weights beyond their name: a hub commit, or a digest of local files. None:
    not known."""
    variant: str = ""
    """Whatever else changes what the weights compute, or how the engine lays it out, in the
    engine's own words: RoPE overrides, quantization, the engine's release."""
    unknown_because: str | None = None
    """Why there is no revision: one clause, for the message that refuses to start."""


@dataclass(frozen=True, slots=True)
class OffloadingCacheConfig:
    """How tokens become keys and offloaded blocks."""

    tokens_per_hash: int
    """Tokens that one block hash stands for."""
    blocks_per_chunk: int = 1
    """Device blocks of one offloaded block. What the user sets replaces what the engine gave."""


@dataclass(frozen=True, slots=True)
class OffloadingParallelConfig:
    """How one engine is spread over ranks, and which of them this is."""

    rank: int = 0
    """0 on the scheduler side."""
    world_size: int = 1
    """Ranks that each hold a part of every block."""
    tp_size: int = 1
    pp_size: int = 1
    pcp_size: int = 1
    """Prefill context parallel size."""
    dcp_size: int = 1
    """Decode context parallel size."""
    data_parallel_index: int = 0
    data_parallel_size: int = 1
