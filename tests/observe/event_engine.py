"""The reference engine with events on all levels, its publisher, and what is really stored."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from uuid import uuid4

from kvtier.base import get_offload_block_hash
from kvtier.connector.scheduler import OffloadingConnectorScheduler
from kvtier.engine import Engine, EngineConfig
from kvtier.engine.offloading import make_connector, offloading_config
from kvtier.engine.request import extend_chain
from kvtier.observe.publisher import EventPublisher
from kvtier.tiering.disk.manager import DiskSecondaryTierManager
from kvtier.tiering.manager import TieringOffloadingManager
from tests.engine.models import FULL

__all__ = ["BLOCK_TOKENS", "EventEngine", "as_int", "event_engine"]

BLOCK_TOKENS = 8
_PAGE = 4096


def as_int(block_hash: bytes) -> int:
    """A hash as it is published."""
    return int.from_bytes(block_hash[-8:], "big")


@dataclass
class EventEngine:
    """An engine that publishes its events after each step."""

    engine: Engine
    publisher: EventPublisher
    connector: OffloadingConnectorScheduler
    manager: TieringOffloadingManager
    parts: dict[bytes, list[bytes]]
    """For each offloaded block that a prompt could have, by its hash: its device blocks."""
    blocks_per_chunk: int

    def endpoints(self) -> tuple[str, str]:
        """Where the publisher sends events, and where it is asked for missed ones."""
        assert self.publisher.replay_endpoint is not None
        return self.publisher.endpoint, self.publisher.replay_endpoint

    def serve(self, prompt: Sequence[int]) -> None:
        """Serve a prompt, and wait until all its blocks are where they go."""
        chain: list[bytes] = []
        extend_chain(chain, prompt, BLOCK_TOKENS)
        size = self.blocks_per_chunk
        for end in range(size, len(chain) + 1, size):
            self.parts[chain[end - 1]] = chain[end - size : end]
        self.engine.add_request(prompt, max_tokens=1)
        connector = self.connector
        while self.engine.has_requests or connector._jobs or self.manager.is_moving_blocks():
            self._step()
        self._step()

    def step_until_idle(self) -> None:
        """As an engine does that has no requests."""
        self._step()
        while self.engine.has_requests or self.engine._has_transfers:
            self._step()

    def _step(self) -> None:
        self.engine.step()
        self.publisher.publish(self.engine.take_events())

    def truth(self) -> dict[str, set[int]]:
        """What is stored, by medium."""
        (pool,) = self.engine.blocks._pools
        (disk,) = self.manager.secondary_tiers
        assert isinstance(disk, DiskSecondaryTierManager)
        host = self.manager.primary_tier.resident_keys()
        return {
            "GPU": {as_int(block_hash) for block_hash in pool._block_of},
            "CPU": self._parts_of(map(get_offload_block_hash, host)),
            "STORAGE": self._parts_of(map(get_offload_block_hash, disk._table.readable)),
        }

    def _parts_of(self, hashes: Iterator[bytes]) -> set[int]:
        return {as_int(part) for block_hash in hashes for part in self.parts[block_hash]}


@contextmanager
def event_engine(
    slab: Path,
    *,
    host_blocks: int = 24,
    disk_blocks: int = 40,
    device_blocks: int = 32,
    blocks_per_chunk: int = 1,
    parts: dict[bytes, list[bytes]] | None = None,
    disk_options: Mapping[str, Any] | None = None,
    **publisher: Any,
) -> Iterator[EventEngine]:
    """An engine whose host memory and disk are small. The sizes are in offloaded blocks, except
    `device_blocks`."""
    config = EngineConfig(
        block_tokens=(BLOCK_TOKENS,), num_blocks=(device_blocks,), device_events=True
    )
    row = BLOCK_TOKENS * FULL.kv_bytes_per_token_and_layer * FULL.num_layers * blocks_per_chunk
    row = -(-row // _PAGE) * _PAGE
    extra = {
        "cpu_bytes_to_use": host_blocks * row,
        "blocks_per_chunk": blocks_per_chunk,
        "prefill_tokens_per_s": 0,
        "secondary_tiers": [
            {
                "type": "disk",
                "path": str(slab),
                "max_bytes": disk_blocks * (row + _PAGE) + 64 * 1024,
                **(disk_options or {}),
            }
        ],
    }
    connector = make_connector(
        offloading_config(FULL, config, extra, uuid4().hex, enable_kv_cache_events=True)
    )
    engine = Engine(FULL, config, connector)
    try:
        assert isinstance(connector.scheduler, OffloadingConnectorScheduler)
        manager = connector.scheduler.manager
        assert isinstance(manager, TieringOffloadingManager)
        options = {
            "endpoint": "tcp://127.0.0.1:0",
            "replay_endpoint": "tcp://127.0.0.1:0",
            "heartbeat_s": 0.05,
            **publisher,
        }
        sender = EventPublisher(**options)
        try:
            yield EventEngine(
                engine,
                sender,
                connector.scheduler,
                manager,
                {} if parts is None else parts,
                blocks_per_chunk,
            )
        finally:
            sender.close()
    finally:
        engine.shutdown()
