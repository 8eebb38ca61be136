"""Runs a trace through a primary tier, one request after the other."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

from kvtier.base import OffloadKey, ReqContext, make_offload_key
from kvtier.cpu.manager import CPUOffloadingManager


def key_of(block: int) -> OffloadKey:
    """A key for a block number of a trace."""
    return make_offload_key(block.to_bytes(8, "big"), 0)


@dataclass
class Replay:
    """What came of a trace."""

    num_references: int = 0
    num_hits: int = 0
    """References to blocks that were there, as were all earlier ones of the same prompt."""
    evicted: list[list[OffloadKey]] = field(default_factory=list)
    """What each request evicted, in no particular order."""

    @property
    def hit_percentage(self) -> float:
        return 100 * self.num_hits / self.num_references


def replay(requests: Iterable[list[int]], manager: CPUOffloadingManager) -> Replay:
    """Look up, use what is there, store what is missing, finish."""
    result = Replay()
    keys: dict[int, OffloadKey] = {}
    for number, blocks in enumerate(requests):
        prompt = [keys.get(block) or keys.setdefault(block, key_of(block)) for block in blocks]
        context = ReqContext(f"request-{number}")
        manager.on_new_request(context)
        result.num_references += len(prompt)
        result.num_hits += manager.lookup_prefix(prompt, context).num_hits
        manager.touch(prompt, context)
        output = manager.prepare_store(prompt, context)
        assert output is not None, "nothing is in flight, so there is always something to evict"
        manager.complete_store(output.keys_to_store, context)
        manager.on_request_finished(context)
        result.evicted.append(output.evicted_keys)
    return result
