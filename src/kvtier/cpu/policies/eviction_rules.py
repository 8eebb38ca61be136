"""Three rules of eviction over a tree of prompts, and a contest between them.

No rule is the best for all traffic. So each runs on a sample of the traffic, with a cache that is
smaller in proportion, and the policy follows the one with the most hits of late (set dueling).
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

from xxhash import xxh3_64_intdigest

from kvtier.cpu.policies.base import BlockStatus
from kvtier.cpu.policies.prompt_tree import PromptTree, Segment
from kvtier.cpu.policies.reuse_odds import NUM_CLASSES, ReuseOdds, bucket_of

if TYPE_CHECKING:
    from kvtier.base import OffloadKey

_NO_KEYS: frozenset[OffloadKey] = frozenset()

_SHADOW_BLOCKS = 384
"""About how many blocks a rule's own cache holds."""
_LONGEST_STEP = 8
"""Keys of a prompt from one that the shadows may get to the next."""
_MEMORY = 1024
"""Over how many requests hits count: the weight of a hit falls by a factor e in this time."""
_CERTAINTY = 2.5
"""The lead, in standard deviations, at which another rule replaces the one in use."""
_BENEFIT_OF_DOUBT = 1.3
"""How many times their worth new blocks count. A wrong guess in their favour is found out; one
against them is not, because what is not stored is never hit."""
_DOUBLE_COST_DEPTH = 4096
"""Blocks at this depth take twice as long to compute as the first ones, by assumption."""


class Rule(ABC):
    """Says which segment is evicted first, and how much of a prompt is stored at all."""

    @abstractmethod
    def worth(self, segment: Segment) -> float:
        """The segment of the lowest worth is evicted first."""

    def num_admitted(
        self, tree: PromptTree, num_new: int, num_free: int, group: int, owner: str | None
    ) -> int:
        """How many of the first new blocks of a request are worth storing. `group`: its class."""
        return num_new


class Recency(Rule):
    """LRU."""

    def worth(self, segment: Segment) -> float:
        return segment.last_use


class Sticky(Recency):
    """LRU that, once the cache is full, stores few prompts. The others only fill free slots. So if
    prompts come in turns and not all of them fit, some of them hit every time."""

    _ONE_IN = 20

    def __init__(self) -> None:
        self._state = 1

    def num_admitted(
        self, tree: PromptTree, num_new: int, num_free: int, group: int, owner: str | None
    ) -> int:
        # A counter instead could be in step with prompts that come in turns.
        self._state = (self._state * 1103515245 + 12345) % (1 << 31)
        if (self._state >> 8) % self._ONE_IN == 0:
            return num_new
        return min(num_new, num_free)


class Density(Rule):
    """Stores what is expected to save more, for each request that it waits, than what is evicted.

    Deeper blocks save more, because computing a block takes attention to all earlier ones. Until
    enough is known to expect anything, the order is that of LRU.
    """

    def __init__(self, odds: ReuseOdds) -> None:
        self._odds = odds

    def worth(self, segment: Segment) -> float:
        if not self._odds.is_informed:
            return segment.last_use
        rate = self._odds.worth[segment.group][bucket_of(self._odds.now - segment.last_use)]
        return rate * (1 + segment.depth / _DOUBLE_COST_DEPTH)

    def num_admitted(
        self, tree: PromptTree, num_new: int, num_free: int, group: int, owner: str | None
    ) -> int:
        if not self._odds.is_informed:
            return num_new
        limit = _BENEFIT_OF_DOUBT * self._odds.worth[group][0]
        num_missing = num_new - num_free
        return num_free + tree.num_worth_less(limit, self.worth, num_missing, owner)


