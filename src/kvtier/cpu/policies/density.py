"""An eviction policy that learns what is used again."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence, Set
from itertools import islice, pairwise
from typing import TYPE_CHECKING

from kvtier.cpu.policies.base import BlockStatus, CachePolicy
from kvtier.cpu.policies.eviction_rules import Contest
from kvtier.cpu.policies.prompt_tree import PromptTree, Segment
from kvtier.cpu.policies.reuse_odds import NUM_CLASSES, SHARED, ReuseOdds

if TYPE_CHECKING:
    from kvtier.base import OffloadKey, ReqContext

_MAX_PROMPTS = 65_536
"""The largest number of running requests that are remembered."""


class _Prompt:
    """A running request."""

    __slots__ = (
        "group",
        "has_gap",
        "is_refused",
        "keys",
        "leaf",
        "num_keys",
        "refused_key",
        "turn",
    )

    def __init__(self) -> None:
        self.num_keys = 0
        """Blocks of the prompt so far, stored or not."""
        self.turn = 0
        """How many earlier prompts it continues."""
        self.group = 0
        """Its class."""
        self.leaf: Segment | None = None
        """The segment with the last of its stored blocks."""
        self.has_gap = False
        """True if blocks were missing before the last stored one."""
        self.is_refused = False
        """True if the end of its prompt is not stored."""
        self.refused_key: OffloadKey | None = None
        """The last key that was not stored."""
        self.keys: Collection[OffloadKey] = ()
        """The longest prompt that was named. Maybe the caller's own, which grows."""


