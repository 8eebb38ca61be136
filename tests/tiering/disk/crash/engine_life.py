"""A life in which an engine with a write policy decides what the tier stores, loads and evicts."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence
from itertools import count

from kvtier.base import BlockIDsLoadStoreSpec, OffloadKey, ReqContext, ScheduleEndContext
from kvtier.config.options import WritePolicyName
from kvtier.tiering.base import JobResult, TransferJob
from kvtier.tiering.health import TierSettings
from kvtier.tiering.manager import CPUPrimaryTierOffloadingManager, TieringOffloadingManager
from tests.tiering.crash.processes import Wrong
from tests.tiering.disk.crash.life import Job, Life, Storing, generation_in, key_of
from tests.tiering.disk.crash.orders import Orders

_LONGEST_PROMPT = 16
_LEAST_SLOTS = 20
_SHUTDOWN_S = 5.0


class _Memory:
    """Host memory that the tier has already."""

    def __init__(self, view: memoryview) -> None:
        self._view = view

    def create_kv_memoryview(self) -> memoryview:
        return self._view

    def cleanup(self) -> None:
        return


class EngineLife(Life):
    """An engine with more blocks than fit into host memory. The tier gets the jobs of its
    orchestrator, and each is reported as in `Life`.

    Computing a block that the tier has, or is storing, gives the same bytes again.
    """

    def __init__(self, orders: Orders, report: Callable[..., None]) -> None:
        super().__init__(orders, report)
        self._numbers = {key_of(number): number for number in range(orders.num_keys)}
        self._names = count(1)

    def work(self) -> None:
        tier = self._tier
        self._submit = {True: tier.submit_load, False: tier.submit_store}
        self._finished = tier.get_finished_jobs
        tier.submit_store = self._submit_store  # type: ignore[method-assign]
        tier.submit_load = self._submit_load  # type: ignore[method-assign]
        tier.get_finished_jobs = self._get_finished  # type: ignore[method-assign]
        assert self._orders.write is not None
        self._manager = TieringOffloadingManager(
            self._make_primary(),
            [tier],
            settings=[
                TierSettings(
                    write_policy=WritePolicyName(self._orders.write),
                    max_pinned_share=0.5,
                    enable_kv_events=True,
                )
            ],
            prefill_tokens_per_s=0,
            shutdown_timeout_s=_SHUTDOWN_S,
        )
        for _ in range(self._orders.num_operations):
            self._serve()
            if self._random.random() < 0.1:
                time.sleep(self._random.uniform(0, 0.004))

    def _make_primary(self) -> CPUPrimaryTierOffloadingManager:
        """Host memory for half of the blocks, in the first of the tier's slots."""
        num_slots = min(max(self._orders.num_keys // 2, _LEAST_SLOTS), self._rows.num_slots)
        row_bytes = self._orders.row_bytes
        view = self._rows.view.cast("B")[: num_slots * row_bytes].cast("B", (num_slots, row_bytes))
        return CPUPrimaryTierOffloadingManager(num_slots, _Memory(view))  # type: ignore[arg-type]

    def end(self) -> None:
        self._manager.shutdown()
        self._check_removed()
        self._report("shut down")

    # --- the engine ----------------------------------------------------------------------------

    def _serve(self) -> None:
        """One request: it loads what is found, and computes the rest."""
        first = self._random.randrange(self._orders.num_keys)
        length = self._random.randint(1, _LONGEST_PROMPT)
        prompt = [key_of(n) for n in range(first, min(first + length, self._orders.num_keys))]
        request = ReqContext(f"prompt {next(self._names)}")
        manager = self._manager
        manager.on_new_request(request)
        found = manager.lookup_prefix(prompt, request)
        while not found.is_final:
            self._end_step()
            time.sleep(0.0002)
            found = manager.lookup_prefix(prompt, request)
        hits = prompt[: found.num_hits]
        if hits:
            spec = manager.prepare_load(hits, request)
            for key, slot in zip(hits, _slots_of(spec), strict=True):
                self._generation_of(key, slot)
            manager.complete_load(hits, request)
        manager.touch(prompt, request)
        output = manager.prepare_store(prompt[found.num_hits :], request)
        if output is not None:
            for key, slot in zip(output.keys_to_store, _slots_of(output.store_spec), strict=True):
                self._compute(key, slot)
            manager.complete_store(output.keys_to_store, request)
        manager.on_request_finished(request)
        self._end_step()

    def _end_step(self) -> None:
        self._manager.on_schedule_end(ScheduleEndContext())
        self._check_removed()

    def _compute(self, key: OffloadKey, slot: int) -> None:
        number = self._numbers[key]
        if number in self._storing:
            generation = self._storing[number].generation
        else:
            generation = self._kept.get(number) or next(self._generations)
        self._rows.fill(slot, self._payload(number, generation))

    def _generation_of(self, key: OffloadKey, slot: int) -> int:
        generation = generation_in(self._rows.content(slot), key, self._fingerprint)
        if generation is None:
            raise Wrong(f"host memory has bytes that are not of block {self._numbers[key]}")
        return generation

    # --- between the orchestrator and the tier --------------------------------------------------

    def _submit_store(self, job: TransferJob) -> None:
        generations, new = {}, []
        for key, slot in zip(job.keys, job.block_ids.tolist(), strict=True):
            number = self._numbers[key]
            if number in self._kept:
                generations[number] = self._kept[number]
                continue
            if number not in self._storing:
                # As if it had just been computed: no store brings the bytes of an earlier one.
                self._storing[number] = Storing(next(self._generations))
                new.append([number, self._storing[number].generation])
                self._compute(key, slot)
            self._storing[number].num_jobs += 1
            generations[number] = self._storing[number].generation
            if self._generation_of(key, slot) != generations[number]:
                raise Wrong(f"two blocks {number} are stored at the same time")
        self._jobs[job.job_id] = Job(job, generations)
        self._report("put", new)
        self._submit[False](job)
        self._report("placed", self._take_removed(), self._tier._table.next_seq)

    def _submit_load(self, job: TransferJob) -> None:
        numbers = [self._numbers[key] for key in job.keys]
        self._jobs[job.job_id] = Job(job, {n: self._kept[n] for n in numbers if n in self._kept})
        self._submit[True](job)

    def _get_finished(self) -> Iterable[JobResult]:
        results = list(self._finished())
        for result in results:
            self._finish(self._jobs.pop(result.job_id), result)
        return results

    def _check_loaded(self, own: Job, moved: set[bytes], is_current: bool) -> None:
        slots = dict(zip(own.job.keys, own.job.block_ids.tolist(), strict=True))
        for key in own.job.keys:
            number = self._numbers[key]
            generation = own.generations.get(number)
            if key in moved:
                if self._generation_of(key, slots[key]) != generation and generation is not None:
                    raise Wrong(f"block {number} was loaded, but not as it was stored last")
            elif generation is not None and number in self._kept:
                raise Wrong(f"block {number} could not be loaded")

    def _take_back(self, slots: Sequence[int]) -> None:
        """The slots are the orchestrator's."""

    def _check_removed(self) -> None:
        removed = self._take_removed()
        if removed:
            raise Wrong(f"generations {removed} are removed, and nothing was wrong with them")


def _slots_of(spec: object) -> list[int]:
    assert isinstance(spec, BlockIDsLoadStoreSpec)
    return [int(slot) for slot in spec.block_ids]
