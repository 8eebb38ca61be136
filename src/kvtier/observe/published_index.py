"""What was stored at one point of a stream of events: the state from which a snapshot is made."""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Iterator
from itertools import islice
from typing import Any, TypeAlias

__all__ = ["PublishedIndex"]

Event: TypeAlias = dict[str, Any]
"""One event as it is published, decoded."""

_OF_A_PLACE = ("medium", "locality", "ownership", "group_idx")
_OF_A_BLOCK = ("block_hashes", "parent_block_hash", "token_ids", "extra_keys")


class PublishedIndex:
    """The blocks of every medium, by hash. Not thread-safe."""

    def __init__(self, max_blocks: int) -> None:
        """`max_blocks`: beyond this number, the block that was stored first is left out."""
        self._max_blocks = max_blocks
        self._blocks: dict[tuple[Hashable, ...], dict[Hashable, Event]] = {}
        self._num_blocks = 0

    def __len__(self) -> int:
        return self._num_blocks

    def apply(self, events: Iterable[Event]) -> None:
        """Take in a batch."""
        for event in events:
            if event["type"] == "AllBlocksCleared":
                self._blocks.clear()
                self._num_blocks = 0
                continue
            here = self._blocks.setdefault(tuple(event.get(name) for name in _OF_A_PLACE), {})
            self._num_blocks -= len(here)
            if event["type"] == "BlockRemoved":
                for block_hash in event["block_hashes"]:
                    here.pop(block_hash, None)
            else:
                here.update(_single_blocks(event))
            self._num_blocks += len(here)
        self._forget_oldest()

    def _forget_oldest(self) -> None:
        while self._num_blocks > self._max_blocks:
            largest = max(self._blocks.values(), key=len)
            excess = min(self._num_blocks - self._max_blocks, len(largest))
            for block_hash in list(islice(largest, excess)):
                del largest[block_hash]
            self._num_blocks -= excess

    def snapshot(self, at_once: int) -> Iterator[list[Event]]:
        """Batches that make an index like this one out of any other. A block comes after its
        parent. `at_once`: blocks in one batch."""
        batch: list[Event] = [{"type": "AllBlocksCleared"}]
        for blocks in self._blocks.values():
            for event in _parents_first(blocks):
                if len(batch) >= at_once:
                    yield batch
                    batch = []
                batch.append(event)
        yield batch


def _single_blocks(event: Event) -> Iterator[tuple[Hashable, Event]]:
    """An event for each block of an event."""
    hashes, size = event["block_hashes"], event["block_size"]
    extra = event.get("extra_keys")
    rest = {name: value for name, value in event.items() if name not in _OF_A_BLOCK}
    for number, block_hash in enumerate(hashes):
        block = {
            "type": "BlockStored",
            "block_hashes": [block_hash],
            "parent_block_hash": hashes[number - 1] if number else event["parent_block_hash"],
            "token_ids": event["token_ids"][number * size : (number + 1) * size],
            **rest,
        }
        if not size:
            block["parent_block_hash"] = None  # not known
        if extra is not None and extra[number] is not None:
            block["extra_keys"] = [extra[number]]
        yield block_hash, block


def _parents_first(blocks: dict[Hashable, Event]) -> Iterator[Event]:
    done: set[Hashable] = set()
    for block_hash in blocks:
        chain = []
        place: Hashable = block_hash
        while place in blocks and place not in done:
            done.add(place)
            chain.append(blocks[place])
            place = blocks[place]["parent_block_hash"]
        yield from reversed(chain)
