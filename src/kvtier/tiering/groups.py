"""What the orchestrator has to know about KV-cache groups."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from kvtier.base import OffloadKey

_BEYOND_WINDOW = 2
"""How many blocks more than its window a scan of a windowed group may need."""


@dataclass(frozen=True, slots=True)
class GroupShape:
    """The blocks of one KV-cache group."""

    tokens_per_block: int
    """Tokens of one offloaded block."""
    window_blocks: int | None = None
    """How many blocks in a row a hit needs, where blocks are looked up from the end of the prompt
    backwards. None: all of them, looked up from the start."""
    is_uncertain: bool = False
    """Whether the engine does not say which of the two it is."""


class Groups:
    """All groups, by the last four bytes of their keys."""

    def __init__(self, shapes: Mapping[int, GroupShape]) -> None:
        self._tokens = {
            index.to_bytes(4, "big"): shape.tokens_per_block for index, shape in shapes.items()
        }
        self.is_only_one = len(shapes) == 1
        """Whether a prompt has been looked up when its keys of one group have been."""
        self.windows = {
            index.to_bytes(4, "big"): shape.window_blocks + _BEYOND_WINDOW
            for index, shape in shapes.items()
            if shape.window_blocks is not None
        }
        """Of the groups that are looked up backwards: how many blocks a search may end with."""
        self.uncertain = frozenset(
            index.to_bytes(4, "big") for index, shape in shapes.items() if shape.is_uncertain
        )

    def num_tokens(self, keys: Sequence[OffloadKey]) -> int:
        """The tokens that blocks stand for; 0, if that is not known. Groups hold the same ones."""
        if len(self._tokens) <= 1:
            # Most models have one group. A key of another one would be the engine's mistake.
            return len(keys) * self._tokens.get(keys[0][-4:], 0) if keys else 0
        tokens: dict[bytes, int] = {}
        for key in keys:
            group = key[-4:]
            tokens[group] = tokens.get(group, 0) + self._tokens.get(group, 0)
        return max(tokens.values(), default=0)
