"""Behaviour and cost of the adapters, with vLLM's own objects and kvtier's own tier."""

from __future__ import annotations

import logging
import pickle
import tempfile
import timeit
from collections.abc import Collection, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import fields, replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from vllm.config import ParallelConfig
from vllm.v1.kv_offload.base import (
    CanonicalKVCacheRef,
    CanonicalKVCaches,
    CanonicalKVCacheTensor,
    GPULoadStoreSpec,
    ReqContext,
    make_offload_key,
)
from vllm.v1.kv_offload.config import (
    OffloadingCacheConfig,
    OffloadingConfig,
    OffloadingGroupConfig,
    OffloadingModelConfig,
    OffloadingParallelConfig,
)

import kvtier
from kvtier.base import LoadStoreSpec, OffloadingWorker, TransferResult
from kvtier.integrations.vllm import KVTierOffloadingSpec, vllm_api
from kvtier.integrations.vllm.manager import ManagerAdapter
from kvtier.integrations.vllm.worker import TransferFailedError, WorkerAdapter
from kvtier.tiering.manager import TieringOffloadingManager

_PAGE = 4096
_DEVICE_BLOCKS = 8
_KEYS = 512


def known_to(cls: Any, **values: Any) -> Any:
    """An object of one of vLLM's data classes; fields that this release lacks are left out."""
    names = {entry.name for entry in fields(cls)}
    return cls(**{name: value for name, value in values.items() if name in names})


def vllm_config(**user_keys: Any) -> OffloadingConfig:
    """The configuration that vLLM gives a spec for a model of one layer."""
    group = known_to(OffloadingGroupConfig, tokens_per_block=32, layer_names=("layer",), group_id=0)
    parallel = known_to(
        OffloadingParallelConfig,
        rank=0,
        world_size=1,
        tp_size=1,
        pp_size=1,
        pcp_size=1,
        dcp_size=1,
        data_parallel_index=0,
        data_parallel_size=1,
        data_parallel_rank_local=None,
        is_parallelism_agnostic=True,
    )
    config: OffloadingConfig = known_to(
        OffloadingConfig,
        groups=(group,),
        worker_kv_bytes_per_block=_PAGE,
        enable_kv_cache_events=True,
        extra_config={"cpu_bytes_to_use": 1024 * _PAGE} | user_keys,
        engine_id="adapter-probe",
        model=OffloadingModelConfig(name="model", dtype="float32"),
        cache=known_to(OffloadingCacheConfig, tokens_per_hash=32, blocks_per_chunk=1),
        parallel=parallel,
    )
    return config


@contextmanager
def started(config: OffloadingConfig) -> Iterator[tuple[ManagerAdapter, WorkerAdapter]]:
    """Worker and manager, in the order in which vLLM makes them."""
    cache = torch.zeros((_DEVICE_BLOCKS, _PAGE), dtype=torch.int8)
    caches = CanonicalKVCaches(
        [CanonicalKVCacheTensor(cache, _PAGE)], [[CanonicalKVCacheRef(0, _PAGE)]]
    )
    with ExitStack() as at_the_end:
        worker = KVTierOffloadingSpec(config).get_worker(caches)
        at_the_end.callback(worker.shutdown)
        manager = KVTierOffloadingSpec(config).get_manager()
        at_the_end.callback(manager.shutdown)
        yield manager, worker


def is_moving_blocks(adapter: ManagerAdapter) -> bool:
    """True while blocks are on their way between host memory and tiers."""
    manager = adapter.inner
    return isinstance(manager, TieringOffloadingManager) and manager.is_moving_blocks()


def lookup_cost() -> dict[str, float]:
    """Nanoseconds per lookup: in total, and the part that the adapter adds."""
    with started(vllm_config()) as (adapter, _):
        context = ReqContext("request")
        adapter.on_new_request(context)
        keys = [make_offload_key(number.to_bytes(32, "big"), 0) for number in range(2 * _KEYS)]
        output = adapter.prepare_store(keys[:_KEYS], context)
        assert output is not None
        adapter.complete_store(set(output.keys_to_store), context)
        inner, inner_context = adapter.inner, kvtier.ReqContext("request")

        def through_adapter() -> None:
            for key in keys:
                adapter.lookup(key, context)

        def direct() -> None:
            for key in keys:
                inner.lookup(key, inner_context)

        whole, without = (
            min(timeit.repeat(call, number=20, repeat=15)) / 20 / len(keys) * 1e9
            for call in (through_adapter, direct)
        )
    return {"lookup_ns": whole, "adapter_ns": whole - without}


