"""What the engine calls on a connector. `kvtier.connector` has the two halves."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

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

__all__ = ["Connector", "SchedulerHooks", "WorkerHooks"]


class SchedulerHooks(Protocol):
    """Beside the scheduler. See `OffloadingConnectorScheduler` for what each call means."""

    def on_new_request(self, request: EngineRequest) -> None: ...

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

    def request_finished(self, request_id: str, last: ScheduledRequest | None = None) -> None: ...

    def has_pending_push_work(self) -> bool: ...

    def take_events(self) -> Iterable[Any]: ...

    def reset_cache(self) -> None: ...

    def shutdown(self) -> None: ...


class WorkerHooks(Protocol):
    """Beside the model, one for each rank."""

    def register_kv_caches(self, kv_caches: CanonicalKVCaches) -> None: ...

    def start_kv_transfers(self, metadata: ConnectorMetadata) -> None: ...

    def get_finished(self) -> WorkerOutput: ...

    def shutdown(self) -> None: ...


@dataclass(frozen=True, slots=True)
class Connector:
    """Both halves. The engine owns them: its `shutdown` shuts them down."""

    scheduler: SchedulerHooks
    workers: Sequence[WorkerHooks]
    """One for each rank, in order."""
