"""An engine without a device over one tier. Requests load what they can, store the rest, and
compare every byte. The tier is made from a configuration, or by hand with faults."""

from __future__ import annotations

import time
import uuid
from collections.abc import Callable, Mapping, Sequence
from types import TracebackType
from typing import Any, Self

from kvtier.base import (
    BlockIDsLoadStoreSpec,
    OffloadingSpec,
    OffloadKey,
    ReqContext,
    ScheduleEndContext,
)
from kvtier.config import (
    OffloadingCacheConfig,
    OffloadingConfig,
    OffloadingGroupConfig,
    OffloadingModelConfig,
    OffloadingParallelConfig,
    new_epoch,
)
from kvtier.cpu.shared_offload_region import SharedOffloadRegion
from kvtier.hints import RequestHints, new_context
from kvtier.testing import payload_of
from kvtier.tiering.base import PrimaryRows, SecondaryTierManager
from kvtier.tiering.health import BreakerSettings, TierSettings
from kvtier.tiering.manager import CPUPrimaryTierOffloadingManager, TieringOffloadingManager
from kvtier.tiering.spec import TieringOffloadingSpec
from tests.tiering.patience import PATIENCE_S

__all__ = ["Engine", "engine_over", "engine_with"]

ROW_BYTES = 8192


class Engine:
    """Drives an orchestrator. A context manager that shuts it down."""

    def __init__(self, manager: TieringOffloadingManager, tier: SecondaryTierManager) -> None:
        self.manager = manager
        self.tier = tier
        self._rows: PrimaryRows = tier.rows
        self._num_requests = 0

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.manager.shutdown()

    def serve(self, keys: Sequence[OffloadKey], *, then_step: bool = True, **hints: Any) -> int:
        """Serve one request with this prompt. `hints`: fields of `RequestHints`. Returns the number
        of leading blocks that were loaded."""
        self._num_requests += 1
        request = new_context(f"request-{self._num_requests}", None, RequestHints(**hints))
        self.manager.on_new_request(request)
        num_hits = self._wait_for_hits(keys, request)
        self._load(keys[:num_hits], request)
        self._store(keys[num_hits:], request)
        self.manager.on_request_finished(request)
        if then_step:
            self.step()
        return num_hits

    def step(self) -> None:
        self.manager.on_schedule_end(ScheduleEndContext())

    def settle(self) -> None:
        """Step until nothing is under way."""
        deadline = time.monotonic() + PATIENCE_S
        while self.manager.has_pending_work() or self.manager.is_moving_blocks():
            assert time.monotonic() < deadline, "work is still pending"
            self.step()
            time.sleep(0.001)

    def _wait_for_hits(self, keys: Sequence[OffloadKey], request: ReqContext) -> int:
        deadline = time.monotonic() + PATIENCE_S
        while True:
            num_hits, is_final = self.manager.lookup_prefix(keys, request)
            if is_final:
                return num_hits
            assert time.monotonic() < deadline, "a request is kept waiting for ever"
            self.step()
            time.sleep(0.0005)

    def _load(self, keys: Sequence[OffloadKey], request: ReqContext) -> None:
        if not keys:
            return
        for key, row in zip(keys, _rows_of(self.manager.prepare_load(keys, request)), strict=True):
            wrong = bytes(self._rows[row]) != payload_of(key, self._rows.row_bytes)
            assert not wrong, f"wrong bytes for {key!r}"
        self.manager.complete_load(keys, request)

    def _store(self, keys: Sequence[OffloadKey], request: ReqContext) -> None:
        output = self.manager.prepare_store(keys, request) if keys else None
        if output is None:
            return
        rows = _rows_of(output.store_spec)
        for key, row in zip(output.keys_to_store, rows, strict=True):
            self._rows[row][:] = payload_of(key, self._rows.row_bytes)
        self.manager.complete_store(output.keys_to_store, request)

    def figures(self) -> dict[str, float]:
        """The gauges, and the counters since the last call."""
        stats = self.manager.get_stats()
        return {**stats.counters, **stats.gauges}


def _rows_of(spec: object) -> list[int]:
    assert isinstance(spec, BlockIDsLoadStoreSpec)
    return [int(row) for row in spec.block_ids]


def _config(num_rows: int, namespace: str, **extra: Any) -> OffloadingConfig:
    return OffloadingConfig(
        groups=(OffloadingGroupConfig(16, ("layer.0",)),),
        worker_kv_bytes_per_block=ROW_BYTES,
        engine_id=uuid.uuid4().hex,
        model=OffloadingModelConfig(name="model", dtype="bfloat16"),
        cache=OffloadingCacheConfig(tokens_per_hash=16),
        parallel=OffloadingParallelConfig(),
        extra_config={
            "cpu_bytes_to_use": num_rows * ROW_BYTES,
            "cache_namespace": namespace,
            "prefill_tokens_per_s": 0,
            **extra,
        },
        enable_kv_cache_events=True,
    )


def engine_with(
    *entries: Mapping[str, Any], num_rows: int, namespace: str, **options: Any
) -> Engine:
    """Make an engine from a configuration. `entries`: the keys of each tier; `options`: the keys
    beside `secondary_tiers`."""
    common = {
        "enable_kv_events": True,
        "max_pinned_share": 1,
        "load_timeout_ms": 1000 * PATIENCE_S,
        "lookup_timeout_ms": 1000 * PATIENCE_S,
    }
    tiers = [{**common, **entry} for entry in entries]
    config = _config(num_rows, namespace, secondary_tiers=tiers, **options)
    manager = TieringOffloadingSpec(config).get_manager()
    return Engine(manager, manager.secondary_tiers[0])


def engine_over(
    make_tier: Callable[[OffloadingSpec, memoryview], SecondaryTierManager],
    *,
    lookup_timeout_s: float,
    num_rows: int,
    shutdown_timeout_s: float,
) -> Engine:
    """Make an engine over a tier that was made by hand, with short pauses of the breaker. Loads may
    take twice as long as lookups, and stores four times."""
    config = _config(num_rows, "weights")
    region = SharedOffloadRegion(
        config.engine_id, config.num_blocks, None, config.row_bytes, config.cpu_page_size
    )
    primary = CPUPrimaryTierOffloadingManager(config.num_blocks, region)
    tier = make_tier(TieringOffloadingSpec(config), primary.get_kv_memoryview())
    settings = TierSettings(
        lookup_timeout_s=lookup_timeout_s,
        load_timeout_s=2 * lookup_timeout_s,
        store_timeout_s=4 * lookup_timeout_s,
        breaker=BreakerSettings(first_pause_s=0.01, longest_pause_s=0.02),
    )
    manager = TieringOffloadingManager(
        primary,
        [tier],
        settings=[settings],
        new_fingerprint=lambda: config.fingerprint(new_epoch()),
        prefill_tokens_per_s=0,
        shutdown_timeout_s=shutdown_timeout_s,
    )
    return Engine(manager, tier)
