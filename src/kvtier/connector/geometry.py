"""Tokens, device blocks and offloaded blocks (chunks) of each KV-cache group."""

from __future__ import annotations

import logging
from dataclasses import dataclass
from math import lcm
from typing import TYPE_CHECKING

from kvtier.config import AttentionKind

if TYPE_CHECKING:
    from kvtier.config import OffloadingConfig

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class GroupGeometry:
    """One group. Positions count from the start of the prompt."""

    group_idx: int
    """Inside keys."""
    kind: AttentionKind
    tokens_per_block: int
    blocks_per_chunk: int
    hashes_per_chunk: int
    window_tokens: int | None

    @property
    def tokens_per_chunk(self) -> int:
        """Tokens of one offloaded block."""
        return self.tokens_per_block * self.blocks_per_chunk

    @property
    def is_prefix(self) -> bool:
        """Whether all earlier tokens are needed, so that the first miss ends a hit."""
        return self.kind is AttentionKind.FULL

    def warn_if_rarely_stored(self) -> None:
        """A chunk can be stored only while the device has all of its blocks."""
        kept = 1 if self.kind is AttentionKind.STATE_SPACE else self.window_tokens
        if kept is not None and self.blocks_per_chunk > 1 and kept < self.tokens_per_chunk:
            logger.warning(
                "Group %d keeps %d tokens on the device, but an offloaded block has %d: most of "
                "its blocks cannot be stored, and then nothing can be loaded. Set "
                "blocks_per_chunk to 1, or to fewer.",
                self.group_idx,
                kept,
                self.tokens_per_chunk,
            )

    def first_needed_token(self, end: int) -> int:
        """The first of the tokens before `end` whose cache is needed to go on from there."""
        if self.kind is AttentionKind.FULL:
            return 0
        if self.kind is AttentionKind.STATE_SPACE:
            return max(0, end - 1)
        assert self.window_tokens is not None
        if self.kind is AttentionKind.CHUNKED_LOCAL:
            return end // self.window_tokens * self.window_tokens
        return max(0, end - self.window_tokens + 1)


class Geometry:
    """All groups of an engine."""

    def __init__(self, config: OffloadingConfig) -> None:
        bpc, tokens_per_hash = config.cache.blocks_per_chunk, config.cache.tokens_per_hash
        self.groups = tuple(
            GroupGeometry(
                group_idx=group.group_id,
                kind=group.kind,
                tokens_per_block=group.tokens_per_block,
                blocks_per_chunk=bpc,
                hashes_per_chunk=group.tokens_per_block * bpc // tokens_per_hash,
                window_tokens=group.window_tokens,
            )
            for group in config.groups
        )
        for group in self.groups:
            if group.kind is AttentionKind.UNKNOWN:
                raise ValueError(
                    f"the attention kind of group {group.group_idx} is unknown: an engine has to "
                    "say which of a request's blocks it needs"
                )
            group.warn_if_rarely_stored()
            if group.tokens_per_chunk % tokens_per_hash:
                raise ValueError(
                    f"an offloaded block of group {group.group_idx} has {group.tokens_per_chunk} "
                    f"tokens, which is no multiple of tokens_per_hash={tokens_per_hash}: choose "
                    "another blocks_per_chunk"
                )
        self.alignment = lcm(*(group.tokens_per_chunk for group in self.groups))
        """A hit ends at a multiple of this: where offloaded blocks of all groups end."""
