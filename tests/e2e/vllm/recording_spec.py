"""A kvtier spec for vLLM that records every call of vLLM to the manager.

vLLM loads it by name. `engine_config` in the user's configuration may hold `late_by`: the number of
polls before the worker reports the end of a transfer. Copies within host memory end at once; on a
GPU they take a few steps, during which vLLM makes further calls.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from typing import Any

import vllm

from kvtier.base import (
    GPULoadStoreSpec,
    LoadStoreSpec,
    LookupResult,
    OffloadingEvent,
    OffloadingManager,
    OffloadingStats,
    OffloadingWorker,
    OffloadKey,
    PrepareStoreOutput,
    ReqContext,
    RequestOffloadingContext,
    ScheduleEndContext,
    TransferResult,
    get_offload_group_idx,
)
from kvtier.integrations.vllm.manager import ManagerAdapter
from kvtier.integrations.vllm.spec import KVTierOffloadingSpec
from kvtier.integrations.vllm.worker import WorkerAdapter
from tests.vllm_calls import LETTERS, Call, Recording, format_runs

last_recording: list[Recording] = []
"""The recording of the engine that was started last."""


class RecordingManager(OffloadingManager):
    """Passes every call on, and records it with its result."""

    def __init__(self, manager: OffloadingManager, recording: Recording) -> None:
        self._manager = manager
        self._recording = recording
        self._numbers: dict[OffloadKey, int] = {}
        self._requests: dict[str, int] = {}

    def _key(self, key: OffloadKey) -> int:
        number = self._numbers.get(key)
        if number is None:
            number = self._numbers[key] = len(self._numbers)
            self._recording.key_groups.append(get_offload_group_idx(key))
        return number

    def _keys(self, keys: Iterable[OffloadKey]) -> list[int]:
        numbers = [self._key(key) for key in keys]
        return sorted(numbers) if isinstance(keys, set) else numbers

    def _request(self, req_id: str) -> int:
        return self._requests.setdefault(req_id, len(self._requests))

    def _note(
        self,
        method: str,
        context: ReqContext | None = None,
        keys: Iterable[OffloadKey] = (),
        result: Any = None,
    ) -> None:
        request = None if context is None else self._request(context.req_id)
        self._recording.calls.append(Call(method, request, self._keys(keys), result=result))

    def lookup(self, key: OffloadKey, req_context: ReqContext) -> LookupResult:
        result = self._manager.lookup(key, req_context)
        self._note("lookup", req_context, [key], LETTERS[result.name])
        return result

    def prepare_load(self, keys: Collection[OffloadKey], req_context: ReqContext) -> LoadStoreSpec:
        self._note("prepare_load", req_context, keys)
        return self._manager.prepare_load(keys, req_context)

    def complete_load(self, keys: Collection[OffloadKey], req_context: ReqContext) -> None:
        self._note("complete_load", req_context, keys)
        self._manager.complete_load(keys, req_context)

    def prepare_store(
        self, keys: Collection[OffloadKey], req_context: ReqContext
    ) -> PrepareStoreOutput | None:
        output = self._manager.prepare_store(keys, req_context)
        offered = self._keys(keys)
        result = None
        if output is not None:
            result = {
                "stored": format_runs(self._keys(output.keys_to_store)),
                "evicted": format_runs(self._keys(output.evicted_keys)),
            }
        self._recording.calls.append(
            Call("prepare_store", self._request(req_context.req_id), offered, result=result)
        )
        return output

    def complete_store(
        self, keys: Collection[OffloadKey], req_context: ReqContext, success: bool = True
    ) -> None:
        assert success, "stock vLLM reports no failed stores"
        self._note("complete_store", req_context, keys)
        self._manager.complete_store(keys, req_context, success)

    def touch(self, keys: Collection[OffloadKey], req_context: ReqContext) -> None:
        self._note("touch", req_context, keys)
        self._manager.touch(keys, req_context)

    def on_new_request(self, req_context: ReqContext) -> RequestOffloadingContext:
        self._note("on_new_request", req_context)
        return self._manager.on_new_request(req_context)

    def on_request_finished(self, req_context: ReqContext) -> None:
        self._note("on_request_finished", req_context)
        self._manager.on_request_finished(req_context)

    def on_schedule_end(self, context: ScheduleEndContext) -> None:
        self._recording.calls.append(
            Call(
                "on_schedule_end",
                new_requests=[self._request(req_id) for req_id in context.new_req_ids],
                preempted_requests=sorted(map(self._request, context.preempted_req_ids)),
            )
        )
        self._manager.on_schedule_end(context)

    def has_pending_work(self) -> bool:
        result = self._manager.has_pending_work()
        self._note("has_pending_work", result=result)
        return result

    def take_events(self) -> Iterable[OffloadingEvent]:
        events = list(self._manager.take_events())
        result = [[event.removed, format_runs(self._keys(event.keys))] for event in events]
        self._note("take_events", result=result)
        return events

    def reset_cache(self) -> None:
        self._note("reset_cache")
        self._manager.reset_cache()

    def get_stats(self) -> OffloadingStats | None:
        self._note("get_stats")
        return self._manager.get_stats()

    def shutdown(self) -> None:
        self._note("shutdown")
        self._manager.shutdown()


class LateWorker(OffloadingWorker):
    """Reports every transfer a fixed number of polls after it was submitted."""

    def __init__(self, worker: OffloadingWorker, late_by: int) -> None:
        self._worker = worker
        self._late_by = late_by
        self._polls = 0
        self._submitted: set[int] = set()
        self._held: list[tuple[int, TransferResult]] = []

    def submit_store(
        self, job_id: int, src_spec: GPULoadStoreSpec, dst_spec: LoadStoreSpec
    ) -> bool:
        self._submitted.add(job_id)
        return self._worker.submit_store(job_id, src_spec, dst_spec)

    def submit_load(self, job_id: int, src_spec: LoadStoreSpec, dst_spec: GPULoadStoreSpec) -> bool:
        self._submitted.add(job_id)
        return self._worker.submit_load(job_id, src_spec, dst_spec)

    def get_finished(self) -> list[TransferResult]:
        # The same order of calls at every recording, independent of the machine's speed.
        self._worker.wait(self._submitted)
        self._submitted.clear()
        due = self._polls + self._late_by
        self._held += [(due, result) for result in self._worker.get_finished()]
        ready = [result for due, result in self._held if due <= self._polls]
        self._held = [entry for entry in self._held if entry[0] > self._polls]
        self._polls += 1
        return ready

    def wait(self, job_ids: Collection[int]) -> None:
        self._worker.wait(job_ids)

    def shutdown(self) -> None:
        self._worker.shutdown()


class RecordingSpec(KVTierOffloadingSpec):
    """kvtier's spec with a manager that records and a worker that reports late."""

    def get_manager(self) -> ManagerAdapter:
        adapter = super().get_manager()
        if not isinstance(adapter.inner, RecordingManager):
            config = self.kvtier_config
            recording = Recording(
                scenario="",
                vllm_version=vllm.__version__,
                num_blocks=config.num_blocks,
                policy=config.options.eviction_policy,
                key_groups=[],
            )
            last_recording[:] = [recording]
            manager = RecordingManager(adapter.inner, recording)
            adapter.__dict__.update(_manager=manager, _lookup=manager.lookup)
        return adapter

    def get_worker(self, kv_caches: Any) -> WorkerAdapter:
        adapter = super().get_worker(kv_caches)
        if not isinstance(adapter.inner, LateWorker):
            late_by = int((self.extra_config.get("engine_config") or {}).get("late_by", 0))
            adapter._worker = LateWorker(adapter.inner, late_by)
        return adapter
