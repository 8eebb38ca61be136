"""From a configuration to blocks that leave the device and come back."""

from __future__ import annotations

import mmap
import uuid
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from kvtier.base import GPULoadStoreSpec, LookupResult, OffloadKey, ReqContext, make_offload_key
from kvtier.config import (
    ConfigError,
    OffloadingCacheConfig,
    OffloadingConfig,
    OffloadingGroupConfig,
    OffloadingModelConfig,
    OffloadingParallelConfig,
)
from kvtier.cpu.host_memory import NotEnoughMemory
from kvtier.cpu.spec import CPUOffloadingSpec
from kvtier.factory import OffloadingSpecFactory
from tests.cpu.caches import Bytes, Layout, finish

SHM = Path("/dev/shm")
LAYOUT = Layout(pages=(96, 64), groups=({0: 96, 1: 64},), blocks_per_chunk=2, num_device_blocks=16)


def make_config(
    engine_id: str | None = None, rank: int = 0, world_size: int = 1, **changes: Any
) -> OffloadingConfig:
    extra_config = {"cpu_bytes_to_use": 8 * mmap.PAGESIZE, "blocks_per_chunk": 2}
    return OffloadingConfig(
        groups=(OffloadingGroupConfig(tokens_per_block=16, layer_names=("a", "b")),),
        worker_kv_bytes_per_block=sum(LAYOUT.pages),
        engine_id=engine_id or uuid.uuid4().hex,
        model=OffloadingModelConfig(name="model", dtype="bfloat16"),
        cache=OffloadingCacheConfig(tokens_per_hash=16),
        parallel=OffloadingParallelConfig(rank=rank, world_size=world_size, tp_size=world_size),
        extra_config=extra_config | changes.pop("extra_config", {}),
        **changes,
    )


def make_keys(count: int) -> list[OffloadKey]:
    return [make_offload_key(bytes([number]) * 32, 0) for number in range(count)]


def region_files(config: OffloadingConfig) -> list[Path]:
    """The files of this engine, which other engines on the machine do not change."""
    return [path for path in SHM.glob("kvtier-*") if config.engine_id in header_of(path)]


def header_of(path: Path) -> str:
    try:
        with path.open("rb") as file:
            return file.read(mmap.PAGESIZE).decode("ascii", "replace")
    except FileNotFoundError:
        return ""


def test_blocks_of_all_ranks_come_back(caplog: pytest.LogCaptureFixture) -> None:
    engine_id = uuid.uuid4().hex
    scheduler = CPUOffloadingSpec(make_config(engine_id, world_size=2))
    ranks = [CPUOffloadingSpec(make_config(engine_id, rank, 2)) for rank in range(2)]
    caches: list[list[Bytes]] = [LAYOUT.new_tensors(seed=rank) for rank in range(2)]
    stored = [[tensor[:4].copy() for tensor in tensors] for tensors in caches]
    manager = scheduler.get_manager()
    workers = [
        spec.get_worker(LAYOUT.canonical(tensors))
        for spec, tensors in zip(ranks, caches, strict=True)
    ]

    request = ReqContext("request")
    manager.on_new_request(request)
    keys = make_keys(2)
    assert [manager.lookup(key, request) for key in keys] == [LookupResult.MISS] * 2
    output = manager.prepare_store(keys, request)
    assert output is not None
    assert output.keys_to_store == keys
    source = GPULoadStoreSpec([0, 1, 2, 3], [4], [0])
    for worker in workers:
        assert worker.submit_store(1, source, output.store_spec)
        assert finish(worker, 1) == {1: True}
    manager.complete_store(keys, request)

    assert [manager.lookup(key, request) for key in keys] == [LookupResult.HIT] * 2
    target = GPULoadStoreSpec([9, 7, 12], [3], [1])  # from the second block of the first slot on
    load_spec = manager.prepare_load(keys, request)
    for worker in workers:
        assert worker.submit_load(2, load_spec, target)
        assert finish(worker, 2) == {2: True}
    manager.complete_load(keys, request)
    for tensors, originals in zip(caches, stored, strict=True):
        for tensor, original in zip(tensors, originals, strict=True):
            np.testing.assert_array_equal(tensor[[9, 7, 12]], original[1:])

    manager.on_request_finished(request)
    for worker in workers:
        worker.shutdown()
    manager.shutdown()
    assert caplog.messages == []