def mapped_answers() -> dict[str, Any]:
    """The answers of the adapter over the life of two blocks, in vLLM's types."""
    with started(vllm_config()) as (adapter, _):
        context = ReqContext("request")
        policy = adapter.on_new_request(context).policy
        head, tail = (make_offload_key(name * 32, 0) for name in (b"h", b"t"))
        if not vllm_api.REPORTS_USE:
            # As vLLM records them; the order of arrival is not the order in the prompt.
            context.set_offload_key_position(tail, 64)
            context.set_offload_key_position(head, 32)
        answers = [adapter.lookup(head, context)]
        output = adapter.prepare_store([head, tail], context)
        answers.append(adapter.lookup(head, context))
        adapter.complete_store({tail, head}, context)
        answers.append(adapter.lookup(head, context))
        spec = pickle.loads(pickle.dumps(adapter.prepare_load([tail, head], context)))
        adapter.complete_load({head, tail}, context)
        stats = adapter.get_stats()
        assert output is not None
        assert stats is not None
        return {
            "policy": policy is vllm_api.BLOCK_LEVEL_POLICY,
            "answers_are_vllms": all(isinstance(a, vllm_api.LookupResult) for a in answers),
            "answers": [answer.name for answer in answers],
            "output_is_vllms": isinstance(output, vllm_api.PrepareStoreOutput),
            "load_slots": spec.block_ids.tolist(),
            "store_slots": output.store_spec.block_ids.tolist(),
            "events": [
                [type(event).__module__, str(event.medium), event.removed, len(event.keys)]
                for event in adapter.take_events()
            ],
            "medium_of_host_memory": str(vllm_api.MEDIA[kvtier.Medium.CPU]),
            "load_source": None
            if vllm_api.CacheHitSource is None
            else adapter.get_load_source(head, context).value,
            "prompt_order": None
            if vllm_api.REPORTS_USE
            else vllm_api.keys_in_prompt_order(context) == [head, tail],
            "undeclared_figures": sorted(
                set(stats.data["data"]) - set(KVTierOffloadingSpec.build_metric_definitions({}))
            ),
        }


class _Clumsy(OffloadingWorker):
    """Fails the given number of transfers, then none."""

    def __init__(self, worker: OffloadingWorker, failures: int) -> None:
        self._worker = worker
        self._failures = failures
        self._failed: list[int] = []
        self.attempts = 0

    def _fails(self, job_id: int) -> bool:
        self.attempts += 1
        if self._failures == 0:
            return False
        self._failures -= 1
        self._failed.append(job_id)
        return True

    def submit_store(self, job_id: int, src_spec: Any, dst_spec: LoadStoreSpec) -> bool:
        return self._fails(job_id) or self._worker.submit_store(job_id, src_spec, dst_spec)

    def submit_load(self, job_id: int, src_spec: LoadStoreSpec, dst_spec: Any) -> bool:
        return self._fails(job_id) or self._worker.submit_load(job_id, src_spec, dst_spec)

    def get_finished(self) -> list[TransferResult]:
        failed, self._failed = self._failed, []
        return [TransferResult(job_id, success=False) for job_id in failed] + list(
            self._worker.get_finished()
        )

    def wait(self, job_ids: Collection[int]) -> None:
        self._worker.wait(job_ids)

    def shutdown(self) -> None:
        self._worker.shutdown()


def failed_store() -> dict[str, Any]:
    """One of two stores fails on a rank."""
    with started(vllm_config()) as (manager, worker):
        worker._worker = _Clumsy(worker.inner, failures=1)
        context = ReqContext("request")
        manager.on_new_request(context)
        keys = [make_offload_key(name * 32, 0) for name in (b"a", b"b")]
        reported = []
        for job_id, key in enumerate(keys):
            output = manager.prepare_store([key], context)
            assert output is not None
            device = GPULoadStoreSpec([1], group_sizes=[1], block_indices=[0])
            worker.submit_store(job_id, device, output.store_spec)
            worker.wait({job_id})
            reported += [result.success for result in worker.get_finished()]
            manager.complete_store({key}, context)
        stats = manager.get_stats()
        assert stats is not None
        return {
            "reported": reported,
            "lookups": [manager.lookup(key, context).name for key in keys],
            "failed_stores": stats.reduce()["vllm:kvtier_cpu_failed_stores"],
        }


