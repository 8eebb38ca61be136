"""A GPU that only sleeps: stock vLLM for CPUs, with a worker that computes nothing.

vLLM's scheduler, its connector, kvtier's manager, host memory and the tiers below are real, and so
is every read and write of a disk. What the GPU would do takes as long as it would there, by the
`Speed` given, and the engine's thread launches as much as it would have to. Tokens are made up.
Copies between device and host memory take their time on a bus, but move no bytes: host memory
starts with random ones.

For benchmarks without a GPU. Call `install` before vLLM makes an engine in this process.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass
from typing import Any
from unittest.mock import patch

import numpy as np
import torch
from vllm.config import set_current_vllm_config
from vllm.forward_context import set_forward_context
from vllm.model_executor.model_loader.utils import initialize_model
from vllm.platforms.cpu import CpuPlatform
from vllm.utils.torch_utils import set_default_torch_dtype
from vllm.v1.attention.backend import MultipleOf
from vllm.v1.attention.backends.cpu_attn import CPUAttentionBackend
from vllm.v1.outputs import AsyncModelRunnerOutput, LogprobsLists, ModelRunnerOutput
from vllm.v1.worker.cpu_worker import CPUWorker
from vllm.v1.worker.kv_connector_model_runner_mixin import KVConnectorModelRunnerMixin

import kvtier.cpu.spec
from kvtier.base import CanonicalKVCaches, GPULoadStoreSpec, LoadStoreSpec, TransferResult
from kvtier.cpu.shared_offload_region import SharedOffloadRegion
from kvtier.cpu.worker import JobSpec, SlotWorker, device_pages

WORKER = f"{__name__}.SleepingWorker"
"""For vLLM's option `worker_cls`."""

_VOCABULARY = 1000
_TILE = 64 << 20
_UNITS_TIMED = 2000


@dataclass(frozen=True, slots=True)
class Speed:
    """How fast a model runs on a GPU."""

    token_s: float
    """Seconds to compute a prompt token at position 0."""
    token_s_per_position: float
    """Seconds that it takes longer with each position."""
    decode_s: float
    """Seconds of a step that only decodes, on the GPU."""
    launch_decode_s: float
    """Seconds in which the engine's thread prepares and launches such a step, undisturbed."""
    launch_prefill_s: float
    """The same for a step that computes prompts."""
    bus_bytes_per_s: float


H200_8B = Speed(22.1e-6, 0.93e-9, 0.0060, 0.0015, 0.008, 53e9)
"""Llama-3-8B's shape on an H200, with CUDA graphs for decoding: fitted to 2,048, 8,192 and 32,768
tokens in 50, 212 and 1,222 ms, and to a decode step of 6.7 ms."""
H200_8B_EAGER = Speed(22.1e-6, 0.93e-9, 0.0060, 0.012, 0.012, 53e9)
"""The same without graphs, where the engine's thread is the limit."""
H200_32B = Speed(93e-6, 2.4e-9, 0.019, 0.003, 0.016, 53e9)
"""A 32B shape there: 9,600 tokens a second."""


class _Gpu:
    """The clock of the device, and what its speed is. One for each process."""

    def __init__(self, speed: Speed) -> None:
        self.speed = speed
        self.free_at = 0.0
        """When everything that was launched is computed."""
        self._small = torch.zeros(8)
        self._units_per_s = 0.0

    def launch(self, prepared_in_s: float, seconds: float) -> float:
        """Launch a step; returns when it will have been computed. Keeps the calling thread busy for
        `prepared_in_s`, with the interpreter lock released and taken as by real launches."""
        if not self._units_per_s:
            began = time.perf_counter()
            self._work(_UNITS_TIMED)
            self._units_per_s = _UNITS_TIMED / (time.perf_counter() - began)
        began = time.perf_counter()
        self._work(int(prepared_in_s * self._units_per_s))
        # The device starts with the first launches, and cannot end before the last one.
        ready = max(began, self.free_at) + seconds
        self.free_at = max(ready, time.perf_counter())
        return self.free_at

    def _work(self, units: int) -> None:
        small = self._small
        for _ in range(units):
            torch.add(small, small, out=small)
            small.zero_()
            sum(range(40))


