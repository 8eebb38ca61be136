"""What lookups in a Mooncake pool cost, beside one bare call of the client, and what the tier costs
the scheduler's thread.

A child process of `mooncake_speed`: see `Session`.
"""

from __future__ import annotations

import gc
import time
from collections.abc import Callable
from typing import Any

import numpy as np

from kvtier.base import LookupResult, OffloadKey, ReqContext, ScheduleEndContext, make_offload_key
from kvtier.cpu.shared_offload_region import SharedOffloadRegion
from kvtier.tiering.base import TransferJob
from kvtier.tiering.mooncake.namespaces import block_name
from kvtier.tiering.remote.manager import namespace_of
from tests.bench.disk_subjects import MOONCAKE, Case
from tests.bench.mooncake_subjects import open_tier
from tests.bench.worker import answer

STEP_S = 0.0001
"""Pause between two questions while it is measured how soon they are answered."""
LONG_STEP_S = 0.002
"""A step of the scheduler, while its processor time is measured."""
PATIENCE_S = 30.0
ROUNDS = 9
SETTLED_S = 0.1

Seconds = dict[str, float]


class _OnThread:
    """Processor time of the calling thread, by kind of call. Calls that return nothing are not
    counted, if so asked: they are made once a step, whatever the number of blocks."""

    def __init__(self) -> None:
        self.seconds: Seconds = {}

    def timed(self, what: str, call: Callable[[], Any], counts_empty: bool = True) -> Any:
        began = time.thread_time()
        result = call()
        took = time.thread_time() - began
        if counts_empty or result:
            self.seconds[what] = self.seconds.get(what, 0.0) + took
        return result


class Session:
    """Stores the blocks of one prompt, and then measures with new tiers, which know nothing yet."""

    def __init__(self, _: str) -> None:
        self._region: SharedOffloadRegion | None = None

    def begin(self, described: dict[str, Any]) -> None:
        self._case = case = Case(**described)
        self._region = SharedOffloadRegion(
            case.region, case.num_blocks, None, case.block_bytes, case.block_bytes
        )
        self._view = self._region.create_kv_memoryview()
        self._keys = [
            make_offload_key(number.to_bytes(32, "big"), 0) for number in range(case.num_blocks)
        ]
        self._context = ReqContext("bench")

    def round(self, number: int) -> dict[str, Seconds]:
        """One life of the blocks: found by lookups, loaded, and stored under other names."""
        tier = open_tier(self._case, self._view)
        tier.enable_kv_events = False
        try:
            if number == 0:
                self._move(tier, self._keys, False, _OnThread())
                return {}
            time.sleep(SETTLED_S)
            gc.collect()
            gc.freeze()  # collecting all that is imported would count as this tier's work
            names = [block_name(namespace_of(tier.fingerprint), key) for key in self._keys]
            on_thread = _OnThread()
            client = tier._pool_server.pool
            with client.use() as membership:
                membership.client.batch_is_exist(names)
                began = time.perf_counter()
                codes = membership.client.batch_is_exist(names)
                bare = time.perf_counter() - began
            assert set(codes) == {1}
            began = time.perf_counter()
            self._look_up(tier, _OnThread(), STEP_S)
            answered = time.perf_counter() - began
            tier._lookups.look_into(tier._namespace)
            self._look_up(tier, on_thread, LONG_STEP_S)
            self._move(tier, self._keys, True, on_thread)
            others = [make_offload_key(number.to_bytes(4, "big") + key, 0) for key in self._keys]
            self._move(tier, others, False, on_thread)
            gone = [block_name(namespace_of(tier.fingerprint), key) for key in others]
            client.ask(lambda its: its.batch_remove(gone, True))
            per_block = {what: s / len(names) for what, s in on_thread.seconds.items()}
            return {"lookups": {"bare": bare, "tier": answered}, "on_thread": per_block}
        finally:
            tier.shutdown()

    def _look_up(self, tier: Any, on_thread: _OnThread, pause_s: float) -> None:
        until = time.perf_counter() + PATIENCE_S
        while time.perf_counter() < until:
            found = on_thread.timed("lookup", lambda: tier.lookup_batch(self._keys, self._context))
            on_thread.timed("lookup", lambda: tier.on_schedule_end(ScheduleEndContext()))
            if LookupResult.RETRY not in found:
                assert set(found) == {LookupResult.HIT}
                return
            time.sleep(pause_s)
        raise AssertionError("lookups were not answered")

    def _move(self, tier: Any, keys: list[OffloadKey], is_load: bool, on_thread: _OnThread) -> None:
        what = "load" if is_load else "store"
        finish = f"{what}, its end"
        submit = tier.submit_load if is_load else tier.submit_store
        step = self._case.job_blocks
        for start in range(0, len(keys), step):
            rows = np.arange(start, start + step)
            job = TransferJob(
                start, keys[start : start + step], rows, is_load, self._context, tier.fingerprint
            )
            on_thread.timed(what, lambda job=job: submit(job))  # type: ignore[misc]
        left = len(keys) // step
        until = time.perf_counter() + PATIENCE_S
        while left and time.perf_counter() < until:
            ended = on_thread.timed(finish, lambda: list(tier.get_finished_jobs()), False)
            assert all(result.success for result in ended)
            left -= len(ended)
            time.sleep(LONG_STEP_S)
        assert not left

    def end(self, _: object = None) -> None:
        if self._region is not None:
            del self._view
            self._region.cleanup()
            self._region = None


if __name__ == "__main__":
    answer(Session, (MOONCAKE,), __doc__)
