"""A tree of prompts, from which leaves are evicted first.

A segment holds successive blocks of prompts. Where prompts part, segments part: the head that they
share is the parent, and what follows are its children. A segment with children is not evicted, and
of a segment the last block is evicted first, so a head never leaves before its tail. Every step
takes constant time for each block that a request uses, or for each segment.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Set
from itertools import islice
from typing import TYPE_CHECKING

from kvtier.cpu.policies.base import BlockStatus
from kvtier.cpu.policies.recency import count_idle

if TYPE_CHECKING:
    from kvtier.base import OffloadKey

_EMPTY = float("inf")
"""Worth of the oldest segment of an empty queue."""


class Segment:
    """Successive blocks that were last used by the same request."""

    __slots__ = (
        "blocks",
        "depth",
        "group",
        "idle",
        "is_queued",
        "last_use",
        "newer",
        "num_children",
        "older",
        "owner",
        "parent",
        "prompt_size",
        "turn",
    )

    def __init__(self, parent: Segment | None, depth: int) -> None:
        self.parent = parent
        self.depth = depth
        """Blocks of the prompt before this segment."""
        self.blocks: list[BlockStatus] = []
        self.num_children = 0
        self.idle = 0
        """Blocks that are not pinned and not being written."""
        self.group = 0
        """The class of the last use, which is also its queue."""
        self.last_use = 0
        """Clock value at the last use."""
        self.turn = 0
        """How many earlier prompts the last prompt continued."""
        self.prompt_size = 0
        """Blocks of the last prompt."""
        self.owner: str | None = None
        """The running request that used the segment last."""
        self.is_queued = False
        """False if it had children when it came to be evicted, and has not been used since."""

        self.older: Segment | None = None
        self.newer: Segment | None = None
        """The neighbours in the queue."""

    @property
    def end(self) -> int:
        """Blocks of the prompt up to the end of this segment."""
        return self.depth + len(self.blocks)

    def is_behind(self, head: Segment) -> bool:
        """True if this segment leaves before `head`."""
        parent = self.parent
        while parent is not None and parent is not head:
            parent = parent.parent
        return parent is head


class _Queue:
    """Segments from the least to the most recently used one. Linked, because a dictionary takes
    more memory than a short segment."""

    __slots__ = ("newest", "oldest")

    def __init__(self) -> None:
        self.oldest: Segment | None = None
        self.newest: Segment | None = None

    def __iter__(self) -> Iterator[Segment]:
        segment = self.oldest
        while segment is not None:
            yield segment
            segment = segment.newer

    def add_newest(self, segment: Segment) -> None:
        segment.older = self.newest
        if self.newest is None:
            self.oldest = segment
        else:
            self.newest.newer = segment
        self.newest = segment

    def add_oldest(self, segment: Segment) -> None:
        segment.newer = self.oldest
        if self.oldest is None:
            self.newest = segment
        else:
            self.oldest.older = segment
        self.oldest = segment

    def remove(self, segment: Segment) -> None:
        older, newer = segment.older, segment.newer
        if older is None:
            self.oldest = newer
        else:
            older.newer = newer
        if newer is None:
            self.newest = older
        else:
            newer.older = older
        segment.older = segment.newer = None


class PromptTree:
    """Segments, in a queue for each class, from the least to the most recently used one."""

    def __init__(self, num_groups: int) -> None:
        self.queues = [_Queue() for _ in range(num_groups)]
        self.num_idle = 0
        """Blocks that are not pinned and not being written."""
        self._unqueued: dict[Segment, None] = {}

    def __iter__(self) -> Iterator[Segment]:
        for queue in self.queues:
            yield from queue
        yield from self._unqueued

    # --- uses ----------------------------------------------------------------------------------

    def path(
        self, keys: Iterable[OffloadKey], blocks: Mapping[OffloadKey, BlockStatus]
    ) -> list[Segment]:
        """The segments of these blocks, in prompt order. A segment that goes on behind the last
        block that is named is divided there."""
        path: list[Segment] = []
        segment: Segment | None = None
        last: BlockStatus | None = None
        count = 0
        for block in map(blocks.get, keys):
            if block is None:
                continue
            if block.place is not segment:
                if last is not None:
                    path.append(self._divide(last, count))
                segment = block.place
                count = 0
            last = block
            count += 1
        if last is not None:
            path.append(self._divide(last, count))
        return path

    def _divide(self, last: BlockStatus, count: int) -> Segment:
        """The segment of `last`, without the blocks behind it. `count`: the number of its blocks,
        if all of them were named."""
        segment: Segment = last.place
        blocks = segment.blocks
        if blocks[-1] is last:
            return segment
        if blocks[count - 1] is not last:
            count = blocks.index(last) + 1
        head = Segment(segment.parent, segment.depth)
        head.blocks = blocks[:count]
        head.num_children = 1
        head.group, head.last_use, head.turn = segment.group, segment.last_use, segment.turn
        head.prompt_size, head.owner = segment.prompt_size, segment.owner
        for block in head.blocks:
            block.place = head
            head.idle += block.ref_cnt == 0
        del blocks[:count]
        segment.idle -= head.idle
        segment.parent = head
        segment.depth += count
        self._unqueued[head] = None
        return head

    def put_behind(self, tail: Segment, head: Segment) -> None:
        """Let a head leave after its tail, even if it was stored after it."""
        if tail.parent is head or tail.is_behind(head):
            return
        if head.is_behind(tail):
            self._hang(head, tail.parent)
        self._hang(tail, head)

    def _hang(self, segment: Segment, parent: Segment | None) -> None:
        self._unlink(segment)
        segment.parent = parent
        if parent is not None:
            parent.num_children += 1

    def use(self, segment: Segment, group: int, now: int) -> None:
        """Make a segment the most recently used one of a class."""
        if segment.is_queued:
            self.queues[segment.group].remove(segment)
        else:
            segment.is_queued = True
            del self._unqueued[segment]
        self.queues[group].add_newest(segment)
        segment.group = group
        segment.last_use = now

    def append(
        self, parent: Segment | None, blocks: Sequence[BlockStatus], group: int, now: int
    ) -> Segment:
        """Add new blocks behind those of `parent`, as a segment."""
        segment = Segment(parent, parent.end if parent is not None else 0)
        if parent is not None:
            parent.num_children += 1
        segment.group = group
        segment.last_use = now
        segment.is_queued = True
        self.queues[group].add_newest(segment)
        self.extend(segment, blocks)
        return segment

    def extend(self, segment: Segment, blocks: Sequence[BlockStatus]) -> None:
        """Add new blocks at the end of a segment without children."""
        segment.blocks += blocks
        for block in blocks:
            block.place = segment
            if block.ref_cnt == 0:
                segment.idle += 1
                self.num_idle += 1

    def count_idle(self, blocks: Iterable[BlockStatus], change: int) -> None:
        """Note that blocks became evictable (`change` is 1) or are no longer evictable (-1)."""
        self.num_idle += count_idle(blocks, change)

    # --- eviction ------------------------------------------------------------------------------

    def discard(self, block: BlockStatus) -> None:
        """Forget one block."""
        segment: Segment = block.place
        segment.blocks.remove(block)
        if block.ref_cnt == 0:
            segment.idle -= 1
            self.num_idle -= 1
        block.place = None
        if not segment.blocks:
            self._close(segment)

    def num_evictable(self, protected: Set[OffloadKey], owner: str | None) -> int:
        """Evictable blocks that are neither protected nor in a segment of `owner`."""
        return sum(
            block.ref_cnt == 0 and block.key not in protected
            for segment in self
            if segment.idle and not segment.owner == owner is not None
            for block in segment.blocks
        )

    def num_worth_less(
        self, limit: float, worth: Callable[[Segment], float], most: int, owner: str | None
    ) -> int:
        """How many evictable blocks, up to `most`, come before the first segment of their class
        that is worth more than `limit`."""
        count = 0
        for queue in self.queues:
            for segment in queue:
                if segment.owner == owner is not None:
                    continue
                if worth(segment) > limit:
                    break
                count += segment.idle
                if count >= most:
                    return most
        return count

    def next_to_leave(self, n: int, worth: Callable[[Segment], float]) -> list[BlockStatus]:
        """The first `n` blocks that `evict` would remove, in order, if none were protected. Changes
        nothing."""
        return _Preview(self, worth).take(n)

    def evict(
        self,
        n: int,
        protected: Set[OffloadKey],
        owner: str | None,
        worth: Callable[[Segment], float],
    ) -> list[BlockStatus]:
        """Remove `n` evictable blocks that are neither protected nor in a segment of `owner`. The
        caller has checked that there are as many.

        Compares the oldest segment of each class, and takes the one of the lowest worth.
        """
        victims: list[BlockStatus] = []
        skipped: list[Segment] = []
        oldest: list[Segment | None] = [None] * len(self.queues)
        values = [_EMPTY] * len(self.queues)
        changed: Iterable[int] = range(len(self.queues))
        while True:
            for group in changed:
                segment = oldest[group] = self._oldest(self.queues[group], owner, skipped)
                values[group] = _EMPTY if segment is None else worth(segment)
            lowest = min(values)
            if lowest == _EMPTY or len(victims) == n:
                break
            group = values.index(lowest)
            segment = oldest[group]
            assert segment is not None
            victims += self._take(segment, n - len(victims), protected)
            changed = (group,)
            if segment.blocks:
                self._set_aside(segment, skipped)
            else:
                freed = self._close(segment)
                if freed is not None and freed.group != group:
                    changed = (group, freed.group)
        for segment in reversed(skipped):
            self._queue_as_oldest(segment)
        if len(victims) < n:
            victims += self._evict_heads(n - len(victims), protected, owner)
        return victims

    def is_queued(self, segment: Segment) -> bool:
        """False if it had children when it came to be evicted, and has not been used since."""
        return segment not in self._unqueued

    def _oldest(self, queue: _Queue, owner: str | None, skipped: list[Segment]) -> Segment | None:
        """The oldest segment that can be evicted. Takes those before it out of the queue."""
        while (segment := queue.oldest) is not None:
            if segment.num_children:
                self._unqueue(segment)
            elif not segment.idle or segment.owner == owner is not None:
                self._set_aside(segment, skipped)
            else:
                return segment
        return None

    def _set_aside(self, segment: Segment, skipped: list[Segment]) -> None:
        self._unqueue(segment)
        skipped.append(segment)

    def _take(self, segment: Segment, n: int, protected: Set[OffloadKey]) -> list[BlockStatus]:
        """Remove up to `n` evictable blocks of a segment, the last one first."""
        blocks = segment.blocks
        taken = blocks[: -n - 1 : -1]
        if segment.idle == len(blocks) and (
            not protected or protected.isdisjoint([block.key for block in taken])
        ):
            del blocks[len(blocks) - len(taken) :]
        else:
            taken = []
            kept: list[BlockStatus] = []
            while blocks and len(taken) < n:
                block = blocks.pop()
                is_taken = block.ref_cnt == 0 and block.key not in protected
                (taken if is_taken else kept).append(block)
            blocks += reversed(kept)
        segment.idle -= len(taken)
        self.num_idle -= len(taken)
        return taken

    def _evict_heads(
        self, n: int, protected: Set[OffloadKey], owner: str | None
    ) -> list[BlockStatus]:
        """Evict blocks with children, because only pinned and protected ones have none."""
        victims: list[BlockStatus] = []
        for segment in sorted(self, key=_num_parents, reverse=True):
            if len(victims) == n:
                break
            if segment.idle and not segment.owner == owner is not None:
                victims += self._take(segment, n - len(victims), protected)
                if not segment.blocks:
                    self._close(segment)
        return victims

    def _close(self, segment: Segment) -> Segment | None:
        """Take a segment without blocks out of its queue. Returns the segment with blocks that has
        lost its last child by this, if any.

        If blocks behind the segment stay, because they are in use, it stays as their parent until
        they have left.
        """
        if segment.is_queued:
            self.queues[segment.group].remove(segment)
            segment.is_queued = False
        else:
            self._unqueued.pop(segment, None)
        return None if segment.num_children else self._unlink(segment)

    def _unlink(self, segment: Segment) -> Segment | None:
        """A segment is no longer a child of its parent. Returns the segment with blocks that has
        lost its last child by this, if any."""
        while (parent := segment.parent) is not None:
            parent.num_children -= 1
            if parent.num_children:
                return None
            if parent.blocks:
                if parent in self._unqueued:
                    # It was the oldest of its class before, and all others have been used since.
                    self._queue_as_oldest(parent)
                return parent
            segment = parent
        return None

    def _unqueue(self, segment: Segment) -> None:
        self.queues[segment.group].remove(segment)
        segment.is_queued = False
        self._unqueued[segment] = None

    def _queue_as_oldest(self, segment: Segment) -> None:
        del self._unqueued[segment]
        segment.is_queued = True
        self.queues[segment.group].add_oldest(segment)

    def clear(self) -> None:
        """Forget all segments."""
        for segment in self:
            segment.parent = None
        self.queues = [_Queue() for _ in self.queues]
        self._unqueued.clear()
        self.num_idle = 0


class _Preview:
    """Goes through the segments as `PromptTree.evict` does, and leaves them as they are."""

    def __init__(self, tree: PromptTree, worth: Callable[[Segment], float]) -> None:
        self._tree = tree
        self._worth = worth
        self._waiting = [iter(queue) for queue in tree.queues]
        self._first: list[list[Segment]] = [[] for _ in tree.queues]
        """By class: segments that come before those that wait, the last one first."""
        self._passed: set[Segment] = set()
        """Segments that had children when it was their turn."""
        self._num_gone: dict[Segment, int] = {}
        """By segment: how many of its children would be gone."""

    def take(self, n: int) -> list[BlockStatus]:
        named: list[BlockStatus] = []
        oldest = [self._next(group) for group in range(len(self._first))]
        values = [_EMPTY if segment is None else self._worth(segment) for segment in oldest]
        while len(named) < n and (lowest := min(values)) < _EMPTY:
            group = values.index(lowest)
            segment = oldest[group]
            assert segment is not None
            idle = (block for block in reversed(segment.blocks) if block.ref_cnt == 0)
            named += islice(idle, n - len(named))
            changed = [group]
            freed = self._freed_by(segment) if segment.idle == len(segment.blocks) else None
            if freed is not None:
                if freed.group != group and (waiting := oldest[freed.group]) is not None:
                    self._first[freed.group].append(waiting)
                self._first[freed.group].append(freed)
                changed.append(freed.group)
            for other in dict.fromkeys(changed):
                following = oldest[other] = self._next(other)
                values[other] = _EMPTY if following is None else self._worth(following)
        if len(named) < n:
            named += self._heads(n - len(named), set(named))
        return named

    def _heads(self, n: int, named: Set[BlockStatus]) -> list[BlockStatus]:
        """The blocks that are evicted although blocks behind them stay, because these are in use.
        `named`: those that are evicted before them."""
        idle = (
            block
            for segment in sorted(self._tree, key=_num_parents, reverse=True)
            if segment.num_children and segment.idle
            for block in reversed(segment.blocks)
            if block.ref_cnt == 0 and block not in named
        )
        return list(islice(idle, n))

    def _freed_by(self, segment: Segment) -> Segment | None:
        """This segment would be gone. Returns the parent that would have no child left, if its turn
        was before."""
        parent = segment.parent
        while parent is not None:
            num_gone = self._num_gone[parent] = self._num_gone.get(parent, 0) + 1
            if num_gone < parent.num_children:
                return None
            if parent.blocks:
                is_before = parent in self._passed or not self._tree.is_queued(parent)
                return parent if is_before and parent.idle else None
            parent = parent.parent
        return None

    def _next(self, group: int) -> Segment | None:
        if self._first[group]:
            return self._first[group].pop()
        for segment in self._waiting[group]:
            if segment.num_children > self._num_gone.get(segment, 0):
                self._passed.add(segment)
            elif segment.idle:
                return segment
        return None


def _num_parents(segment: Segment) -> int:
    """Segments before this one. Its `depth` may be too small, if those were stored after it."""
    count = 0
    parent = segment.parent
    while parent is not None:
        count += 1
        parent = parent.parent
    return count
