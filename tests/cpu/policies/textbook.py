"""LRU and ARC as in a textbook: ordered dictionaries, one page at a time.

Independent of the package's implementations, and slow. The rules for a request are those of the
traces: resident blocks are used, last block first; missing blocks are stored, last block first, and
only the head if there is no room for all; a request does not evict its own blocks. At the end the
request's blocks are the most recent ones, the head the most recent of all.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import OrderedDict

Order = OrderedDict[int, None]


class Textbook(ABC):
    """One cache."""

    def __init__(self, capacity: int, max_store: int) -> None:
        """`max_store`: the most blocks that a request stores."""
        self.capacity = capacity
        self.max_store = max_store

    @abstractmethod
    def lists(self) -> tuple[Order, ...]:
        """The resident blocks."""

    @abstractmethod
    def use(self, block: int) -> None:
        """Use a resident block."""

    @abstractmethod
    def store(self, block: int, own: set[int]) -> list[int]:
        """Store a missing block. Returns the evicted block."""

    def request(self, prompt: list[int]) -> tuple[int, list[int]]:
        """Serve one request: (hits, evicted blocks)."""
        own = set(prompt)
        present = [block for block in prompt if any(block in order for order in self.lists())]
        there = set(present)
        num_hits = next((i for i, block in enumerate(prompt) if block not in there), len(prompt))
        for block in reversed(present):
            self.use(block)
        missing = [block for block in prompt if block not in there]
        evicted: list[int] = []
        for block in reversed(missing[: min(self.capacity - len(present), self.max_store)]):
            evicted += self.store(block, own)
        for block in reversed(prompt):
            for order in self.lists():
                if block in order:
                    order.move_to_end(block)
        return num_hits, evicted


def oldest_not_in(order: Order, own: set[int]) -> int | None:
    return next((block for block in order if block not in own), None)


class TextbookLRU(Textbook):
    def __init__(self, capacity: int, max_store: int) -> None:
        super().__init__(capacity, max_store)
        self.order: Order = OrderedDict()

    def lists(self) -> tuple[Order, ...]:
        return (self.order,)

    def use(self, block: int) -> None:
        self.order.move_to_end(block)

    def store(self, block: int, own: set[int]) -> list[int]:
        evicted = []
        if len(self.order) >= self.capacity:
            victim = oldest_not_in(self.order, own)
            assert victim is not None
            del self.order[victim]
            evicted.append(victim)
        self.order[block] = None
        return evicted


class TextbookARC(Textbook):
    """Figure 4 of the paper."""

    def __init__(self, capacity: int, max_store: int) -> None:
        super().__init__(capacity, max_store)
        self.t1: Order = OrderedDict()
        self.t2: Order = OrderedDict()
        self.b1: Order = OrderedDict()
        self.b2: Order = OrderedDict()
        self.p = 0.0

    def lists(self) -> tuple[Order, ...]:
        return (self.t1, self.t2)

    def use(self, block: int) -> None:
        self.t1.pop(block, None)
        self.t2[block] = None
        self.t2.move_to_end(block)

    def replace(self, in_b2: bool, own: set[int]) -> list[int]:
        if len(self.t1) + len(self.t2) < self.capacity:
            return []
        prefer_t1 = self.t1 and (len(self.t1) > self.p or (in_b2 and len(self.t1) == int(self.p)))
        choices = [(self.t1, self.b1), (self.t2, self.b2)]
        for order, ghosts in choices if prefer_t1 else reversed(choices):
            victim = oldest_not_in(order, own)
            if victim is not None:
                del order[victim]
                ghosts[victim] = None
                return [victim]
        raise AssertionError("nothing to replace")

    def store(self, block: int, own: set[int]) -> list[int]:
        c = self.capacity
        if block in self.b1:
            self.p = min(self.p + max(1.0, len(self.b2) / len(self.b1)), c)
            evicted = self.replace(False, own)
            del self.b1[block]
            self.t2[block] = None
            return evicted
        if block in self.b2:
            self.p = max(self.p - max(1.0, len(self.b1) / len(self.b2)), 0.0)
            evicted = self.replace(True, own)
            del self.b2[block]
            self.t2[block] = None
            return evicted
        evicted = []
        if len(self.t1) + len(self.b1) >= c:
            if len(self.t1) < c:
                self.b1.popitem(last=False)
                evicted = self.replace(False, own)
            else:
                victim = oldest_not_in(self.t1, own)
                assert victim is not None
                del self.t1[victim]
                evicted = [victim]
        elif len(self.t1) + len(self.t2) + len(self.b1) + len(self.b2) >= c:
            if len(self.t1) + len(self.t2) + len(self.b1) + len(self.b2) >= 2 * c:
                self.b2.popitem(last=False)
            evicted = self.replace(False, own)
        self.t1[block] = None
        return evicted