_gpu = _Gpu(H200_8B)


def install(speed: Speed) -> None:
    """Let vLLM engines in this process run on a sleeping GPU of this speed, if `worker_cls` is
    `WORKER`. They schedule ahead, as they would on a GPU."""
    _gpu.speed = speed
    check = CpuPlatform.check_and_update_config.__func__

    def check_and_schedule_ahead(cls: Any, vllm_config: Any) -> None:
        check(cls, vllm_config)
        vllm_config.scheduler_config.async_scheduling = True

    CpuPlatform.check_and_update_config = classmethod(check_and_schedule_ahead)
    CPUAttentionBackend.get_supported_kernel_block_sizes = staticmethod(_any_block_size)
    kvtier.cpu.spec._worker_for = _sleeping_copies  # type: ignore[assignment]


def _any_block_size(_: object = None) -> list[Any]:
    """The kernel of the CPU build takes only multiples of 32; it is never called."""
    return [MultipleOf(16)]


# --- vLLM's worker --------------------------------------------------------------------------------


class _Output(AsyncModelRunnerOutput):  # type: ignore[misc]
    """The output of a step, at the time when the GPU would have computed it."""

    def __init__(self, output: ModelRunnerOutput, ready_at: float) -> None:
        self._output = output
        self._ready_at = ready_at

    def get_output(self) -> ModelRunnerOutput:
        time.sleep(max(0.0, self._ready_at - time.perf_counter()))
        return self._output


@dataclass(slots=True)
class _Request:
    num_prompt_tokens: int
    num_sampled: int = 0


class SleepingWorker(CPUWorker):  # type: ignore[misc]
    """vLLM's worker. Its model has all layers, but no weights are ever touched."""

    def load_model(self, *, load_dummy_weights: bool = False) -> None:
        with (
            set_current_vllm_config(self.vllm_config),
            set_default_torch_dtype(self.model_config.dtype),
        ):
            self.model_runner.model = initialize_model(self.vllm_config)
        self._requests: dict[str, _Request] = {}
        self._output: _Output | None = None

    def determine_available_memory(self) -> int:
        return 1 << 40

    def initialize_from_config(self, kv_cache_config: Any) -> None:
        # Memory of a device that is never touched. Zeros would occupy this machine's.
        with patch.object(torch, "zeros", torch.empty):
            super().initialize_from_config(kv_cache_config)

    def execute_model(self, scheduler_output: Any) -> ModelRunnerOutput | None:
        mixin = KVConnectorModelRunnerMixin
        if not scheduler_output.total_num_scheduled_tokens:
            self._forget(scheduler_output.finished_req_ids)
            if self.vllm_config.kv_transfer_config is None:
                return ModelRunnerOutput([], {})
            return mixin.kv_connector_no_forward(scheduler_output, self.vllm_config)
        with (
            set_forward_context(None, self.vllm_config),
            mixin.maybe_get_kv_connector_output(scheduler_output) as about_transfers,
        ):
            output, ready_at = self._launch(scheduler_output)
        output.kv_connector_output = about_transfers
        self._output = _Output(output, ready_at)
        return None

    def sample_tokens(self, grammar_output: Any) -> _Output:
        assert self._output is not None
        return self._output

    def _forget(self, ended: Iterable[str]) -> None:
        for req_id in ended:
            self._requests.pop(req_id, None)

    def _launch(self, scheduled: Any) -> tuple[ModelRunnerOutput, float]:
        self._forget(scheduled.finished_req_ids)
        starts = []
        for new in scheduled.scheduled_new_reqs:
            self._requests[new.req_id] = _Request(len(new.prompt_token_ids))
            starts.append((new.req_id, new.num_computed_tokens))
        cached = scheduled.scheduled_cached_reqs
        starts += zip(cached.req_ids, cached.num_computed_tokens, strict=True)
        speed, seconds, is_prefill = _gpu.speed, 0.0, False
        tokens: list[list[int]] = []
        for req_id, start in starts:
            request = self._requests[req_id]
            count = scheduled.num_scheduled_tokens[req_id]
            end = start + count
            if count > 1:
                is_prefill = True
                mean_position = (start + end) / 2
                seconds += count * (speed.token_s + speed.token_s_per_position * mean_position)
            is_sampled = end >= request.num_prompt_tokens + request.num_sampled
            request.num_sampled += is_sampled
            tokens.append([end % _VOCABULARY] if is_sampled else [])
        # A step that also computes prompts reads the weights only once.
        seconds = max(seconds, speed.decode_s)
        prepared_in_s = speed.launch_prefill_s if is_prefill else speed.launch_decode_s
        ready_at = _gpu.launch(prepared_in_s, seconds)
        req_ids = [req_id for req_id, _ in starts]
        output = ModelRunnerOutput(
            req_ids=req_ids,
            req_id_to_index={req_id: n for n, req_id in enumerate(req_ids)},
            sampled_token_ids=tokens,
            logprobs=_logprobs(tokens),
        )
        return output, ready_at


