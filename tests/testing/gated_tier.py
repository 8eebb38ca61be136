"""The example tier with a gate before its storage, to keep jobs in flight."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager

from kvtier.base import OffloadingSpec
from kvtier.tiering.example.io_thread import ExampleTransfer
from kvtier.tiering.example.manager import ExampleSecondaryTierManager


class GatedTier(ExampleSecondaryTierManager):
    """Moves blocks on its own thread, and only while the gate is open."""

    def __init__(
        self,
        offloading_spec: OffloadingSpec,
        primary_kv_view: memoryview,
        tier_type: str,
        max_blocks: int = 1000,
        latency_ms: float = 0,
    ) -> None:
        self._latency_s = latency_ms / 1000
        self._gate = threading.Event()
        self._gate.set()
        super().__init__(
            offloading_spec,
            primary_kv_view,
            tier_type,
            max_blocks=max_blocks,
            simulate_async=True,
            latency_ms=latency_ms,
        )

    @contextmanager
    def closed(self) -> Iterator[None]:
        """Inside, no block is moved. When the gate opens, no job has to wait any longer for its
        latency: which one comes first is then the tier's choice alone."""
        self._gate.clear()
        try:
            yield
            time.sleep(self._latency_s)
        finally:
            self._gate.set()

    def _move_block(self, transfer: ExampleTransfer) -> None:
        self._gate.wait()
        super()._move_block(transfer)