def test_each_half_is_made_once_and_only_when_asked_for() -> None:
    spec = CPUOffloadingSpec(make_config())
    assert spec.get_manager() is spec.get_manager()
    assert region_files(spec.config) == []  # the scheduler uses slot numbers
    caches = LAYOUT.canonical(LAYOUT.new_tensors(1))
    worker = spec.get_worker(caches)
    assert spec.get_worker(caches) is worker
    assert len(region_files(spec.config)) == 1
    worker.shutdown()
    assert region_files(spec.config) == []


def test_the_region_is_what_the_user_paid_for() -> None:
    config = make_config(extra_config={"cpu_bytes_to_use": 5 * mmap.PAGESIZE + 1})
    worker = CPUOffloadingSpec(config).get_worker(LAYOUT.canonical(LAYOUT.new_tensors(1)))
    (path,) = region_files(config)
    rows, header, notices = 5 * mmap.PAGESIZE, mmap.PAGESIZE, mmap.PAGESIZE
    assert path.stat().st_size == rows + header + notices
    assert CPUOffloadingSpec(config).get_manager().num_blocks == 5
    worker.shutdown()


def test_the_managers_settings_are_the_users() -> None:
    options = {"store_threshold": 2, "eviction_policy": "arc", "max_tracker_size": 10}
    config = make_config(enable_kv_cache_events=True, extra_config=options)
    manager = CPUOffloadingSpec(config).get_manager()
    keys = make_keys(1)
    stored = []
    for name in ("first", "second"):
        request = ReqContext(name)
        manager.on_new_request(request)
        manager.lookup(keys[0], request)
        output = manager.prepare_store(keys, request)
        assert output is not None
        stored.append(len(output.keys_to_store))
        manager.complete_store(output.keys_to_store, request)
        manager.on_request_finished(request)
    assert stored == [0, 1]  # the threshold
    assert [event.keys for event in manager.take_events()] == [keys]


@pytest.mark.parametrize("rank", [0, 1])
def test_an_unknown_policy_is_refused_when_the_spec_is_made(rank: int) -> None:
    config = make_config(rank=rank, world_size=2, extra_config={"eviction_policy": "luck"})
    with pytest.raises(ConfigError, match=r'^eviction_policy: got "luck"'):
        CPUOffloadingSpec(config)


def test_every_figure_is_defined() -> None:
    spec = CPUOffloadingSpec(make_config())
    definitions = CPUOffloadingSpec.build_metric_definitions(spec.config.extra_config)
    stats = spec.get_manager().get_stats()
    assert stats is not None
    reported = {*stats.counters, *stats.gauges, *stats.histograms}
    assert reported
    assert reported <= definitions.keys()


def test_it_is_found_by_its_name() -> None:
    config = make_config(extra_config={"spec_name": "CPUOffloadingSpec"})
    assert type(OffloadingSpecFactory.create_spec(config)) is CPUOffloadingSpec


def test_caches_on_a_device_are_refused_before_anything_is_made() -> None:
    torch = pytest.importorskip("torch", reason="needs torch, which the engine brings")
    tensors = [torch.empty((4, page), dtype=torch.int8, device="meta") for page in LAYOUT.pages]
    # Were a region made first, this one would be refused for its size.
    spec = CPUOffloadingSpec(make_config(extra_config={"cpu_bytes_to_use": "1000TiB"}))
    with pytest.raises(TypeError, match="takes numpy arrays and torch tensors on the device 'cpu'"):
        spec.get_worker(LAYOUT.canonical(tensors))


def test_a_start_that_fails_leaves_nothing(caplog: pytest.LogCaptureFixture) -> None:
    larger = Layout(pages=(96, 65), groups=({0: 96, 1: 65},))
    spec = CPUOffloadingSpec(make_config())
    with pytest.raises(ValueError, match="worker_kv_bytes_per_block") as kept:
        spec.get_worker(larger.canonical(larger.new_tensors(1)))
    assert region_files(spec.config) == []
    del kept  # not even its traceback had a hold on anything
    # The spec is as good as new.
    spec.get_worker(LAYOUT.canonical(LAYOUT.new_tensors(1))).shutdown()
    greedy = CPUOffloadingSpec(make_config(extra_config={"cpu_bytes_to_use": "1000TiB"}))
    with pytest.raises(NotEnoughMemory, match="lower cpu_bytes_to_use"):
        greedy.get_worker(LAYOUT.canonical(LAYOUT.new_tensors(1)))
    assert region_files(greedy.config) == []
    assert caplog.messages == []