class DensityCachePolicy(CachePolicy):
    """Evicts the blocks with the fewest expected hits for the time that they would stay. Stores new
    blocks only if they are worth more than those that they would replace.

    Follows LRU, or a rule that stores few new prompts, while that has more hits; see `Contest`. A
    head of a prompt is evicted after its tail; see `PromptTree`. Time is counted in requests, so
    the same calls always have the same outcome.
    """

    may_evict_newest = True

    def __init__(self, cache_capacity: int) -> None:
        super().__init__(cache_capacity)
        self._tree = PromptTree(NUM_CLASSES)
        self._odds = ReuseOdds(cache_capacity)
        self._contest = Contest(self._odds, cache_capacity)
        self._prompts: dict[str, _Prompt] = {}
        self._storing: str | None = None
        """The request that stores next; its blocks are not evicted."""

    # --- uses ----------------------------------------------------------------------------------

    def touch(self, keys: Iterable[OffloadKey], req_context: ReqContext) -> None:
        keys = list(keys)
        self._see(self._prompt_of(req_context), keys, req_context.req_id)

    def on_use(
        self,
        keys: Sequence[OffloadKey],
        brought: Collection[OffloadKey],
        req_context: ReqContext,
    ) -> None:
        self._see(self._prompt_of(req_context), brought, req_context.req_id)

    def renew(self, keys: Collection[OffloadKey], req_context: ReqContext) -> None:
        prompt = self._prompt_of(req_context)
        if prompt.num_keys:
            self._use(prompt, req_context.req_id)
        else:
            self._see(prompt, keys, req_context.req_id)

    def on_request_finished(self, keys: Collection[OffloadKey], req_context: ReqContext) -> None:
        if keys or req_context.req_id in self._prompts:
            self.renew(keys, req_context)
            self._end(self._prompts.pop(req_context.req_id))

    def _end(self, prompt: _Prompt) -> None:
        self._use(prompt, None)
        odds = self._odds
        segment = prompt.leaf
        while segment is not None:
            if segment.blocks:
                last_key = segment.blocks[-1].key
                odds.begin_sample(last_key, segment.group, segment.end, prompt.turn)
            segment = segment.parent
        if prompt.refused_key is not None:
            odds.begin_sample(prompt.refused_key, prompt.group, prompt.num_keys, prompt.turn)
        self._contest.serve(prompt.keys, prompt.group, odds.now)

    def _prompt_of(self, req_context: ReqContext) -> _Prompt:
        prompt = self._prompts.get(req_context.req_id)
        if prompt is None:
            if len(self._prompts) >= _MAX_PROMPTS:
                oldest = next(iter(self._prompts))
                self._end(self._prompts.pop(oldest))
            prompt = self._prompts[req_context.req_id] = _Prompt()
            self._odds.begin_request()
        return prompt

    def _see(self, prompt: _Prompt, keys: Collection[OffloadKey], owner: str) -> None:
        """Note that a request uses all blocks of its prompt so far. Classify it the first time."""
        path = self._tree.path(keys, self.blocks)
        sample = self._odds.end_samples(keys)
        if not prompt.num_keys:
            gap = 0
            num_known = sum(len(segment.blocks) for segment in path)
            if path and 2 * path[-1].end >= path[-1].prompt_size:
                # It shares most of the last prompt that had these blocks, so it continues it.
                prompt.turn = path[-1].turn + 1
                gap = self._odds.now - path[-1].last_use
            if sample is not None and sample.num_keys > num_known:
                num_known = sample.num_keys
                prompt.turn = sample.turn + 1 if sample.group != SHARED else 0
                gap = self._odds.now - sample.used_at
            num_new = max(len(keys) - num_known, 0)
            prompt.group = self._odds.classify(prompt.turn, num_new, gap)
        self._note_length(prompt, keys)
        if path:
            for head, tail in pairwise(path):
                self._tree.put_behind(tail, head)
            prompt.leaf = path[-1]
            prompt.has_gap = _has_gap(path, keys)
        self._use(prompt, owner)

    def _note_length(self, prompt: _Prompt, keys: Collection[OffloadKey]) -> None:
        if len(keys) > prompt.num_keys:
            prompt.num_keys = len(keys)
            prompt.keys = keys

    def _use(self, prompt: _Prompt, owner: str | None) -> None:
        """Make the blocks of a request the most recently used ones, the head most of all."""
        tree, now = self._tree, self._odds.now
        segment = prompt.leaf
        num_own = 0
        while segment is not None:
            if segment.blocks:
                is_shared = segment.num_children > num_own
                tree.use(segment, SHARED if is_shared else prompt.group, now)
                segment.turn = prompt.turn
                segment.prompt_size = prompt.num_keys
                segment.owner = owner
                num_own = 1
            segment = segment.parent

    # --- stores --------------------------------------------------------------------------------

    def num_admitted(
        self, keys: Sequence[OffloadKey], num_free: int, req_context: ReqContext
    ) -> int:
        prompt = self._prompt_of(req_context)
        if not prompt.num_keys:
            self._see(prompt, keys, req_context.req_id)
        if prompt.is_refused:
            num_admitted = 0
        elif len(keys) <= num_free:
            num_admitted = len(keys)
        else:
            num_admitted = self._contest.rule.num_admitted(
                self._tree, len(keys), num_free, prompt.group, req_context.req_id
            )
        if num_admitted < len(keys):
            prompt.is_refused = True
            prompt.refused_key = keys[-1]
        return num_admitted

    def admit_all(self) -> None:
        self._contest.admit_all()

    def on_store_miss(self, keys: Sequence[OffloadKey], req_context: ReqContext) -> None:
        self._storing = req_context.req_id

    def insert(self, key: OffloadKey, block: BlockStatus) -> None:
        self.blocks[key] = block
        self._tree.append(None, (block,), 0, self._odds.now)

    def insert_run(
        self,
        keys: Sequence[OffloadKey],
        blocks: Sequence[BlockStatus],
        brought: Collection[OffloadKey],
        req_context: ReqContext,
    ) -> None:
        self.blocks.update(zip(keys, blocks, strict=True))
        prompt = self._prompt_of(req_context)
        if not prompt.num_keys:
            prompt.group = self._odds.classify(0, len(keys), 0)
        self._note_length(prompt, brought)
        leaf = prompt.leaf
        while leaf is not None and not leaf.blocks:  # evicted while the request ran
            leaf = leaf.parent
        is_own = leaf is not None and leaf.owner == req_context.req_id
        if leaf is None or leaf.num_children or prompt.has_gap or not is_own:
            leaf = self._tree.append(leaf, blocks, prompt.group, self._odds.now)
            leaf.turn = prompt.turn
            leaf.owner = req_context.req_id
        else:
            self._tree.extend(leaf, blocks)
        leaf.prompt_size = prompt.num_keys
        prompt.leaf = leaf

    def remove(self, key: OffloadKey) -> None:
        self._tree.discard(self.blocks.pop(key))

    def evict(
        self, n: int, protected: Set[OffloadKey]
    ) -> list[tuple[OffloadKey, BlockStatus]] | None:
        owner, self._storing = self._storing, None
        tree, blocks = self._tree, self.blocks
        storing = self._prompts.get(owner) if owner is not None else None
        most_kept = len(protected) + (storing.num_keys if storing is not None else 0)
        # Count exactly only if it may matter: that takes time.
        if tree.num_idle - most_kept < n and tree.num_evictable(protected, owner) < n:
            return None
        victims = tree.evict(n, protected, owner, self._contest.rule.worth)
        for block in victims:
            del blocks[block.key]
        return [(block.key, block) for block in victims]

    def next_to_leave(self, n: int) -> list[tuple[OffloadKey, BlockStatus]]:
        named = self._tree.next_to_leave(n, self._contest.rule.worth)
        return [(block.key, block) for block in named]

    def clear(self) -> None:
        self.blocks.clear()
        self._tree.clear()
        self._odds.clear()
        self._contest.clear()
        self._prompts.clear()
        self._storing = None

    # --- pins ----------------------------------------------------------------------------------

    def mark_evictable(self, key: OffloadKey) -> None:
        self._tree.count_idle((self.blocks[key],), +1)

    def mark_non_evictable(self, key: OffloadKey) -> None:
        self._tree.count_idle((self.blocks[key],), -1)

    def pinned(self, blocks: Iterable[BlockStatus]) -> None:
        self._tree.count_idle(blocks, -1)

    def unpinned(self, blocks: Iterable[BlockStatus]) -> None:
        self._tree.count_idle(blocks, +1)


def _has_gap(path: Sequence[Segment], keys: Collection[OffloadKey]) -> bool:
    """True if blocks are missing before the last one of a path."""
    num_here = sum(len(segment.blocks) for segment in path)
    if num_here >= len(keys):
        return False
    return next(islice(keys, num_here - 1, None)) != path[-1].blocks[-1].key