def _logprobs(tokens: list[list[int]]) -> LogprobsLists:
    chosen = np.array([each[0] if each else 0 for each in tokens], np.int32)
    return LogprobsLists(
        np.stack([chosen, chosen], 1),
        np.zeros((len(tokens), 2), np.float32),
        np.zeros(len(tokens), np.int32),
    )


# --- kvtier's worker ------------------------------------------------------------------------------


def _sleeping_copies(kv_caches: CanonicalKVCaches) -> Callable[..., SleepingCopies]:
    device_pages(kv_caches)  # checks them
    return SleepingCopies


@dataclass(slots=True)
class _Copy:
    job_id: int
    num_bytes: int
    seconds: float
    ends_at: float


class SleepingCopies(SlotWorker):
    """Copies that take as long as on the bus. A store begins when the steps that were launched
    before it are computed."""

    def __init__(
        self, kv_caches: CanonicalKVCaches, region: SharedOffloadRegion, blocks_per_chunk: int
    ) -> None:
        super().__init__(region)
        self._page_bytes = region.row_bytes // blocks_per_chunk
        self._under_way: tuple[deque[_Copy], deque[_Copy]] = (deque(), deque())
        rows = np.frombuffer(region.create_kv_memoryview(), np.uint8)
        tile = np.random.default_rng(1).integers(0, 256, _TILE, np.uint8)
        for start in range(0, len(rows), _TILE):
            part = rows[start : start + _TILE]
            part[:] = tile[: len(part)]
        del rows

    def _submit(
        self, job_id: int, device_spec: GPULoadStoreSpec, slot_spec: LoadStoreSpec, is_store: bool
    ) -> bool:
        num_bytes = len(JobSpec.take(device_spec, slot_spec).blocks) * self._page_bytes
        queue = self._under_way[is_store]
        seconds = num_bytes / _gpu.speed.bus_bytes_per_s
        begins_at = max(time.perf_counter(), _gpu.free_at, queue[-1].ends_at if queue else 0.0)
        queue.append(_Copy(job_id, num_bytes, seconds, begins_at + seconds))
        return True

    def get_finished(self) -> list[TransferResult]:
        ended, now = [], time.perf_counter()
        for queue in self._under_way:
            while queue and queue[0].ends_at <= now:
                copy = queue.popleft()
                ended.append(TransferResult(copy.job_id, True, copy.num_bytes, copy.seconds))
        return ended

    def wait(self, job_ids: Collection[int]) -> None:
        ends_at = [copy.ends_at for q in self._under_way for copy in q if copy.job_id in job_ids]
        time.sleep(max(0.0, max(ends_at, default=0.0) - time.perf_counter()))

    def shutdown(self) -> None:
        self._region.cleanup()