class _Shadow:
    """What one rule would hit, if it alone ruled a smaller cache."""

    def __init__(self, rule: Rule, capacity: int) -> None:
        self.rule = rule
        self.lead = 0.0
        """Hits more than the rule in use, of late."""
        self.spread = 0.0
        """Sum of the squares of these differences."""
        self.admits_all = False
        self._capacity = capacity
        self._tree = PromptTree(NUM_CLASSES)
        self._blocks: dict[OffloadKey, BlockStatus] = {}

    def serve(self, keys: Sequence[OffloadKey], group: int, now: int) -> int:
        """Serve a request. Returns the number of its first blocks that were there."""
        tree, blocks = self._tree, self._blocks
        num_hits = next((i for i, key in enumerate(keys) if key not in blocks), len(keys))
        path = tree.path(keys[:num_hits], blocks)
        for segment in path:
            tree.use(segment, group, now)
            segment.owner = ""
        new = [key for key in keys[num_hits:] if key not in blocks]
        num_free = self._capacity - len(blocks)
        if len(new) > num_free:
            num_admitted = len(new)
            if not self.admits_all:
                num_admitted = self.rule.num_admitted(tree, len(new), num_free, group, "")
            most = num_free + tree.num_idle - num_hits
            del new[max(min(num_admitted, most), 0) :]
        if len(new) > num_free:
            for block in tree.evict(len(new) - num_free, _NO_KEYS, "", self.rule.worth):
                del blocks[block.key]
        for segment in path:
            segment.owner = None
        if new:
            added = []
            for key in new:
                block = blocks[key] = BlockStatus(0)
                block.key = key
                block.ref_cnt = 0
                added.append(block)
            parent = path[-1] if path else None
            if parent is not None and not parent.num_children:
                tree.extend(parent, added)
            else:
                tree.append(parent, added, group, now)
        return num_hits

    def clear(self) -> None:
        self._tree.clear()
        self._blocks.clear()


class Contest:
    """Follows the rule that has had the most hits of late in its shadow."""

    def __init__(self, odds: ReuseOdds, cache_capacity: int) -> None:
        step = max(1, cache_capacity // _SHADOW_BLOCKS)
        # In a large cache, most prompts are shorter than a step. So the shadows get one key in some
        # of every `_LONGEST_STEP` keys. Which of these keys, a hash of the key says.
        self._step = min(step, _LONGEST_STEP)
        self._one_in = step // self._step
        # Every request has its keys in the same order, so the shadows always get the same keys.
        self._first = self._step // 2
        rules = (Density(odds), Recency(), Sticky())
        capacity = max(cache_capacity // (self._step * self._one_in), 1)
        self._shadows = [_Shadow(rule, capacity) for rule in rules]
        self._leader = 0

    @property
    def rule(self) -> Rule:
        """The rule to follow."""
        return self._shadows[self._leader].rule

    def admit_all(self) -> None:
        """Every block is stored from now on, whatever the rule says."""
        for shadow in self._shadows:
            shadow.admits_all = True

    def _sample(self, keys: Iterable[OffloadKey]) -> list[OffloadKey]:
        """The keys of a prompt that the shadows get."""
        sampled = list(keys)[self._first :: self._step]
        if self._one_in == 1:
            return sampled
        return [key for key in sampled if xxh3_64_intdigest(key) % self._one_in == 0]

    def serve(self, keys: Iterable[OffloadKey], group: int, now: int) -> None:
        """Let the shadows serve a finished request with these keys."""
        sampled = self._sample(keys)
        if not sampled:
            return
        hits = [shadow.serve(sampled, group, now) for shadow in self._shadows]
        for shadow, num_hits in zip(self._shadows, hits, strict=True):
            lead = num_hits - hits[self._leader]
            shadow.lead += lead - shadow.lead / _MEMORY
            shadow.spread += lead * lead - shadow.spread / _MEMORY
        best = max(range(len(hits)), key=self._certainty_of)
        if self._certainty_of(best) > _CERTAINTY:
            self._leader = best
            for shadow in self._shadows:
                shadow.lead = shadow.spread = 0.0

    def _certainty_of(self, index: int) -> float:
        """Lead of a rule over the one in use, in standard deviations."""
        shadow = self._shadows[index]
        return shadow.lead / math.sqrt(shadow.spread) if shadow.spread >= 1 else 0.0

    def clear(self) -> None:
        """Forget all blocks, but not which rule is the best."""
        for shadow in self._shadows:
            shadow.clear()