def failed_load(failures: int) -> dict[str, Any]:
    """A load with the plain spec that fails `failures` times."""
    with started(vllm_config()) as (manager, worker):
        context = ReqContext("request")
        manager.on_new_request(context)
        key = make_offload_key(b"k" * 32, 0)
        output = manager.prepare_store([key], context)
        assert output is not None
        device = GPULoadStoreSpec([1], group_sizes=[1], block_indices=[0])
        worker.submit_store(0, device, output.store_spec)
        worker.wait({0})
        worker.get_finished()
        manager.complete_store({key}, context)
        worker._worker = clumsy = _Clumsy(worker.inner, failures)
        source = manager.prepare_load([key], context)
        assert isinstance(source, LoadStoreSpec)
        worker.submit_load(1, source, device)
        found: dict[str, Any] = {"raised": None, "reported": []}
        try:
            while not found["reported"]:
                found["reported"] = [result.job_id for result in worker.get_finished()]
        except TransferFailedError as error:
            found["raised"] = str(error)
        manager.complete_load({key}, context)
        return found | {"attempts": clumsy.attempts}


def refused_configuration() -> str:
    """The error for a tier that does not exist."""
    config = vllm_config(secondary_tiers=[{"type": "exampel"}], spec_name="KVTierOffloadingSpec")
    try:
        with started(config):
            return ""
    except kvtier.ConfigError as error:
        return str(error)


def disk_without_namespace() -> str:
    """The error for a tier that outlives the process, with unknown weights."""
    with tempfile.TemporaryDirectory() as folder:
        tier = {"type": "disk", "path": f"{folder}/kv.slab", "max_bytes": "1MiB"}
        try:
            with started(vllm_config(secondary_tiers=[tier])):
                return ""
        except kvtier.ConfigError as error:
            assert list(Path(folder).iterdir()) == []
            return str(error)


def scheduler_without_ranks() -> str:
    """The error if no rank shares the scheduler's memory."""
    try:
        KVTierOffloadingSpec(vllm_config()).get_manager()
    except kvtier.ConfigError as error:
        return str(error)
    return ""


def replica_config(parallel: ParallelConfig, engine_id: str, **user_keys: Any) -> OffloadingConfig:
    """The configuration of a spec in an engine with vLLM's own configuration of replicas."""
    config = vllm_config(**user_keys)
    told = {
        entry.name: getattr(parallel, entry.name)
        for entry in fields(config.parallel)
        if entry.name.startswith("data_parallel")
    }
    return replace(config, parallel=replace(config.parallel, **told), engine_id=engine_id)


def _make_independent(parallel: ParallelConfig) -> None:
    """Change the configuration of a replica of a dense model as vLLM does."""
    if hasattr(parallel, "reconfigure_for_independent_dp_rank"):
        parallel.reconfigure_for_independent_dp_rank()
    else:  # before 0.28, in `run_engine_core` itself
        parallel.data_parallel_size = 1
        parallel.data_parallel_size_local = 1
        parallel.data_parallel_rank = 0


def files_of_replicas() -> dict[str, list[str]]:
    """The files of two replicas that run at the same time and are given the same path."""
    found = {}
    for kind in ("dense", "experts"):
        with tempfile.TemporaryDirectory() as folder, ExitStack() as engines:
            tier = {"type": "disk", "path": f"{folder}/kv.slab", "max_bytes": "1MiB"}
            user_keys = {"secondary_tiers": [tier], "cache_namespace": "these weights"}
            for rank in range(2):
                # As vLLM's `run_engine_core` does it.
                parallel = ParallelConfig(data_parallel_size=2, data_parallel_rank=rank)
                parallel.data_parallel_rank_local = rank
                parallel.data_parallel_index = rank
                if kind == "dense":
                    _make_independent(parallel)
                config = replica_config(parallel, f"{kind}-engine_dp{rank}", **user_keys)
                engines.enter_context(started(config))
            found[kind] = sorted(path.name for path in Path(folder).iterdir())
    return found


def file_of_an_only_engine() -> list[str]:
    """The file of an engine without replicas."""
    with tempfile.TemporaryDirectory() as folder:
        tier = {"type": "disk", "path": f"{folder}/kv.slab", "max_bytes": "1MiB"}
        config = replica_config(
            ParallelConfig(), "engine", secondary_tiers=[tier], cache_namespace="these weights"
        )
        with started(config):
            return [path.name for path in Path(folder).iterdir()]


def version_warnings() -> list[str]:
    """The warnings of two engines with a release of vLLM that kvtier is not tested with."""
    lines: list[str] = []

    class Lines(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            lines.append(record.getMessage())

    handler = Lines()
    vllm_api.logger.addHandler(handler)
    # Independent of vLLM's own level in these tests.
    vllm_api.logger.setLevel(logging.WARNING)
    try:
        with patch("vllm.__version__", "0.1.2"):
            for _ in range(2):
                KVTierOffloadingSpec(vllm_config())
    finally:
        vllm_api.logger.setLevel(logging.NOTSET)
        vllm_api.logger.removeHandler(handler)
    return lines
