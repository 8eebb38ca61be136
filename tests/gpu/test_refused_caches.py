"""Caches and regions that do not fit each other are refused before anything is copied."""

from __future__ import annotations

import threading
from pathlib import Path

import pytest
import torch

from kvtier.base import CanonicalKVCacheRef, CanonicalKVCaches, CanonicalKVCacheTensor
from kvtier.cpu.shared_offload_region import SharedOffloadRegion
from tests.gpu.cache_layout import plain_layout
from tests.gpu.checked_worker import finish, row_bytes
from tests.gpu.jobs import load, store
from tests.gpu.places import Place, SimulatedPlace

LAYOUT = plain_layout(64, 48, num_blocks=8, blocks_per_chunk=2)


@pytest.mark.parametrize(
    ("rank", "missing_bytes", "complaint"),
    [
        (0, 1, r"need 224 bytes per slot .*cpu_page_size=223"),
        (None, 0, "opened .*for the scheduler, which has no cell"),
    ],
)
def test_a_region_without_room_for_the_caches_is_refused(
    rank: int | None, missing_bytes: int, complaint: str, any_place: Place, shm: Path
) -> None:
    """One more byte would belong to another rank."""
    threads_before = set(threading.enumerate())
    cell_bytes = LAYOUT.cell_bytes - missing_bytes
    region = SharedOffloadRegion(
        "engine", 4, rank, row_bytes(LAYOUT), cell_bytes, directory=str(shm)
    )
    memory = [any_place.upload(allocation) for allocation in LAYOUT.new_memory(1)]
    try:
        with pytest.raises((ValueError, RuntimeError), match=complaint):
            any_place.open_worker(LAYOUT.canonical(memory), region, 2)
        if isinstance(any_place, SimulatedPlace):
            assert any_place.simulated.pinned == {}
        assert set(threading.enumerate()) == threads_before
    finally:
        region.cleanup()
    assert list(shm.iterdir()) == []


def test_a_block_that_only_some_tensors_have_is_refused(any_place: Place, shm: Path) -> None:
    """Other memory follows the shorter tensor."""
    tensors = [
        any_place.upload(plain_layout(64, num_blocks=count).new_memory(1)[0]).view(count, 64)
        for count in (8, 6)
    ]
    before = [tensor.clone() for tensor in tensors]
    caches = CanonicalKVCaches(
        [CanonicalKVCacheTensor(tensor, 64) for tensor in tensors],
        [[CanonicalKVCacheRef(0, 64), CanonicalKVCacheRef(1, 64)]],
    )
    region = SharedOffloadRegion("engine", 4, 0, 4096, 128, directory=str(shm))
    worker = any_place.open_worker(caches, region, 1)
    try:
        for job_id, job in enumerate((store([5], [0]), store([6], [1]), load([0], [6]))):
            assert job.submit(worker, job_id)
        results = finish(worker, range(3))
        assert [result.success for result in results] == [True, False, False]
        assert load([0], [0]).submit(worker, 3)
        finish(worker, [3])
        for tensor, old in zip(tensors, before, strict=True):
            assert torch.equal(tensor[0], old[5])
            assert torch.equal(tensor[1:], old[1:])
    finally:
        worker.shutdown()


def test_layers_that_share_a_tensor_lose_none_of_its_bytes(place: Place, shm: Path) -> None:
    """The layer with the largest pages counts, in any position."""
    tensor = place.upload(plain_layout(64, num_blocks=8).new_memory(1)[0]).view(8, 64)
    stored = tensor[3].clone()
    caches = CanonicalKVCaches(
        [CanonicalKVCacheTensor(tensor, 64)],
        [[CanonicalKVCacheRef(0, data_bytes) for data_bytes in (32, 64, 16)]],
    )
    region = SharedOffloadRegion("engine", 4, 0, 4096, 64, directory=str(shm))
    worker = place.open_worker(caches, region, 1)
    try:
        assert store([3], [2]).submit(worker, 1)
        (result,) = finish(worker, [1])
        assert result.transfer_size == 64
        assert load([2], [7]).submit(worker, 2)
        finish(worker, [2])
        assert torch.equal(tensor[7], stored)
    finally:
        worker.shutdown()
