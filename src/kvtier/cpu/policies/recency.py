"""An LRU order that keeps a request's blocks together, and evicts the head of the prompt last.

A plain LRU list moves single blocks, so the order within a request depends on the order of
calls: after a prompt is stored in two steps, its tail is more recent than its head. Here the unit
of recency is a *run*: the blocks of one request, in prompt order. Runs are ordered by age; eviction
takes the oldest run and, within it, the last block first. A request that stores more blocks appends
them to its run; a request that uses another request's blocks moves them into its own run. Both take
constant time per block. Making a whole run the most recent one takes constant time in all.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Iterator, Mapping, Sequence, Set
from typing import TYPE_CHECKING, Protocol

from kvtier.cpu.policies.base import BlockStatus, CachePolicy

if TYPE_CHECKING:
    from kvtier.base import OffloadKey


_MAX_JOINED = 64
"""Largest number of blocks in a run that was joined from two runs."""


class Run:
    """Blocks of one request, in prompt order. Runs of finished requests may be joined."""

    __slots__ = ("age", "blocks", "idle", "num_dead", "owner", "recency", "scattered")

    def __init__(self, recency: RecencyList, owner: str | None, age: int) -> None:
        self.recency = recency
        self.owner = owner
        """The request; None once it has finished or started another run."""
        self.age = age
        """Clock value when the run was made or last refreshed. Runs are sorted by it."""
        self.blocks: dict[OffloadKey, BlockStatus] = {}
        self.num_dead = 0
        """Number of blocks evicted from the dictionary `blocks` since it was made."""
        self.idle = 0
        """Blocks that are not pinned and not being written."""
        self.scattered = False
        """True if other runs may hold blocks that the request uses."""


class RecencyList:
    """Runs from the least to the most recently used one."""

    def __init__(self) -> None:
        # Not a plain dict: repeatedly deleting the oldest entry leaves dead entries at the start,
        # which every access to the oldest entry would have to skip.
        self._runs: OrderedDict[Run, None] = OrderedDict()
        self._by_owner: dict[str, Run] = {}
        self._clock = 0
        self._size = 0

    def __len__(self) -> int:
        return self._size

    def __contains__(self, key: object) -> bool:
        return any(key in run.blocks for run in self._runs)

    def __iter__(self) -> Iterator[OffloadKey]:
        """Keys in the order in which they would be evicted if none were pinned."""
        for run in self._runs:
            yield from reversed(run.blocks)

    def run_of(self, owner: str) -> Run | None:
        """The run of a request, if it has one in this list."""
        return self._by_owner.get(owner)

    def open_run(self, owner: str | None) -> Run:
        """The run of a request. If it has none, a new run, which is the most recent one."""
        run = self._by_owner.get(owner) if owner is not None else None
        if run is None:
            self._clock += 1
            run = Run(self, owner, self._clock)
            self._runs[run] = None
            if owner is not None:
                self._by_owner[owner] = run
        return run

    def reopen_run(self, owner: str) -> tuple[Run, Run | None]:
        """Return a new run for a request, which is the most recent one, and its former run."""
        former = self._by_owner.pop(owner, None)
        if former is not None:
            former.owner = None
        return self.open_run(owner), former

    def refresh_if_exactly(self, run: Run | None, keys: list[OffloadKey]) -> bool:
        """Make `run` the most recent one if it holds exactly these blocks, in this order.

        Returns False otherwise.
        """
        if run is None or len(run.blocks) != len(keys) or list(run.blocks) != keys:
            return False
        self.refresh(run)
        return True

    def refresh_if_tail(
        self, run: Run, keys: list[OffloadKey], blocks: Mapping[OffloadKey, BlockStatus]
    ) -> bool:
        """Make `run` the most recent one if its blocks belong to the last of `keys`, in this order,
        and there are further keys before them.

        The blocks of those further keys move into the run; the run's own blocks are not moved one
        by one. Otherwise returns False and changes nothing.
        """
        num_own = len(run.blocks)
        if num_own >= len(keys) or list(run.blocks) != keys[len(keys) - num_own :]:
            return False
        self._surround(run, keys[: len(keys) - num_own], (), blocks)
        self.refresh(run)
        return True

    def take_over(
        self, owner: str, keys: list[OffloadKey], blocks: Mapping[OffloadKey, BlockStatus]
    ) -> bool:
        """Give a request without a run a run without an owner, and make that run the most recent.

        Tries the run of the first key, then the run of the middle key. Takes a run only if its
        blocks are a contiguous part of `keys`, in this order; returns False if it takes neither.
        The blocks of the other keys move into the run. The run's own blocks are not moved one by
        one, so a prompt that is repeated or continued costs little.
        """
        for anchor in (0, len(keys) // 2) if keys else ():
            block = blocks.get(keys[anchor])
            if block is None or block.place.owner is not None:
                continue
            run: Run = block.place
            own = list(run.blocks)
            start = anchor - own.index(keys[anchor])
            end = start + len(own)
            if start >= 0 and keys[start:end] == own:
                self._enter(run, owner)
                self._surround(run, keys[:start], keys[end:], blocks)
                self.refresh(run)
                return True
        return False

    def _enter(self, run: Run, owner: str) -> None:
        """Make a request the owner of a run that has none. The run may be in another list."""
        if run.recency is not self:
            del run.recency._runs[run]
            run.recency._size -= len(run.blocks)
            run.recency = self
            self._runs[run] = None
            self._size += len(run.blocks)
        run.owner = owner
        self._by_owner[owner] = run

    def _surround(
        self,
        run: Run,
        before: Sequence[OffloadKey],
        behind: Sequence[OffloadKey],
        blocks: Mapping[OffloadKey, BlockStatus],
    ) -> None:
        """Move blocks into a run, before and after its own. The run then holds all blocks that its
        request uses."""
        num_own = len(run.blocks)
        move_all(before, blocks, run)
        if len(run.blocks) > num_own:
            in_order = list(run.blocks.items())
            run.blocks = dict(in_order[num_own:] + in_order[:num_own])
            run.num_dead = 0
        move_all(behind, blocks, run)
        run.scattered = False

    def refresh(self, run: Run) -> None:
        """Make `run` the most recent one."""
        self._clock += 1
        run.age = self._clock
        self._runs.move_to_end(run)

    def retire(self, owner: str) -> None:
        """End the run of a finished request. A later request with the same id starts a new run."""
        run = self._by_owner.pop(owner, None)
        if run is not None:
            run.owner = None
            self._join_with_older(run)

    def _join_with_older(self, run: Run) -> None:
        """If `run` is the most recent one, join it with the next older run, to save memory: a run
        takes more than a block. The older run must have no owner, and both together at most
        `_MAX_JOINED` blocks."""
        newest_first = reversed(self._runs)
        if next(newest_first) is not run:
            return
        older = next(newest_first, None)
        if older is None or older.owner is not None:
            return
        if len(run.blocks) + len(older.blocks) > _MAX_JOINED:
            return
        for block in older.blocks.values():
            block.place = run
        run.blocks.update(older.blocks)  # after its own, so that the older blocks are evicted first
        run.idle += older.idle
        run.num_dead += older.num_dead
        del self._runs[older]

    def close_if_empty(self, run: Run) -> None:
        """Forget a run without blocks."""
        if not run.blocks:
            del self._runs[run]
            if run.owner is not None:
                del self._by_owner[run.owner]

    def append_new(self, owner: str | None, blocks: dict[OffloadKey, BlockStatus]) -> None:
        """Append new blocks, which are in no run and cannot be evicted yet, to the request's run.

        The run becomes the most recent one, unless it is `scattered`: refreshing it would make it
        more recent than the request's blocks in other runs. A scattered run keeps its place until
        the request touches its blocks or finishes.
        """
        run = self.open_run(owner)
        for block in blocks.values():
            block.place = run
        run.blocks.update(blocks)
        self._size += len(blocks)
        if not run.scattered:
            self.refresh(run)

    def discard(self, key: OffloadKey, block: BlockStatus) -> None:
        """Remove one block from its run."""
        run: Run = block.place
        block.place = None
        del run.blocks[key]
        if block.ref_cnt == 0:
            run.idle -= 1
        self._size -= 1
        self.close_if_empty(run)

    def select(
        self, n: int, protected: Set[OffloadKey], protected_owner: str | None = None
    ) -> list[tuple[OffloadKey, BlockStatus]]:
        """The first `n` evictable blocks in order of eviction, or all if there are fewer.

        `protected_owner`: a request whose run is skipped.
        """
        selected: list[tuple[OffloadKey, BlockStatus]] = []
        for run in self._runs:
            missing = n - len(selected)
            if missing <= 0:
                break
            if not run.idle or run.owner == protected_owner is not None:
                continue
            members = run.blocks
            if run.idle == len(members) <= missing and protected.isdisjoint(members):
                selected += reversed(members.items())
                continue
            for item in reversed(members.items()):
                if item[1].ref_cnt == 0 and item[0] not in protected:
                    selected.append(item)
                    missing -= 1
                    if not missing:
                        break
        return selected

    def discard_selected(self, selected: Sequence[tuple[OffloadKey, BlockStatus]]) -> None:
        """Remove blocks that `select` returned: all of them, or the first ones."""
        end = len(selected)
        i = 0
        while i < end:
            run: Run = selected[i][1].place
            # Blocks of one run are adjacent in `selected`: check whether they are the whole run.
            last = i + len(run.blocks) - 1
            if last < end and selected[last][1].place is run:
                run.blocks = {}
                run.idle = run.num_dead = 0
                self.close_if_empty(run)
                i = last + 1
            else:
                i = self._discard_some(run, selected, i)
        self._size -= end

    def _discard_some(
        self, run: Run, selected: Sequence[tuple[OffloadKey, BlockStatus]], start: int
    ) -> int:
        """Remove the selected blocks of `run` from index `start` on. Returns their end index."""
        members = run.blocks
        i, end = start, len(selected)
        while i < end and selected[i][1].place is run:
            del members[selected[i][0]]
            i += 1
        run.idle -= i - start
        run.num_dead += i - start
        if run.num_dead > len(members):
            # Deleted entries stay in a dictionary until it is copied, and every later `select`
            # would have to skip them.
            run.blocks = dict(members)
            run.num_dead = 0
        return i

    def clear(self) -> None:
        """Forget all runs."""
        self._runs.clear()
        self._by_owner.clear()
        self._size = 0


def move(key: OffloadKey, block: BlockStatus, target: Run) -> None:
    """Move a block from its run, which may be in another list, to `target`."""
    source: Run = block.place
    del source.blocks[key]
    target.blocks[key] = block
    block.place = target
    _account(source, target, 1, block.ref_cnt == 0)


def move_all(
    keys: Iterable[OffloadKey], blocks: Mapping[OffloadKey, BlockStatus], target: Run
) -> None:
    """Like `move`, for the resident blocks of these keys that are not in `target`. Updates the
    counts of a run once for each group of successive blocks from that run."""
    find, moved = blocks.get, target.blocks
    source, left, num_idle, num_moved = target, moved, 0, 0
    for key in keys:
        block = find(key)
        if block is None:
            continue
        run: Run = block.place
        if run is not source:
            if num_moved:
                _account(source, target, num_moved, num_idle)
            source, left, num_idle, num_moved = run, run.blocks, 0, 0
        if run is target:
            continue
        del left[key]
        moved[key] = block
        block.place = target
        num_moved += 1
        if block.ref_cnt == 0:
            num_idle += 1
    if num_moved:
        _account(source, target, num_moved, num_idle)


def _account(source: Run, target: Run, num_moved: int, num_idle: int) -> None:
    """Update the counts of two runs after a move of `num_moved` blocks, of which `num_idle` are
    evictable."""
    source.scattered = True
    source.idle -= num_idle
    target.idle += num_idle
    if source.recency is not target.recency:
        source.recency._size -= num_moved
        target.recency._size += num_moved
    if not source.blocks:
        source.recency.close_if_empty(source)


class RunKeepingPolicy(CachePolicy):
    """Base of policies that keep blocks in runs. Every run counts its evictable blocks."""

    def mark_evictable(self, key: OffloadKey) -> None:
        self.blocks[key].place.idle += 1

    def mark_non_evictable(self, key: OffloadKey) -> None:
        self.blocks[key].place.idle -= 1

    def pinned(self, blocks: Iterable[BlockStatus]) -> None:
        count_idle(blocks, -1)

    def unpinned(self, blocks: Iterable[BlockStatus]) -> None:
        count_idle(blocks, +1)


class CountsIdle(Protocol):
    """A place of several blocks."""

    idle: int


def count_idle(blocks: Iterable[BlockStatus], change: int) -> int:
    """Add `change` to the idle count of each block's place. `change`: 1 if the blocks became
    evictable, -1 if they no longer are. Returns the sum."""
    place: CountsIdle | None = None
    count = total = 0
    for block in blocks:
        if block.place is not place:
            if place is not None:
                place.idle += count
                total += count
            place = block.place
            count = 0
        count += change
    if place is not None:
        place.idle += count
    return total + count
