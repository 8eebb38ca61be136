"""The sources of blocks that vLLM gets from the manager, and which blocks count as used."""

from __future__ import annotations

import tempfile
import time
from collections.abc import Sequence
from typing import Any

from vllm.v1.kv_offload.base import ReqContext, ScheduleEndContext, make_offload_key

from kvtier.base import OffloadKey
from kvtier.integrations.vllm import vllm_api
from kvtier.integrations.vllm.manager import ManagerAdapter
from tests.integrations.vllm.adapter_probe import is_moving_blocks, started, vllm_config

_PATIENCE_S = 60.0
_SLOT = 4096
_HIT = vllm_api.LookupResult.HIT


def _prompt(name: str, num_blocks: int) -> list[OffloadKey]:
    return [make_offload_key(f"{name}{n}".encode().ljust(32), 0) for n in range(num_blocks)]


def _names(keys: Sequence[OffloadKey]) -> list[str]:
    return [bytes(key[:32]).decode().strip() for key in keys]


def _new_request(adapter: ManagerAdapter, name: str, prompt: Sequence[OffloadKey]) -> ReqContext:
    context = ReqContext(name)
    adapter.on_new_request(context)
    for place, key in enumerate(prompt):
        context.set_offload_key_position(key, 32 * (place + 1))
    return context


def _end_step(adapter: ManagerAdapter) -> None:
    adapter.on_schedule_end(ScheduleEndContext((), ()))


def _store(adapter: ManagerAdapter, name: str, prompt: Sequence[OffloadKey]) -> list[str]:
    """Store the prompt of a request, also in tiers. Returns the evicted blocks."""
    context = _new_request(adapter, name, prompt)
    output = adapter.prepare_store(prompt, context)
    assert output is not None
    adapter.complete_store(set(prompt), context)
    adapter.on_request_finished(context)
    deadline = time.monotonic() + _PATIENCE_S
    while adapter.has_pending_work() or is_moving_blocks(adapter):
        assert time.monotonic() < deadline
        _end_step(adapter)
    _end_step(adapter)
    return _names(output.evicted_keys)


def sources(tier_type: str, locality: str | None = None) -> list[str]:
    """The sources of two blocks that were promoted from a tier, and of one that was in host memory.
    Only for releases that ask."""
    with tempfile.TemporaryDirectory() as folder:
        tier: dict[str, Any] = {
            "type": tier_type,
            "max_pinned_share": 1,
            "lookup_timeout_ms": 60_000,
            "load_timeout_ms": 60_000,
            "store_timeout_ms": 60_000,
        }
        if tier_type == "disk":
            tier |= {"path": f"{folder}/kv.slab", "max_bytes": "1MiB"}
        if tier_type == "fs":
            tier |= {"root_dir": f"{folder}/root", "max_bytes": "16MiB"}
        if locality is not None:
            tier["locality"] = locality
        config = vllm_config(
            cpu_bytes_to_use=6 * _SLOT,
            secondary_tiers=[tier],
            cache_namespace="these weights",
            prefill_tokens_per_s=0,
        )
        with started(config) as (adapter, _):
            below, others, above = (_prompt(name, 2) for name in ("below", "others", "above"))
            for name, prompt in (("1", below), ("2", others), ("3", above), ("4", _prompt("x", 2))):
                _store(adapter, name, prompt)
            prompt = [*below, above[0]]
            context = _new_request(adapter, "5", prompt)
            deadline = time.monotonic() + _PATIENCE_S
            while any(adapter.lookup(key, context) is not _HIT for key in prompt):
                assert time.monotonic() < deadline
                _end_step(adapter)
            adapter.prepare_load(prompt, context)
            told = [adapter.get_load_source(key, context).name for key in prompt]
            adapter.complete_load(set(prompt), context)
            adapter.on_request_finished(context)
    return told


def left_first(num_on_device: int, *, is_over: bool = True) -> list[str]:
    """A prompt of four blocks is used again, of which `on_device` are still on the device: the
    order in which blocks are evicted from host memory after the request, or during it. Only for
    releases that do not report use themselves."""
    with started(vllm_config(cpu_bytes_to_use=6 * _SLOT)) as (adapter, _):
        prompt = _prompt("used", 4)
        _store(adapter, "1", prompt)
        _store(adapter, "2", _prompt("unused", 2))
        context = _new_request(adapter, "3", prompt)
        on_host = prompt[num_on_device:]
        if on_host:
            assert all(adapter.lookup(key, context) is _HIT for key in on_host)
            adapter.prepare_load(on_host, context)
            _end_step(adapter)
            adapter.complete_load(set(on_host), context)
        if is_over:
            adapter.on_request_finished(context)
        left = []
        for n in range(5):
            left += _store(adapter, f"other {n}", _prompt(f"other {n} ", 1))
    return left


def report() -> dict[str, Any]:
    """All findings, by case."""
    return {
        "local_disk": sources("disk", "LOCAL"),
        "remote_disk": sources("disk", "REMOTE"),
        "fs": sources("fs"),
        "local_fs": sources("fs", "LOCAL"),
        "memory": sources("example", "LOCAL"),
        "left_first": {
            "none": left_first(0),
            "half": left_first(2),
            "half, of one that is decoding": left_first(2, is_over=False),
            "all": left_first(4),
        },
    }
