"""What the adapters do and cost, tried with vLLM's own objects and kvtier's own tier."""

from __future__ import annotations

import logging
import pickle
import tempfile
import timeit
from dataclasses import replace
from pathlib import Path
from typing import Any

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
from kvtier.cpu.common import CPULoadStoreSpec
from kvtier.integrations.vllm import KVTierOffloadingSpec, vllm_api
from kvtier.integrations.vllm.worker import TransferFailedError

_PAGE = 4096
_DEVICE_BLOCKS = 8
_KEYS = 512


def vllm_config(**user_keys: Any) -> OffloadingConfig:
    """What vLLM would hand to a spec for a model of one layer."""
    return OffloadingConfig(
        groups=(OffloadingGroupConfig(tokens_per_block=32, layer_names=("layer",), group_id=0),),
        worker_kv_bytes_per_block=_PAGE,
        enable_kv_cache_events=True,
        extra_config={"cpu_bytes_to_use": 1024 * _PAGE} | user_keys,
        engine_id="adapter-probe",
        model=OffloadingModelConfig(name="model", dtype="float32"),
        cache=OffloadingCacheConfig(tokens_per_hash=32, blocks_per_chunk=1),
        parallel=OffloadingParallelConfig(
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
        ),
    )


def lookup_cost() -> dict[str, float]:
    """Nanoseconds per lookup: the whole, and what of it the adapter adds."""
    adapter = KVTierOffloadingSpec(vllm_config()).get_manager()
    context = ReqContext("request")
    adapter.on_new_request(context)
    keys = [make_offload_key(number.to_bytes(32, "big"), 0) for number in range(2 * _KEYS)]
    output = adapter.prepare_store(keys[:_KEYS], context)
    assert output is not None
    adapter.complete_store(set(output.keys_to_store), context)
    inner, inner_context = adapter.inner, context.get_state(kvtier.ReqContext)

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
    """One block's life through the adapter, in vLLM's terms."""
    adapter = KVTierOffloadingSpec(vllm_config()).get_manager()
    context = ReqContext("request")
    policy = adapter.on_new_request(context).policy
    head, tail = (make_offload_key(name * 32, 0) for name in (b"h", b"t"))
    # As vLLM notes them; the order of arrival is not the order in the prompt.
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
        "policy": policy.name,
        "answers_are_vllms": all(isinstance(a, vllm_api.LookupResult) for a in answers),
        "answers": [answer.name for answer in answers],
        "output_is_vllms": isinstance(output, vllm_api.PrepareStoreOutput),
        "load_slots": spec.block_ids.tolist(),
        "store_slots": output.store_spec.block_ids.tolist(),
        "events": [
            [type(event).__module__, event.medium.name, event.removed, len(event.keys)]
            for event in adapter.take_events()
        ],
        "load_source": adapter.get_load_source(head, context).value,
        "prompt_order": vllm_api.keys_in_prompt_order(context) == [head, tail],
        "undeclared_figures": sorted(
            set(stats.reduce()) - set(KVTierOffloadingSpec.build_metric_definitions({}))
        ),
    }


def failed_transfers() -> dict[str, str]:
    """What is raised when host memory is asked for a block that is not there."""
    adapter = KVTierOffloadingSpec(vllm_config()).get_worker(
        CanonicalKVCaches(
            [CanonicalKVCacheTensor(torch.zeros((_DEVICE_BLOCKS, _PAGE), dtype=torch.int8), _PAGE)],
            [[CanonicalKVCacheRef(0, _PAGE)]],
        )
    )
    device = GPULoadStoreSpec([1], group_sizes=[1], block_indices=[0])
    nowhere = CPULoadStoreSpec([-1])
    raised = {}
    try:
        for job_id, kind in enumerate(("store", "load")):
            try:
                if kind == "store":
                    adapter.submit_store(job_id, device, nowhere)
                else:
                    adapter.submit_load(job_id, nowhere, device)
                adapter.wait({job_id})
                adapter.get_finished()
            except TransferFailedError as error:
                raised[kind] = str(error)
    finally:
        adapter.shutdown()
    return raised


def refused_configuration() -> str:
    """What is said to a user who asks for a tier that does not exist."""
    try:
        KVTierOffloadingSpec(
            vllm_config(secondary_tiers=[{"type": "exampel"}], spec_name="KVTierOffloadingSpec")
        ).get_manager()
    except kvtier.ConfigError as error:
        return str(error)
    return ""


def disk_without_namespace() -> str:
    """What is said to a user whose blocks would outlive the process, of weights nobody knows."""
    with tempfile.TemporaryDirectory() as folder:
        tier = {"type": "disk", "path": f"{folder}/kv.slab", "max_bytes": "1MiB"}
        try:
            KVTierOffloadingSpec(vllm_config(secondary_tiers=[tier])).get_manager()
        except kvtier.ConfigError as error:
            assert list(Path(folder).iterdir()) == []
            return str(error)
    return ""


def replica_config(parallel: ParallelConfig, engine_id: str, **user_keys: Any) -> OffloadingConfig:
    """What a spec is told in an engine with vLLM's own configuration of replicas."""
    config = vllm_config(**user_keys)
    own = replace(
        config.parallel,
        data_parallel_index=parallel.data_parallel_index,
        data_parallel_size=parallel.data_parallel_size,
        data_parallel_rank_local=parallel.data_parallel_rank_local,
    )
    return replace(config, parallel=own, engine_id=engine_id)


def files_of_replicas() -> dict[str, list[str]]:
    """The files of two replicas that run at the same time and are given the same path."""
    found = {}
    for kind in ("dense", "experts"):
        with tempfile.TemporaryDirectory() as folder:
            tier = {"type": "disk", "path": f"{folder}/kv.slab", "max_bytes": "1MiB"}
            user_keys = {"secondary_tiers": [tier], "cache_namespace": "these weights"}
            managers = []
            for rank in range(2):
                # As vLLM's `run_engine_core` does it.
                parallel = ParallelConfig(data_parallel_size=2, data_parallel_rank=rank)
                parallel.data_parallel_rank_local = rank
                parallel.data_parallel_index = rank
                if kind == "dense":
                    parallel.reconfigure_for_independent_dp_rank()
                config = replica_config(parallel, f"{kind}-engine_dp{rank}", **user_keys)
                managers.append(KVTierOffloadingSpec(config).get_manager())
            found[kind] = sorted(path.name for path in Path(folder).iterdir())
            for manager in managers:
                manager.shutdown()
    return found


def file_of_an_only_engine() -> list[str]:
    """Without replicas, the path is the file."""
    with tempfile.TemporaryDirectory() as folder:
        tier = {"type": "disk", "path": f"{folder}/kv.slab", "max_bytes": "1MiB"}
        config = replica_config(
            ParallelConfig(), "engine", secondary_tiers=[tier], cache_namespace="these weights"
        )
        KVTierOffloadingSpec(config).get_manager().shutdown()
        return [path.name for path in Path(folder).iterdir()]


def version_warnings() -> list[str]:
    """What is said, over two engines, when vLLM is not one that kvtier knows."""
    lines: list[str] = []

    class Lines(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            lines.append(record.getMessage())

    handler = Lines()
    vllm_api.logger.addHandler(handler)
    supported, vllm_api.SUPPORTED = vllm_api.SUPPORTED, ((0, 1),)
    try:
        for _ in range(2):
            KVTierOffloadingSpec(vllm_config())
    finally:
        vllm_api.SUPPORTED = supported
        vllm_api.logger.removeHandler(handler)
    return lines
