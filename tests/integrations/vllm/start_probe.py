"""What kvtier refuses while a vLLM engine starts, and how its logger is set up beside vLLM's."""

from __future__ import annotations

import logging
import os
import tempfile
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import torch
from vllm.config import KVTransferConfig
from vllm.v1.kv_cache_interface import KVCacheConfig
from vllm.v1.kv_offload.base import (
    CanonicalKVCacheRef,
    CanonicalKVCaches,
    CanonicalKVCacheTensor,
)

from kvtier import ConfigError
from kvtier.integrations.vllm import KVTierConnector, KVTierOffloadingSpec, vllm_api
from kvtier.integrations.vllm.logs import log_through_vllm
from kvtier.tiering.factory import TierStartError
from tests.integrations.vllm.adapter_probe import vllm_config
from tests.tiering.disk.orphan import orphaned

_PAGE = 4096


def _shared_memory() -> set[str]:
    return {name for name in os.listdir("/dev/shm") if name.startswith("kvtier-")}


def rank_that_has_not_signed_in() -> dict[str, Any]:
    """The error of a scheduler that finds the shared memory, but only one of two ranks in it."""
    config = vllm_config()
    parallel = replace(config.parallel, world_size=2, tp_size=2)
    config = replace(config, parallel=parallel, engine_id="start-probe")
    cache = torch.zeros((8, _PAGE), dtype=torch.int8)
    caches = CanonicalKVCaches(
        [CanonicalKVCacheTensor(cache, _PAGE)], [[CanonicalKVCacheRef(0, _PAGE)]]
    )
    before = _shared_memory()
    worker = KVTierOffloadingSpec(config).get_worker(caches)
    found: dict[str, Any] = {"made": len(_shared_memory() - before), "refused": ""}
    try:
        KVTierOffloadingSpec(config).get_manager().shutdown()
    except ConfigError as error:
        found["refused"] = str(error)
    found["left"] = sorted(_shared_memory() - before)
    worker.shutdown()
    return found


def spec_of_vllms_own() -> str:
    """The error for a user who names `KVTierConnector` and another spec."""
    transfer = KVTransferConfig(
        kv_connector="KVTierConnector",
        kv_connector_module_path="kvtier.integrations.vllm",
        kv_role="kv_both",
        kv_connector_extra_config={"cpu_bytes_to_use": "1MiB", "spec_name": "CPUOffloadingSpec"},
    )
    config: Any = SimpleNamespace(
        model_config=SimpleNamespace(enable_sleep_mode=False), kv_transfer_config=transfer
    )
    nothing = KVCacheConfig(num_blocks=8, kv_cache_tensors=[], kv_cache_groups=[])
    try:
        KVTierConnector(config, vllm_api.KVConnectorRole.WORKER, nothing)
    except ConfigError as error:
        return str(error)
    return ""


def flushes_as_a_spec() -> dict[str, bool]:
    """Whether a worker is flushed, by what vLLM's configuration says about sleep mode."""
    spec = KVTierOffloadingSpec(vllm_config())
    worker: Any = SimpleNamespace(flush=lambda: None)
    found = {}
    for said, config in (
        ("nothing", None),
        ("it may", SimpleNamespace(model_config=SimpleNamespace(enable_sleep_mode=True))),
        ("it may not", SimpleNamespace(model_config=SimpleNamespace(enable_sleep_mode=False))),
    ):
        with patch.object(
            vllm_api, "get_current_vllm_config_or_none", lambda config=config: config
        ):
            found[said] = spec._flush_of(worker) is not None
    return found


def asked_for_cuda_graphs(**extra_config: Any) -> str:
    """The answer or error when vLLM asks, before it loads weights, how to capture CUDA graphs."""
    try:
        needs_pieces = KVTierConnector.requires_piecewise_for_cudagraph(extra_config)
    except (ConfigError, TierStartError) as error:
        return str(error)
    assert isinstance(needs_pieces, bool)
    return "pieces" if needs_pieces else "whole"


class _Lines(logging.Handler):
    """Keeps the parts of a record that vLLM's format shows."""

    def __init__(self) -> None:
        super().__init__()
        self.lines: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.lines.append(f"{record.levelname} [{record.filename}] {record.getMessage()}")


def loggers() -> dict[str, Any]:
    """How kvtier's logger is set up beside vLLM's, by how the user had configured both."""
    ours, theirs = logging.getLogger("kvtier"), logging.getLogger("vllm")
    vllms, users = _Lines(), logging.NullHandler()
    found = {}
    for case, our_handlers, our_level, their_handlers in (
        ("untouched", [], logging.NOTSET, [vllms]),
        ("with a handler", [users], logging.NOTSET, [vllms]),
        ("with a level", [], logging.DEBUG, [vllms]),
        ("vllm without handlers", [], logging.NOTSET, []),
    ):
        ours.handlers, theirs.handlers = list(our_handlers), list(their_handlers)
        ours.propagate = True
        ours.setLevel(our_level)
        theirs.setLevel(logging.WARNING)
        for _ in range(2):  # both halves of an engine in one process
            log_through_vllm()
        vllms.lines.clear()
        logging.getLogger("kvtier.tiering.disk.manager").warning("%d of %d", 1, 2)
        found[case] = {
            "vllm's": list(vllms.lines),
            "user's": users in ours.handlers,
            "level": logging.getLevelName(ours.level),
            "propagates": ours.propagate,
        }
    return found


def slab_of_an_orphan() -> dict[str, Any]:
    """The error before weights are loaded, while an engine without a server holds the slab."""
    with tempfile.TemporaryDirectory() as folder:
        disk = {"type": "disk", "path": f"{folder}/kv.slab", "max_bytes": "1MiB"}
        keys: dict[str, Any] = {"cpu_bytes_to_use": "1MiB", "secondary_tiers": [disk]}
        with orphaned(Path(folder, "kv.slab")) as (engine_pid, _):
            while_it_lives = asked_for_cuda_graphs(**keys)
        return {
            "pid": engine_pid,
            "while_it_lives": while_it_lives,
            "when_it_is_gone": asked_for_cuda_graphs(**keys),
        }


def report() -> dict[str, Any]:
    """All findings, by the case that was tried."""
    good = {"cpu_bytes_to_use": "1MiB"}
    return {
        "rank_that_has_not_signed_in": rank_that_has_not_signed_in(),
        "spec_of_vllms_own": spec_of_vllms_own(),
        "flushes_as_a_spec": flushes_as_a_spec(),
        "good": asked_for_cuda_graphs(**good),
        "good_with_tier": asked_for_cuda_graphs(**good, secondary_tiers=[{"type": "example"}]),
        "typo": asked_for_cuda_graphs(**good, eviction_polici="lru"),
        "typo_in_tier": asked_for_cuda_graphs(**good, secondary_tiers=[{"type": "exampel"}]),
        "slab_of_an_orphan": slab_of_an_orphan(),
        "loggers": loggers(),
    }
