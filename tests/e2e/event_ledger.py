"""What someone knows of the tiers who hears nothing but the events."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Iterable

from kvtier.base import OffloadKey, make_offload_key
from kvtier.connector.events import AllBlocksCleared, BlockRemoved, BlockStored, KVCacheEvent
from kvtier.engine.block_hash import extend_chain
from tests.e2e.violation import Violation, require

__all__ = ["EventLedger", "Where"]

Where = str | None
"""What tells tiers apart in events: the name of a tier, or None for host memory."""


class EventLedger:
    """The content of every tier, by the events alone."""

    def __init__(
        self,
        tokens_per_hash: int,
        tokens_per_chunk: tuple[int, ...],
        are_self_describing: bool,
        untimely: Collection[Where],
    ) -> None:
        """`untimely`: tiers whose events may come after a reset, though they are from before it."""
        self._tokens_per_hash = tokens_per_hash
        self._tokens_per_chunk = tokens_per_chunk
        self._are_self_describing = are_self_describing
        self._untimely = untimely
        self.content: dict[Where, set[OffloadKey]] = defaultdict(set)
        self.num_events = 0

    def hear(self, events: Iterable[KVCacheEvent]) -> None:
        """Take in what has happened, in this order."""
        for event in events:
            self.num_events += 1
            if isinstance(event, AllBlocksCleared):
                self.content.clear()
            elif isinstance(event, BlockRemoved):
                where, keys = event.tier, _keys(event)
                here = self.content[where]
                is_known = here.issuperset(keys) or where in self._untimely
                require(is_known, f"removed, but never stored: {event}")
                here.difference_update(keys)
            else:
                where, keys = event.tier, _keys(event)
                here = self.content[where]
                require(here.isdisjoint(keys), f"stored a second time: {event}")
                here.update(keys)
                self._check_description(event)

    def _check_description(self, event: BlockStored) -> None:
        if not self._are_self_describing:
            require(event.block_size == 0 and not event.token_ids, f"describes itself: {event}")
            return
        [group_idx], [block_hash] = event.group_indices, event.block_hashes
        require(
            event.block_size == len(event.token_ids) == self._tokens_per_chunk[group_idx],
            f"of another size: {event}",
        )
        if event.parent_block_hash is None:
            chain, tokens = [], event.token_ids
        else:
            # The place of what the parent stands for.
            chain, tokens = (
                [event.parent_block_hash],
                [0] * self._tokens_per_hash + event.token_ids,
            )
        extend_chain(chain, tokens, self._tokens_per_hash)
        require(chain[-1] == block_hash, f"of other tokens than it says: {event}")

    def check(self, where: Where, true: Iterable[OffloadKey]) -> None:
        """Raise unless this is what a tier really has."""
        true = set(true)
        told = self.content[where]
        if told != true:
            raise Violation(
                f"events and content of {where} differ: {len(told - true)} blocks are not there, "
                f"{len(true - told)} were never told of"
            )


def _keys(event: BlockStored | BlockRemoved) -> list[OffloadKey]:
    return [
        make_offload_key(block_hash, group_idx)
        for block_hash, group_idx in zip(event.block_hashes, event.group_indices, strict=True)
    ]
