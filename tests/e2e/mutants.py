"""Planted bugs. Each is patched into the running code, and at least one life has to fail."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest

import kvtier.connector.planning
import kvtier.connector.request_state
import kvtier.connector.scheduler
from kvtier.base import (
    BlockIDsLoadStoreSpec,
    GPULoadStoreSpec,
    OffloadKey,
    make_offload_key,
)
from kvtier.connector.common import (
    ConnectorMetadata,
    LoadedRequest,
    ScheduledRequest,
    StepPlan,
    TransferOrder,
)
from kvtier.connector.events import EventTranslator
from kvtier.connector.planning import (
    DeviceRange,
    GroupGeometry,
    Offer,
    device_range,
    take_offers,
)
from kvtier.connector.request_state import RequestGroupState, RequestOffloadState
from kvtier.connector.scheduler import ConnectorJob, OffloadingConnectorScheduler
from kvtier.connector.worker import OffloadingConnectorWorker
from kvtier.cpu.common import CPULoadStoreSpec
from kvtier.cpu.manager import CPUOffloadingManager
from kvtier.testing import FaultyTier
from kvtier.tiering.base import SecondaryTierManager
from kvtier.tiering.manager import TieringOffloadingManager
from tests.e2e.fixed_lives import SEEDS
from tests.e2e.workload import MAX_TOTAL, Await, Reset, Workload

__all__ = ["MUTANTS", "Mutant"]

Scheduler = OffloadingConnectorScheduler
Plant = Callable[[pytest.MonkeyPatch], None]


@dataclass(frozen=True, slots=True)
class Mutant:
    """A bug, and the lives in which it can appear."""

    name: str
    plant: Plant
    concerns: Callable[[Workload], bool]
    seeds: Iterable[int]


MUTANTS: list[Mutant] = []


def _anyone(workload: Workload) -> bool:
    return True


def _mutant(
    concerns: Callable[[Workload], bool] = _anyone, seeds: Iterable[int] = SEEDS
) -> Callable[[Plant], Plant]:
    def enter(plant: Plant) -> Plant:
        MUTANTS.append(Mutant(plant.__name__, plant, concerns, seeds))
        return plant

    return enter


# --- which lives --------------------------------------------------------------------------------


def _several_blocks_per_chunk(workload: Workload) -> bool:
    return bool(workload.setup.options["blocks_per_chunk"] > 1)


def _two_groups(workload: Workload) -> bool:
    return len(workload.setup.model.groups) == 2


def _equal_groups(workload: Workload) -> bool:
    return workload.setup.engine.block_tokens == (4, 4)


def _late_copies(workload: Workload) -> bool:
    return workload.setup.worker.is_stepwise and workload.setup.worker.max_delay >= 4


def _failing_copies(workload: Workload) -> bool:
    return workload.setup.worker.is_stepwise and workload.setup.worker.failed > 0.2


def _several_ranks(workload: Workload) -> bool:
    return _late_copies(workload) and workload.setup.engine.world_size == 2


def _resets_in_the_midst(workload: Workload) -> bool:
    resets = [action for action, _ in workload.actions if isinstance(action, Reset)]
    return _late_copies(workload) and any(r.during is not Await.NOTHING for r in resets)


def _other_weights(workload: Workload) -> bool:
    actions = [action for action, _ in workload.actions]
    return any(isinstance(action, Reset) and action.brings_weights for action in actions)


def _corrupting_tier(workload: Workload) -> bool:
    setup = workload.setup
    return setup.worker.is_stepwise and any(tier.weather == "lossy" for tier in setup.tiers)


def _scarce_device_blocks(workload: Workload) -> bool:
    engine = workload.setup.engine
    return engine.num_blocks[0] * engine.block_tokens[0] < MAX_TOTAL + 5 * engine.block_tokens[0]


def _windows(workload: Workload) -> bool:
    return any(group.window is not None for group in workload.setup.model.groups)


# --- loads --------------------------------------------------------------------------------------


def _change_loads(
    monkeypatch: pytest.MonkeyPatch, change: Callable[[TransferOrder], TransferOrder]
) -> None:
    real = Scheduler.build_connector_meta

    def build_connector_meta(self: Scheduler, plan: StepPlan) -> ConnectorMetadata:
        metadata = real(self, plan)
        metadata.loads = list(map(change, metadata.loads))
        return metadata

    monkeypatch.setattr(Scheduler, "build_connector_meta", build_connector_meta)


@_mutant()
def two_slots_of_a_load_are_swapped(monkeypatch: pytest.MonkeyPatch) -> None:
    def change(order: TransferOrder) -> TransferOrder:
        assert isinstance(order.offloaded, BlockIDsLoadStoreSpec)
        slots = order.offloaded.block_ids
        if len(slots) > 1:
            slots[[0, 1]] = slots[[1, 0]]
        return order

    _change_loads(monkeypatch, change)


@_mutant()
def two_device_blocks_of_a_load_are_swapped(monkeypatch: pytest.MonkeyPatch) -> None:
    def change(order: TransferOrder) -> TransferOrder:
        blocks = order.device.block_ids
        if order.device.group_sizes[0] > 1:
            blocks[[0, 1]] = blocks[[1, 0]]
        return order

    _change_loads(monkeypatch, change)


@_mutant()
def a_load_begins_one_chunk_too_early(monkeypatch: pytest.MonkeyPatch) -> None:
    def shifted(state: RequestGroupState, start: int, end: int) -> DeviceRange:
        loaded = device_range(state, start, end)
        if not loaded.keys:
            return loaded
        first = state.keys.index(loaded.keys[0])
        if first == 0:
            return loaded
        return loaded._replace(keys=state.keys[first - 1 : first - 1 + len(loaded.keys)])

    monkeypatch.setattr(kvtier.connector.scheduler, "device_range", shifted)


@_mutant(_several_blocks_per_chunk)
def a_load_forgets_that_it_begins_inside_a_chunk(monkeypatch: pytest.MonkeyPatch) -> None:
    def change(order: TransferOrder) -> TransferOrder:
        device = order.device
        begins = [0] * len(device.group_sizes)
        changed = GPULoadStoreSpec(device.block_ids, device.group_sizes, begins)
        return order._replace(device=changed)

    _change_loads(monkeypatch, change)


@_mutant(_two_groups)
def a_group_is_not_loaded(monkeypatch: pytest.MonkeyPatch) -> None:
    def without_windows(state: RequestGroupState, start: int, end: int) -> DeviceRange:
        loaded = device_range(state, start, end)
        if state.geometry.is_prefix:
            return loaded
        return DeviceRange(loaded.first_block, loaded.first_block, [])

    monkeypatch.setattr(kvtier.connector.scheduler, "device_range", without_windows)


@_mutant(_windows)
def a_window_is_loaded_without_its_first_block(monkeypatch: pytest.MonkeyPatch) -> None:
    real = GroupGeometry.first_needed_token

    def first_needed_token(self: GroupGeometry, end: int) -> int:
        first = real(self, end)
        return min(end - 1, first + self.tokens_per_block) if first else first

    monkeypatch.setattr(GroupGeometry, "first_needed_token", first_needed_token)


@_mutant(_failing_copies)
def a_failed_load_is_taken_for_good(monkeypatch: pytest.MonkeyPatch) -> None:
    real = Scheduler._end

    def _end(self: Scheduler, job: ConnectorJob, loaded: list[LoadedRequest]) -> None:
        job.has_failed = job.has_failed and job.is_store
        real(self, job, loaded)

    monkeypatch.setattr(Scheduler, "_end", _end)


@_mutant(_failing_copies)
def a_failed_load_is_never_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    real = Scheduler._end

    def _end(self: Scheduler, job: ConnectorJob, loaded: list[LoadedRequest]) -> None:
        if job.is_store or not job.has_failed:
            real(self, job, loaded)

    monkeypatch.setattr(Scheduler, "_end", _end)


@_mutant()
def a_load_is_never_completed(monkeypatch: pytest.MonkeyPatch) -> None:
    def complete_load(*_: object) -> None:
        """The blocks stay pinned."""

    monkeypatch.setattr(CPUOffloadingManager, "complete_load", complete_load)


@_mutant(_late_copies)
def one_prefix_is_loaded_by_several_requests(monkeypatch: pytest.MonkeyPatch) -> None:
    def has_none(*_: object) -> bool:
        return False

    monkeypatch.setattr(kvtier.connector.scheduler, "_has_one_of", has_none)


@_mutant(_several_ranks)
def a_job_is_done_when_one_rank_has_reported_it(monkeypatch: pytest.MonkeyPatch) -> None:
    real = Scheduler.__init__

    def with_one_rank(self: Scheduler, spec: Any) -> None:
        real(self, spec)
        self._world_size = 1

    monkeypatch.setattr(Scheduler, "__init__", with_one_rank)


# --- stores -------------------------------------------------------------------------------------


@_mutant(_late_copies)
def fences_are_skipped(monkeypatch: pytest.MonkeyPatch) -> None:
    def fence(self: Scheduler, plan: StepPlan) -> None:
        """Wait for no store."""

    monkeypatch.setattr(Scheduler, "_fence", fence)


@_mutant(_late_copies)
def workers_do_not_wait_at_fences(monkeypatch: pytest.MonkeyPatch) -> None:
    real = OffloadingConnectorWorker.start_kv_transfers

    def start_kv_transfers(self: OffloadingConnectorWorker, metadata: ConnectorMetadata) -> None:
        real(self, ConnectorMetadata(metadata.flush, metadata.stores, [], metadata.loads))

    monkeypatch.setattr(OffloadingConnectorWorker, "start_kv_transfers", start_kv_transfers)


@_mutant(_scarce_device_blocks)
def stores_are_sent_two_steps_late(monkeypatch: pytest.MonkeyPatch) -> None:
    real = Scheduler.build_connector_meta
    held: deque[list[TransferOrder]] = deque([[], []])

    def build_connector_meta(self: Scheduler, plan: StepPlan) -> ConnectorMetadata:
        metadata = real(self, plan)
        held.append(metadata.stores)
        metadata.stores = held.popleft()
        return metadata

    monkeypatch.setattr(Scheduler, "build_connector_meta", build_connector_meta)


@_mutant()
def blocks_are_stored_before_they_are_computed(monkeypatch: pytest.MonkeyPatch) -> None:
    def too_early(
        state: RequestOffloadState, scheduled: ScheduledRequest, limit: int
    ) -> tuple[list[Offer], list[int]]:
        tokens = max(group.geometry.tokens_per_chunk for group in state.group_states)
        scheduled.num_computed_tokens += tokens
        try:
            return take_offers(state, scheduled, limit)
        finally:
            scheduled.num_computed_tokens -= tokens

    monkeypatch.setattr(kvtier.connector.scheduler, "take_offers", too_early)


@_mutant(_several_blocks_per_chunk)
def the_blocks_of_a_chunk_are_stored_in_reverse(monkeypatch: pytest.MonkeyPatch) -> None:
    def reversed_offers(
        state: RequestOffloadState, scheduled: ScheduledRequest, limit: int
    ) -> tuple[list[Offer], list[int]]:
        offers, num_offered = take_offers(state, scheduled, limit)
        return [offer._replace(blocks=offer.blocks[::-1]) for offer in offers], num_offered

    monkeypatch.setattr(kvtier.connector.scheduler, "take_offers", reversed_offers)


@_mutant(_two_groups)
def slots_of_a_store_are_in_another_order(monkeypatch: pytest.MonkeyPatch) -> None:
    class Sorted(CPULoadStoreSpec):
        def __init__(self, block_ids: Sequence[int]) -> None:
            super().__init__(np.sort(np.asarray(block_ids)))

    monkeypatch.setattr(kvtier.connector.planning, "CPULoadStoreSpec", Sorted)


@_mutant(_failing_copies)
def a_failed_store_is_taken_for_good(monkeypatch: pytest.MonkeyPatch) -> None:
    real = Scheduler._end

    def _end(self: Scheduler, job: ConnectorJob, loaded: list[LoadedRequest]) -> None:
        job.has_failed = job.has_failed and not job.is_store
        real(self, job, loaded)

    monkeypatch.setattr(Scheduler, "_end", _end)


# --- resets -------------------------------------------------------------------------------------


@_mutant(_resets_in_the_midst)
def a_reset_does_not_make_jobs_stale(monkeypatch: pytest.MonkeyPatch) -> None:
    real = Scheduler._end

    def _end(self: Scheduler, job: ConnectorJob, loaded: list[LoadedRequest]) -> None:
        job.is_stale = False
        real(self, job, loaded)

    monkeypatch.setattr(Scheduler, "_end", _end)


# Fails one life in 40: mostly a fence comes first, or the slot is not reused in time.
@_mutant(_resets_in_the_midst, seeds=(146, 188, 255, 461))
def a_reset_does_not_flush(monkeypatch: pytest.MonkeyPatch) -> None:
    real = OffloadingConnectorWorker.start_kv_transfers

    def start_kv_transfers(self: OffloadingConnectorWorker, metadata: ConnectorMetadata) -> None:
        real(self, ConnectorMetadata([], metadata.stores, metadata.wait_for, metadata.loads))

    monkeypatch.setattr(OffloadingConnectorWorker, "start_kv_transfers", start_kv_transfers)


@_mutant(_other_weights)
def a_reset_leaves_what_is_offloaded(monkeypatch: pytest.MonkeyPatch) -> None:
    def reset_cache(self: object) -> None:
        """Nothing is forgotten."""

    monkeypatch.setattr(TieringOffloadingManager, "reset_cache", reset_cache)
    monkeypatch.setattr(CPUOffloadingManager, "reset_cache", reset_cache)


# --- tiers and events ---------------------------------------------------------------------------


@_mutant(_corrupting_tier)
def seals_are_not_verified(monkeypatch: pytest.MonkeyPatch) -> None:
    def verify_block(*_: object) -> bool:
        return True

    for tier in (SecondaryTierManager, FaultyTier):
        monkeypatch.setattr(tier, "verify_block", verify_block)


@_mutant(_equal_groups)
def blocks_of_two_groups_have_one_key(monkeypatch: pytest.MonkeyPatch) -> None:
    def without_group(block_hash: bytes, group_idx: int) -> OffloadKey:
        return make_offload_key(block_hash, 0)

    monkeypatch.setattr(kvtier.connector.request_state, "make_offload_key", without_group)


@_mutant()
def evictions_are_not_told(monkeypatch: pytest.MonkeyPatch) -> None:
    real = EventTranslator.translate

    def translate(self: EventTranslator, events: Iterable[Any]) -> list[Any]:
        return real(self, [event for event in events if not event.removed])

    monkeypatch.setattr(EventTranslator, "translate", translate)


@_mutant()
def a_request_is_never_forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    def forget(self: Scheduler, state: RequestOffloadState) -> None:
        """Forget nothing."""

    monkeypatch.setattr(Scheduler, "_forget_if_done", forget)
