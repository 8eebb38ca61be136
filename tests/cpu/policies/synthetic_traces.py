"""Request traces in which it is known what a good policy does."""

from __future__ import annotations

import random
from collections.abc import Iterator
from itertools import count

Prompts = list[list[int]]


def _numbered(prompts: Iterator[list[tuple[int, int]]]) -> Prompts:
    numbers: dict[tuple[int, int], int] = {}
    fresh = count()
    return [
        [
            numbers[block] if block in numbers else numbers.setdefault(block, next(fresh))
            for block in prompt
        ]
        for prompt in prompts
    ]


def loop(num_turns: int = 16, num_conversations: int = 36, scale: int = 1) -> Prompts:
    """Conversations in turns, in a new order each turn. LRU evicts each before its next turn,
    unless the cache holds nearly all of them."""

    def prompts() -> Iterator[list[tuple[int, int]]]:
        chance = random.Random(0)
        order = list(range(num_conversations))
        for turn in range(num_turns):
            chance.shuffle(order)
            for conversation in order:
                size = (375 + 21 * turn) // scale
                common = 32 // scale
                yield [(-1 if i < common else conversation, i) for i in range(size)]

    return _numbered(prompts())


def recent(num_requests: int = 6000) -> Prompts:
    """Each prompt goes on with one of the last prompts, the more likely the more recent it is. LRU
    is nearly the best policy."""

    def prompts() -> Iterator[list[tuple[int, int]]]:
        chance = random.Random(1)
        stack: list[tuple[int, int]] = []
        fresh = count()
        for _ in range(num_requests):
            depth = int(chance.expovariate(1 / 20))
            if depth < len(stack):
                document, size = stack.pop(-1 - depth)
                size += chance.randrange(3)
            else:
                document, size = next(fresh), chance.randrange(5, 30)
            stack.append((document, size))
            yield [(document, i) for i in range(size)]

    return _numbered(prompts())


def shifting(num_phases: int = 10, num_requests: int = 800) -> Prompts:
    """Some documents are asked for often, and from phase to phase they are others."""

    def prompts() -> Iterator[list[tuple[int, int]]]:
        chance = random.Random(2)
        for phase in range(num_phases):
            for _ in range(num_requests):
                rank = int(chance.paretovariate(0.8)) - 1
                document = (phase * 150 + rank) if rank < 300 else chance.randrange(10**6, 10**7)
                size = 8 + document % 17
                yield [(document, i) for i in range(size)]

    return _numbered(prompts())
