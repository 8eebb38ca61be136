"""The connector as the engine calls it, and functions that make it from the engine's configuration.

The two halves of the connector, for the scheduler and for the workers, are in `kvtier.connector`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from hashlib import blake2b
from typing import TYPE_CHECKING, Any, Protocol

from kvtier.config import (
    AttentionKind,
    OffloadingCacheConfig,
    OffloadingConfig,
    OffloadingGroupConfig,
    OffloadingModelConfig,
    OffloadingParallelConfig,
)
from kvtier.connector.scheduler import OffloadingConnectorScheduler
from kvtier.connector.worker import OffloadingConnectorWorker
from kvtier.engine.cache import array_page_bytes
from kvtier.engine.config import EngineConfig, ModelConfig
from kvtier.factory import OffloadingSpecFactory

if TYPE_CHECKING:
    from kvtier.base import CanonicalKVCaches
    from kvtier.connector.common import (
        ComputedTokens,
        ConnectorMetadata,
        EngineRequest,
        LoadedRequest,
        PrefixMatch,
        ScheduledRequest,
        StepPlan,
        WorkerOutput,
    )

__all__ = ["Connector", "SchedulerHooks", "WorkerHooks", "make_connector", "offloading_config"]


class SchedulerHooks(Protocol):
    """The connector's scheduler half, as engines call it. See `OffloadingConnectorScheduler`."""

    def on_new_request(
        self, request: EngineRequest, count_cached: Callable[[], int] | None = None
    ) -> None: ...

    def get_num_new_matched_tokens(
        self, request: EngineRequest, num_computed_tokens: int
    ) -> PrefixMatch: ...

    def update_state_after_alloc(
        self,
        request: EngineRequest,
        block_ids: tuple[Sequence[int], ...],
        num_computed_tokens: int,
        num_external_tokens: int,
    ) -> None: ...

    def build_connector_meta(self, plan: StepPlan) -> ConnectorMetadata: ...

    def update_connector_output(self, outputs: Sequence[WorkerOutput]) -> list[LoadedRequest]: ...

    def note_model_run(self, computed: Iterable[ComputedTokens], seconds: float) -> None: ...

    def note_first_token(self, request_id: str) -> None: ...

    def request_finished(self, request_id: str, last: ScheduledRequest | None = None) -> None: ...

    def has_pending_push_work(self) -> bool: ...

    def take_events(self) -> Iterable[Any]: ...

    def reset_cache(self) -> None: ...

    def shutdown(self) -> None: ...


class WorkerHooks(Protocol):
    """The connector's worker half, of which each rank has one. See `OffloadingConnectorWorker`."""

    def register_kv_caches(self, kv_caches: CanonicalKVCaches) -> None: ...

    def start_kv_transfers(self, metadata: ConnectorMetadata) -> None: ...

    def get_finished(self) -> WorkerOutput: ...

    def shutdown(self) -> None: ...


@dataclass(frozen=True, slots=True)
class Connector:
    """Both halves of the connector. The engine owns them: its `shutdown` shuts them down."""

    scheduler: SchedulerHooks
    workers: Sequence[WorkerHooks]
    """One for each rank, in order."""


def offloading_config(
    model: ModelConfig,
    engine: EngineConfig,
    extra_config: Mapping[str, Any],
    engine_id: str,
    *,
    enable_kv_cache_events: bool = False,
) -> OffloadingConfig:
    """Combine this engine's description with the user's keys into the configuration of rank 0."""
    engine.check_against(model)
    return OffloadingConfig(
        groups=tuple(
            OffloadingGroupConfig(
                tokens_per_block=tokens,
                layer_names=tuple(f"layers.{layer}" for layer in group.layers),
                group_id=group_idx,
                kind=AttentionKind.FULL if group.window is None else AttentionKind.SLIDING_WINDOW,
                window_tokens=group.window,
            )
            for group_idx, (group, tokens) in enumerate(
                zip(model.groups, engine.block_tokens, strict=True)
            )
        ),
        worker_kv_bytes_per_block=sum(array_page_bytes(model, engine)),
        engine_id=engine_id,
        model=OffloadingModelConfig(
            name="kvtier-reference", dtype="float32", weights_revision=_revision(model)
        ),
        cache=OffloadingCacheConfig(tokens_per_hash=engine.tokens_per_hash),
        parallel=OffloadingParallelConfig(world_size=engine.world_size, tp_size=engine.world_size),
        extra_config=extra_config,
        enable_kv_cache_events=enable_kv_cache_events,
    )


def _revision(model: ModelConfig) -> str:
    """Return a digest of the configuration, which determines the weights."""
    return blake2b(repr(model).encode(), digest_size=16).hexdigest()


def make_connector(config: OffloadingConfig) -> Connector:
    """Make both halves of the connector, with all ranks in this process. The engine must shut them
    down.

    Raises the spec's error if a tier cannot start or if there is not enough memory.
    """
    ranks = range(config.parallel.world_size)
    scheduler_spec, *worker_specs = [
        OffloadingSpecFactory.create_spec(
            replace(config, parallel=replace(config.parallel, rank=rank))
        )
        for rank in (0, *ranks)
    ]
    return Connector(
        scheduler=OffloadingConnectorScheduler(scheduler_spec),
        workers=[OffloadingConnectorWorker(spec) for spec in worker_specs],
    )
