"""The content of tiers, rebuilt from events alone."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Iterable

from kvtier.base import OffloadKey, make_offload_key
from kvtier.connector.events import AllBlocksCleared, BlockRemoved, BlockStored, KVCacheEvent
from kvtier.engine.request import extend_chain
from tests.e2e.violation import Violation, require

__all__ = ["EventLedger", "Where"]

Where = str | None
"""The name of a tier in events; None for host memory."""


class EventLedger:
    """The content of every tier according to the events."""

    def __init__(
        self,
        tokens_per_hash: int,
        tokens_per_chunk: tuple[int, ...],
        are_self_describing: bool,
        untimely: Collection[Where],
    ) -> None:
        """`untimely`: tiers whose events from before a reset may come after it."""
        self._tokens_per_hash = tokens_per_hash
        self._tokens_per_chunk = tokens_per_chunk
        self._are_self_describing = are_self_describing
        self._untimely = untimely
        self.content: dict[Where, set[OffloadKey]] = defaultdict(set)
        self._others: dict[Where, set[OffloadKey]] = defaultdict(set)
        """The other device blocks of offloaded blocks, which only events that describe themselves
        name."""
        self.num_events = 0

    def hear(self, events: Iterable[KVCacheEvent]) -> None:
        """Apply events in order."""
        for event in events:
            self.num_events += 1
            if isinstance(event, AllBlocksCleared):
                self.content.clear()
                self._others.clear()
            elif isinstance(event, BlockRemoved):
                where, keys = event.tier, _keys(event)
                here, others = self.content[where], self._others[where]
                is_known = (here | others).issuperset(keys) or where in self._untimely
                require(is_known, f"removed, but never stored: {event}")
                here.difference_update(keys)
                others.difference_update(keys)
            else:
                where, keys = event.tier, _keys(event)
                here, others = self.content[where], self._others[where]
                require((here | others).isdisjoint(keys), f"stored a second time: {event}")
                [*groups] = set(event.group_indices)
                if event.block_size not in (0, self._tokens_per_chunk[groups[0]]):
                    others.update(keys[:-1])  # the device blocks of one offloaded block
                    keys = keys[-1:]
                here.update(keys)
                self._check_description(event)

    def _check_description(self, event: BlockStored) -> None:
        if not self._are_self_describing:
            require(event.block_size == 0 and not event.token_ids, f"describes itself: {event}")
            return
        [group_idx], hashes = set(event.group_indices), event.block_hashes
        num_tokens = self._tokens_per_chunk[group_idx]
        is_one = event.block_size < num_tokens
        require(
            event.block_size * len(hashes) == len(event.token_ids)
            and (len(event.token_ids) <= num_tokens or not is_one),
            f"of another size: {event}",
        )
        if event.parent_block_hash is None:
            chain, tokens = [], event.token_ids
        else:
            # The position of the parent.
            chain, tokens = (
                [event.parent_block_hash],
                [0] * self._tokens_per_hash + event.token_ids,
            )
        extend_chain(chain, tokens, self._tokens_per_hash)
        per_block = event.block_size // self._tokens_per_hash
        first = per_block - 1 + (event.parent_block_hash is not None)
        require(chain[first::per_block] == hashes, f"of other tokens than it says: {event}")

    def check(self, where: Where, true: Iterable[OffloadKey]) -> None:
        """Raise unless a tier really has this content."""
        true = set(true)
        told = self.content[where]
        require(bool(told) or not self._others[where], "parts of blocks are left")
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
