"""The scheduler half of the connector, with checks and counters."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sized

from kvtier.base import GPULoadStoreSpec
from kvtier.connector.common import (
    ConnectorMetadata,
    EngineRequest,
    LoadedRequest,
    PrefixMatch,
    StepPlan,
    WorkerOutput,
)
from kvtier.connector.planning import GroupGeometry
from kvtier.connector.scheduler import OffloadingConnectorScheduler
from tests.e2e.violation import require

__all__ = ["WatchedScheduler"]


class WatchedScheduler(OffloadingConnectorScheduler):
    """The real scheduler half, with every decision counted and checked."""

    tally: Counter[str]

    def get_num_new_matched_tokens(
        self, request: EngineRequest, num_computed_tokens: int
    ) -> PrefixMatch:
        match = super().get_num_new_matched_tokens(request, num_computed_tokens)
        self.tally["matches that were pending"] += match.is_pending
        if match.num_tokens and num_computed_tokens:
            self.tally["matches behind tokens of the device"] += 1
        require(
            num_computed_tokens + match.num_tokens < request.num_tokens,
            f"{request.request_id} has {request.num_tokens} tokens, and all of them match",
        )
        return match

    def build_connector_meta(self, plan: StepPlan) -> ConnectorMetadata:
        metadata = super().build_connector_meta(plan)
        self.tally["stores"] += len(metadata.stores)
        self.tally["stores waited for"] += len(metadata.wait_for)
        self.tally["jobs flushed"] += len(metadata.flush)
        for order in metadata.loads:
            self._look_at_load(order.device)
        self._check_loads_are_distinct()
        return metadata

    def _look_at_load(self, device: GPULoadStoreSpec) -> None:
        self.tally["loads"] += 1
        groups: tuple[GroupGeometry, ...] = self._geometry.groups
        for group, size, first in zip(
            groups, device.group_sizes, device.block_indices, strict=True
        ):
            if not size:
                continue
            self.tally["loads that begin inside a chunk"] += bool(first % group.blocks_per_chunk)
            self.tally["loads of a window"] += not group.is_prefix and first > 0
        self.tally["loads of several groups"] += len([n for n in device.group_sizes if n]) > 1

    def _check_loads_are_distinct(self) -> None:
        loading = Counter(
            key
            for job in self._jobs.values()
            if not job.is_store and not job.is_stale
            for key in job.keys
        )
        require(
            not loading or max(loading.values()) == 1, "one block is loaded by two requests at once"
        )

    def update_connector_output(self, outputs: Iterable[WorkerOutput]) -> list[LoadedRequest]:
        outputs = list(outputs)
        for output in outputs:
            for result in output.finished:
                job = self._jobs.get(result.job_id)
                if job is not None and not result.success:
                    self.tally["failed stores" if job.is_store else "failed loads"] += 1
        before = len(self._jobs)
        reported = {result.job_id for output in outputs for result in output.finished}
        loaded = super().update_connector_output(outputs)
        self.tally["jobs reported by some ranks only"] += (
            len(reported & self._jobs.keys()) if before else 0
        )
        return loaded

    def reset_cache(self) -> None:
        self.tally["resets"] += 1
        self.tally["stores under way at a reset"] += sum(j.is_store for j in self._jobs.values())
        self.tally["loads under way at a reset"] += sum(not j.is_store for j in self._jobs.values())
        super().reset_cache()

    def is_moving(self, is_store: bool) -> bool:
        """True while a store, or a load, has been sent to the workers and has not ended."""
        unsent = self._metadata.stores if is_store else self._metadata.loads
        return sum(job.is_store is is_store for job in self._jobs.values()) > len(unsent)

    def check_nothing_is_left(self) -> None:
        """Check that nothing is left. Called after everything has ended."""
        tables: dict[str, Sized] = {
            "jobs": self._jobs,
            "requests": self._states,
            "readers of device blocks": self._readers,
            "blocks being loaded": +self._loading,
        }
        left = {name: len(table) for name, table in tables.items() if table}
        require(not left, f"left in the connector: {left}")
