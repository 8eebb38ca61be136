"""The example tier's guarantees, one by one, and in random order."""

from __future__ import annotations

import gc
import itertools
import logging
import threading
import time
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import numpy as np
import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from kvtier import seal
from kvtier.base import (
    Locality,
    LookupResult,
    Medium,
    OffloadingEvent,
    OffloadKey,
    ReqContext,
    make_offload_key,
)
from kvtier.config import ConfigError
from kvtier.cpu.shared_offload_region import SharedOffloadRegion
from kvtier.cpu.spec import CPUOffloadingSpec
from kvtier.seal import SealFailure
from kvtier.tiering.base import JobResult, SecondaryTierManager, TransferJob
from kvtier.tiering.example.io_thread import SealedBlock
from kvtier.tiering.example.manager import ExampleSecondaryTierManager
from tests.config.sample import make_config

ROW_BYTES = 512
PATIENCE_S = 30.0
CONTEXT = ReqContext("request")
BOTH_MODES = pytest.mark.parametrize("simulate_async", [False, True])

HIT, MISS = LookupResult.HIT, LookupResult.MISS


def key(name: str, group: int = 0) -> OffloadKey:
    return make_offload_key(name.encode(), group)


def prompt(name: str, length: int) -> list[OffloadKey]:
    """Keys of a prompt, head first."""
    return [key(f"{name}{i}") for i in range(length)]


def names(keys: Iterable[OffloadKey]) -> list[str]:
    return [k[:-4].decode() for k in keys]


def payload_of(block: OffloadKey) -> bytes:
    """Bytes that no other key has."""
    return np.random.default_rng(list(block)).bytes(ROW_BYTES)


def wait_until(condition: Callable[[], bool], what: str) -> None:
    deadline = time.monotonic() + PATIENCE_S
    while not condition():
        assert time.monotonic() < deadline, f"waited in vain: {what}"
        time.sleep(0.001)


class Bench:
    """A tier with slots of plain memory, and the engine's side of its jobs."""

    def __init__(
        self,
        num_slots: int = 16,
        tier_cls: type[ExampleSecondaryTierManager] = ExampleSecondaryTierManager,
        **options: Any,
    ) -> None:
        self.slots = np.zeros((num_slots, ROW_BYTES), np.uint8)
        self.tier = tier_cls(
            offloading_spec=CPUOffloadingSpec(make_config()),
            primary_kv_view=self.slots.data,
            tier_type="example",
            **options,
        )
        self._job_ids = itertools.count()

    def make_job(self, keys: Sequence[OffloadKey], is_promotion: bool) -> TransferJob:
        return TransferJob(
            next(self._job_ids),
            keys,
            np.arange(len(keys)),
            is_promotion,
            CONTEXT,
            self.tier.fingerprint,
        )

    def submit_store(self, keys: Sequence[OffloadKey]) -> int:
        job = self.make_job(keys, is_promotion=False)
        for slot, block in enumerate(keys):
            self.slots[slot] = np.frombuffer(payload_of(block), np.uint8)
        self.tier.submit_store(job)
        return job.job_id

    def submit_load(self, keys: Sequence[OffloadKey]) -> int:
        job = self.make_job(keys, is_promotion=True)
        self.slots[:] = 0
        self.tier.submit_load(job)
        return job.job_id

    def result_of(self, job_id: int) -> JobResult:
        """Wait for a job, which must be the only one that is reported."""
        results: list[JobResult] = []

        def is_reported() -> bool:
            results.extend(self.tier.get_finished_jobs())
            return bool(results)

        wait_until(is_reported, f"the report of job {job_id}")
        (result,) = results
        assert result.job_id == job_id
        assert list(self.tier.get_finished_jobs()) == []
        return result

    def store(self, keys: Sequence[OffloadKey]) -> JobResult:
        return self.result_of(self.submit_store(keys))

    def load(self, keys: Sequence[OffloadKey]) -> JobResult:
        return self.result_of(self.submit_load(keys))

    def loaded(self, slot: int) -> bytes:
        return bytes(self.slots[slot].data)

    def kept(self) -> list[str]:
        """Keys in the tier, in the order of eviction."""
        return names(self.tier.blocks)

    def damage(self, block: OffloadKey) -> None:
        self.tier.blocks[block].payload[ROW_BYTES // 2] ^= 1


MakeBench = Callable[..., Bench]


@pytest.fixture
def make_bench() -> Iterator[MakeBench]:
    """Makes benches, and shuts their tiers down after the test."""
    made: list[Bench] = []

    def make(num_slots: int = 16, **options: Any) -> Bench:
        made.append(Bench(num_slots, **options))
        return made[-1]

    yield make
    for bench in made:
        bench.tier.shutdown()


class GatedTier(ExampleSecondaryTierManager):
    """Seals a block only when the test allows it, so that a store can be stopped at any block."""

    def __init__(self, **arguments: Any) -> None:
        self.permits = threading.Semaphore(0)
        self.num_waiting = 0
        """Number of seals begun."""
        self.was_impatient = False
        super().__init__(**arguments)

    def seal_block(self, job: TransferJob, key: OffloadKey, payload: memoryview) -> bytes:
        self.num_waiting += 1
        self.was_impatient |= not self.permits.acquire(timeout=PATIENCE_S)
        return super().seal_block(job, key, payload)

    def shutdown(self) -> None:
        self.permits.release(1000)
        super().shutdown()


def gated(bench: Bench) -> GatedTier:
    assert isinstance(bench.tier, GatedTier)
    return bench.tier


# --- there and back -----------------------------------------------------------------------------


@BOTH_MODES
def test_bytes_come_back_as_they_were(make_bench: MakeBench, simulate_async: bool) -> None:
    bench = make_bench(simulate_async=simulate_async)
    blocks = [*prompt("a", 3), key("a0", group=1)]
    assert bench.store(blocks).success
    wanted = [blocks[3], blocks[1], blocks[0]]
    result = bench.load(wanted)
    assert result.success
    assert [bench.loaded(slot) for slot in range(3)] == [payload_of(block) for block in wanted]


@BOTH_MODES
def test_a_job_is_timed_where_its_bytes_move(make_bench: MakeBench, simulate_async: bool) -> None:
    bench = make_bench(simulate_async=simulate_async)
    stored = bench.store(prompt("a", 2))
    loaded = bench.load(prompt("a", 2))
    assert stored.transfer_time is not None
    assert stored.transfer_time > 0
    assert loaded.transfer_time is not None
    assert loaded.transfer_time > 0


def test_latency_counts_as_time_of_the_job(make_bench: MakeBench) -> None:
    bench = make_bench(simulate_async=True, latency_ms=5)
    stored = bench.store(prompt("a", 1))
    assert stored.transfer_time is not None
    assert stored.transfer_time > 0.005


def test_what_is_kept_is_sealed_for_this_engine(make_bench: MakeBench) -> None:
    bench = make_bench()
    (block,) = blocks = prompt("a", 1)
    bench.store(blocks)
    read = seal.read(bench.tier.blocks[block].header)
    assert (read.key, read.payload_bytes) == (block, ROW_BYTES)
    assert read.fingerprint == make_config().fingerprint()
    assert read.writer == "engine-0"


def test_a_store_takes_a_copy(make_bench: MakeBench) -> None:
    bench = make_bench()
    bench.store(prompt("a", 1))
    bench.slots[:] = 7
    bench.load(prompt("a", 1))
    assert bench.loaded(0) == payload_of(key("a0"))


@BOTH_MODES
def test_what_is_here_already_is_reported_and_not_copied_again(
    make_bench: MakeBench, simulate_async: bool
) -> None:
    bench = make_bench(simulate_async=simulate_async)
    blocks = prompt("a", 3)
    bench.store(blocks)
    before = dict(bench.tier.blocks)
    again = bench.store(blocks)
    assert again.success
    assert again.transfer_time is None
    assert all(bench.tier.blocks[block] is before[block] for block in blocks)


@BOTH_MODES
@pytest.mark.parametrize("is_promotion", [False, True])
def test_an_empty_job_is_reported(
    make_bench: MakeBench, simulate_async: bool, is_promotion: bool
) -> None:
    bench = make_bench(simulate_async=simulate_async)
    submit = bench.submit_load if is_promotion else bench.submit_store
    assert bench.result_of(submit([])).success


@BOTH_MODES
def test_of_a_load_what_is_missing_fails_and_the_rest_arrives(
    make_bench: MakeBench, simulate_async: bool
) -> None:
    bench = make_bench(simulate_async=simulate_async)
    bench.store([key("a0"), key("a2")])
    result = bench.load(prompt("a", 3))
    assert not result.success
    assert names(result.successful_keys or ()) == ["a0", "a2"]
    assert bench.loaded(2) == payload_of(key("a2"))
    assert bench.loaded(1) == bytes(ROW_BYTES)


@BOTH_MODES
@pytest.mark.parametrize("is_promotion", [False, True])
def test_a_block_that_cannot_be_moved_fails_alone(
    make_bench: MakeBench,
    simulate_async: bool,
    is_promotion: bool,
    caplog: pytest.LogCaptureFixture,
) -> None:
    bench = make_bench(simulate_async=simulate_async)
    if is_promotion:
        bench.store(prompt("a", 2))
    no_such_slot = len(bench.slots)
    job = TransferJob(
        1000,
        prompt("a", 2),
        np.array([no_such_slot, 0]),
        is_promotion,
        CONTEXT,
        bench.tier.fingerprint,
    )
    with caplog.at_level(logging.ERROR):
        (bench.tier.submit_load if is_promotion else bench.tier.submit_store)(job)
        result = bench.result_of(1000)
    assert not result.success
    assert names(result.successful_keys or ()) == ["a1"]
    assert f"slot {no_such_slot}" in caplog.text
    assert bench.store(prompt("b", 1)).success  # and the tier goes on


# --- answers ------------------------------------------------------------------------------------


def test_answers_of_a_batch_end_with_the_first_miss(make_bench: MakeBench) -> None:
    bench = make_bench()
    bench.store([key("a0"), key("a1"), key("a3")])
    lookup_batch = bench.tier.lookup_batch
    assert list(lookup_batch(prompt("a", 4), CONTEXT)) == [HIT, HIT, MISS]
    assert list(lookup_batch(prompt("a", 2), CONTEXT)) == [HIT, HIT]
    assert list(lookup_batch(prompt("b", 2), CONTEXT)) == [MISS]
    assert list(lookup_batch([], CONTEXT)) == []


def test_groups_do_not_answer_for_each_other(make_bench: MakeBench) -> None:
    bench = make_bench()
    bench.store([key("a0", group=1)])
    assert bench.tier.lookup(key("a0", group=1), CONTEXT) is HIT
    assert bench.tier.lookup(key("a0", group=0), CONTEXT) is MISS


def test_a_block_on_its_way_in_is_a_miss(make_bench: MakeBench) -> None:
    bench = make_bench(tier_cls=GatedTier, simulate_async=True)
    job_id = bench.submit_store(prompt("a", 1))
    wait_until(lambda: gated(bench).num_waiting == 1, "the store")
    assert bench.tier.lookup(key("a0"), CONTEXT) is MISS
    gated(bench).permits.release()
    bench.result_of(job_id)
    assert bench.tier.lookup(key("a0"), CONTEXT) is HIT


def test_it_says_where_it_keeps_blocks(make_bench: MakeBench) -> None:
    tier = make_bench().tier
    assert (tier.medium, tier.locality) == (Medium.CPU, Locality.LOCAL)


# --- who leaves, who stays ----------------------------------------------------------------------


def test_the_oldest_prompt_leaves_first_and_its_head_last(make_bench: MakeBench) -> None:
    bench = make_bench(max_blocks=6)
    bench.store(prompt("a", 3))
    bench.store(prompt("b", 3))
    assert bench.kept() == ["a2", "a1", "a0", "b2", "b1", "b0"]
    bench.store(prompt("c", 2))
    assert bench.kept() == ["a0", "b2", "b1", "b0", "c1", "c0"]


def test_touch_and_load_and_store_count_as_use(make_bench: MakeBench) -> None:
    bench = make_bench(max_blocks=8)
    for name in "abcd":
        bench.store(prompt(name, 2))
    bench.tier.touch([*prompt("a", 2), key("unknown")], CONTEXT)
    bench.load(prompt("b", 2))
    bench.store(prompt("c", 2))
    assert bench.kept() == ["d1", "d0", "a1", "a0", "b1", "b0", "c1", "c0"]


def test_a_lookup_is_no_use(make_bench: MakeBench) -> None:
    bench = make_bench()
    bench.store(prompt("a", 1))
    bench.store(prompt("b", 1))
    bench.tier.lookup(key("a0"), CONTEXT)
    bench.tier.lookup_batch(prompt("a", 1), CONTEXT)
    assert bench.kept() == ["a0", "b0"]


@BOTH_MODES
def test_of_a_job_larger_than_the_tier_the_head_is_kept(
    make_bench: MakeBench, simulate_async: bool
) -> None:
    bench = make_bench(max_blocks=3, simulate_async=simulate_async)
    bench.store(prompt("old", 2))
    result = bench.store(prompt("a", 5))
    assert not result.success
    assert names(result.successful_keys or ()) == ["a0", "a1", "a2"]
    assert bench.kept() == ["a2", "a1", "a0"]
    again = bench.store(prompt("a", 5))
    assert names(again.successful_keys or ()) == ["a0", "a1", "a2"]
    assert bench.kept() == ["a2", "a1", "a0"]


def test_a_tail_leaves_for_its_own_head(make_bench: MakeBench) -> None:
    bench = make_bench(max_blocks=3)
    bench.store(prompt("a", 5)[2:])
    result = bench.store(prompt("a", 5))
    assert sorted(names(result.successful_keys or ())) == ["a0", "a1", "a2"]
    assert bench.kept() == ["a2", "a1", "a0"]


def test_a_head_that_was_old_does_not_leave_for_its_own_tail(make_bench: MakeBench) -> None:
    bench = make_bench(max_blocks=3)
    bench.store(prompt("a", 1))
    bench.store(prompt("b", 2))
    assert bench.store(prompt("a", 3)).success
    assert bench.kept() == ["a2", "a1", "a0"]


def test_blocks_being_written_take_room(make_bench: MakeBench) -> None:
    bench = make_bench(tier_cls=GatedTier, simulate_async=True, max_blocks=4)
    bench.submit_store(prompt("a", 3))
    bench.submit_store(prompt("b", 3))
    bench.submit_store(prompt("c", 3))
    gated(bench).permits.release(9)
    bench.tier.drain_jobs()
    results = {result.job_id: result for result in bench.tier.get_finished_jobs()}
    assert sorted(results) == [0, 1, 2]
    assert [len(results[i].successful_keys or ()) for i in (1, 2)] == [1, 0]
    assert bench.kept() == ["a2", "a1", "a0", "b0"]
    # All room is given back.
    gated(bench).permits.release(4)
    assert bench.store(prompt("d", 4)).success


def test_two_stores_of_one_block_keep_it_once(make_bench: MakeBench) -> None:
    bench = make_bench(tier_cls=GatedTier, simulate_async=True, max_blocks=2)
    bench.submit_store(prompt("a", 1))
    bench.submit_store(prompt("a", 1))
    gated(bench).permits.release(2)
    bench.tier.drain_jobs()
    assert [result.success for result in bench.tier.get_finished_jobs()] == [True, True]
    assert [e.keys for e in bench.tier.take_events()] == [prompt("a", 1)]
    gated(bench).permits.release(2)
    assert bench.store(prompt("b", 2)).success
    assert bench.kept() == ["b1", "b0"]


def test_a_block_may_be_evicted_while_it_is_loaded(make_bench: MakeBench) -> None:
    bench = make_bench(simulate_async=True, latency_ms=20, max_blocks=1)
    bench.store(prompt("a", 1))
    bench.submit_load(prompt("a", 1))
    bench.tier.submit_store(bench.make_job(prompt("b", 1), is_promotion=False))
    assert bench.kept() == []
    bench.tier.drain_jobs()
    assert all(result.success for result in bench.tier.get_finished_jobs())
    assert bench.loaded(0) == payload_of(key("a0"))
    assert bench.kept() == ["b0"]


# --- blocks that are not what they should be ----------------------------------------------------


def _flip(blocks: dict[OffloadKey, SealedBlock]) -> None:
    blocks[key("a0")].payload[0] ^= 0x80


def _truncate(blocks: dict[OffloadKey, SealedBlock]) -> None:
    header, payload = blocks[key("a0")]
    blocks[key("a0")] = SealedBlock(header, payload[:-1])


def _lengthen(blocks: dict[OffloadKey, SealedBlock]) -> None:
    payload = np.zeros(ROW_BYTES + 1, np.uint8)
    header = seal.make(key("a0"), payload.data, make_config().fingerprint(), "w")
    blocks[key("a0")] = SealedBlock(header, payload)


def _swap(blocks: dict[OffloadKey, SealedBlock]) -> None:
    blocks[key("a0")] = blocks[key("a1")]


def _replace_by_foreign(blocks: dict[OffloadKey, SealedBlock]) -> None:
    payload = blocks[key("a0")].payload
    blocks[key("a0")] = SealedBlock(seal.make(key("a0"), payload.data, b"f" * 16, "w"), payload)


def _lose_seal(blocks: dict[OffloadKey, SealedBlock]) -> None:
    blocks[key("a0")] = SealedBlock(b"", blocks[key("a0")].payload)


@BOTH_MODES
@pytest.mark.parametrize(
    ("damage", "reason"),
    [
        (_flip, SealFailure.DIGEST),
        (_truncate, SealFailure.DIGEST),
        (_lengthen, SealFailure.LENGTH),
        (_swap, SealFailure.KEY),
        (_replace_by_foreign, SealFailure.FINGERPRINT),
        (_lose_seal, SealFailure.NOT_SEALED),
    ],
)
def test_a_damaged_block_is_refused_counted_and_forgotten(
    make_bench: MakeBench,
    simulate_async: bool,
    damage: Callable[[dict[OffloadKey, SealedBlock]], None],
    reason: SealFailure,
) -> None:
    bench = make_bench(simulate_async=simulate_async)
    bench.store(prompt("a", 2))
    damage(bench.tier.blocks)
    list(bench.tier.take_events())
    result = bench.load(prompt("a", 2))
    assert not result.success
    assert names(result.successful_keys or ()) == ["a1"]
    assert bench.tier.take_seal_failures() == {reason: 1}
    assert bench.tier.lookup(key("a0"), CONTEXT) is MISS
    assert list(bench.tier.take_events()) == [
        OffloadingEvent([key("a0")], Medium.CPU, removed=True, locality=Locality.LOCAL)
    ]
    # The next store brings it back.
    assert bench.store(prompt("a", 2)).success
    assert bench.load(prompt("a", 2)).success


# --- epochs -------------------------------------------------------------------------------------

LATER = b"later".ljust(16)


@BOTH_MODES
def test_an_epoch_ends_all_that_was_kept(make_bench: MakeBench, simulate_async: bool) -> None:
    bench = make_bench(simulate_async=simulate_async)
    bench.store(prompt("a", 2))
    memory = weakref.ref(bench.tier.blocks[key("a0")].payload)
    bench.tier.begin_epoch(LATER)
    assert bench.tier.lookup(key("a0"), CONTEXT) is MISS
    gc.collect()
    assert memory() is None
    result = bench.load(prompt("a", 2))
    assert not result.success
    assert not result.successful_keys
    assert [e.removed for e in bench.tier.take_events()] == [False, True]
    # And the next one begins.
    bench.store(prompt("a", 2))
    assert bench.load(prompt("a", 2)).success
    assert seal.read(bench.tier.blocks[key("a0")].header).fingerprint == LATER


def test_a_store_of_an_earlier_epoch_ends_unseen(make_bench: MakeBench) -> None:
    bench = make_bench(tier_cls=GatedTier, simulate_async=True, max_blocks=2)
    job_id = bench.submit_store(prompt("a", 2))
    wait_until(lambda: gated(bench).num_waiting == 1, "the store")
    bench.tier.begin_epoch(LATER)
    gated(bench).permits.release(2)
    bench.result_of(job_id)
    assert bench.kept() == []
    assert list(bench.tier.take_events()) == []
    gated(bench).permits.release(2)
    assert bench.store(prompt("b", 2)).success  # its room is free again


@pytest.mark.parametrize("is_promotion", [False, True])
def test_a_job_of_an_earlier_epoch_is_reported_as_failed(
    make_bench: MakeBench, is_promotion: bool
) -> None:
    bench = make_bench()
    job = bench.make_job(prompt("a", 1), is_promotion)
    bench.tier.begin_epoch(LATER)
    bench.store(prompt("a", 1))
    (bench.tier.submit_load if is_promotion else bench.tier.submit_store)(job)
    result = bench.result_of(job.job_id)
    assert not result.success
    assert not result.successful_keys
    assert bench.load(prompt("a", 1)).success  # the later block is unharmed


def test_a_load_under_way_ends_in_the_epoch_it_began_in(make_bench: MakeBench) -> None:
    bench = make_bench(simulate_async=True, latency_ms=50)
    bench.store(prompt("a", 1))
    job_id = bench.submit_load(prompt("a", 1))
    bench.tier.begin_epoch(LATER)
    assert bench.result_of(job_id).success
    assert bench.loaded(0) == payload_of(key("a0"))


# --- misfortune ---------------------------------------------------------------------------------


def test_every_block_can_be_lost(make_bench: MakeBench) -> None:
    bench = make_bench(loss=1)
    bench.store(prompt("a", 3))
    assert bench.tier.lookup(key("a0"), CONTEXT) is HIT
    result = bench.load(prompt("a", 3))
    assert not result.success
    assert not result.successful_keys
    assert bench.tier.lookup(key("a0"), CONTEXT) is MISS
    assert bench.tier.get_stats().counters["kvtier_example_forgotten_blocks"] == 3


def test_losses_depend_on_the_seed_alone(make_bench: MakeBench) -> None:
    def survivors(**options: Any) -> list[str]:
        bench = make_bench(num_slots=64, loss=0.5, **options)
        bench.store(prompt("a", 64))
        return names(bench.load(prompt("a", 64)).successful_keys or ())

    assert 0 < len(survivors(seed=1)) < 64
    assert survivors(seed=1) == survivors(seed=1) == survivors(seed=1, simulate_async=True)
    assert survivors(seed=1) != survivors(seed=2)


@pytest.mark.parametrize(
    ("options", "complaint"),
    [
        ({"max_blocks": 0}, "max_blocks: got 0; allowed: a whole number, 1 or more. Write 1"),
        ({"max_blocks": "10"}, "Write 10 without quotes"),
        ({"max_blocks": None}, "max_blocks: got null; allowed: a whole number"),
        ({"simulate_async": "true"}, "simulate_async: got"),
        ({"simulate_async": True, "latency_ms": -1}, "latency_ms: got -1; allowed: a number of"),
        ({"simulate_async": True, "latency_ms": float("nan")}, "latency_ms: got NaN"),
        ({"simulate_async": True, "latency_ms": True}, "latency_ms: got true"),
        ({"latency_ms": 5}, "latency_ms: got 5; allowed: 0 while simulate_async is false"),
        ({"loss": 1.5}, "loss: got 1.5; allowed: a number from 0"),
        ({"loss": "0.5"}, "without quotes"),
        ({"seed": -1}, "seed: got -1; allowed: a whole number, 0 or more"),
        ({"loss": 2, "seed": 0.5}, "2 problems in the configuration"),
    ],
)
def test_impossible_options_are_refused(options: dict[str, Any], complaint: str) -> None:
    with pytest.raises(ConfigError) as refused:
        Bench(**options)
    assert complaint in str(refused.value)


def test_unknown_options_are_refused() -> None:
    with pytest.raises(ConfigError, match=r'^max_block: .*Did you mean "max_blocks"'):
        Bench(max_block=5)


# --- the I/O thread -----------------------------------------------------------------------------


def test_the_scheduler_never_waits_for_the_io_thread(make_bench: MakeBench) -> None:
    bench = make_bench(tier_cls=GatedTier, simulate_async=True)
    tier = gated(bench)
    tier.permits.release(2)
    bench.store(prompt("a", 2))
    stuck = bench.submit_store(prompt("b", 2))
    wait_until(lambda: tier.num_waiting == 3, "the store to be stuck")
    # While a copy does not end, every call returns.
    bench.submit_store(prompt("c", 4))
    bench.submit_load(prompt("a", 2))
    tier.lookup(key("a0"), CONTEXT)
    tier.lookup_batch(prompt("a", 2), CONTEXT)
    tier.touch(prompt("a", 2), CONTEXT)
    tier.on_request_finished(CONTEXT)
    assert list(tier.get_finished_jobs()) == []
    list(tier.take_events())
    tier.get_stats()
    tier.begin_epoch(LATER)
    assert not tier.was_impatient
    tier.permits.release(100)
    tier.drain_jobs()
    assert {result.job_id for result in tier.get_finished_jobs()} == {stuck, stuck + 1, stuck + 2}


def test_a_load_waits_for_one_block_of_a_store_at_most(make_bench: MakeBench) -> None:
    bench = make_bench(tier_cls=GatedTier, simulate_async=True)
    tier = gated(bench)
    tier.permits.release(2)
    bench.store(prompt("a", 2))
    bench.submit_store(prompt("b", 4))
    bench.submit_store(prompt("c", 4))
    wait_until(lambda: tier.num_waiting == 3, "the first block of the store")
    load = bench.submit_load(prompt("a", 2))
    tier.permits.release()
    assert bench.result_of(load).success
    assert tier.lookup(key("b0"), CONTEXT) is MISS  # the store that it overtook has not ended
    tier.permits.release(100)
    tier.drain_jobs()
    stores = [(result.job_id, result.success) for result in tier.get_finished_jobs()]
    assert stores == [(1, True), (2, True)]


def test_drain_waits_for_all_and_loses_no_result(make_bench: MakeBench) -> None:
    bench = make_bench(num_slots=64, simulate_async=True, latency_ms=10)
    ids = [bench.submit_store(prompt(name, 4)) for name in "abcdefgh"]
    bench.tier.drain_jobs()
    results = list(bench.tier.get_finished_jobs())
    assert sorted(result.job_id for result in results) == ids
    assert all(result.success for result in results)
    assert list(bench.tier.get_finished_jobs()) == []


def test_drain_without_jobs_returns(make_bench: MakeBench) -> None:
    make_bench().tier.drain_jobs()
    make_bench(simulate_async=True).tier.drain_jobs()


def test_shutdown_gives_up_what_has_not_begun(make_bench: MakeBench) -> None:
    bench = make_bench(simulate_async=True, latency_ms=3_600_000)
    threads = threading.active_count()
    ids = [bench.submit_store(prompt("a", 2)), bench.submit_store(prompt("b", 2))]
    bench.tier.shutdown()
    assert threading.active_count() == threads - 1
    results = list(bench.tier.get_finished_jobs())
    assert sorted(result.job_id for result in results) == ids
    assert not any(result.success or result.successful_keys for result in results)
    assert list(bench.tier.get_finished_jobs()) == []
    bench.tier.shutdown()  # a second call does nothing
    assert list(bench.tier.get_finished_jobs()) == []


def test_shutdown_stops_a_job_between_two_blocks(make_bench: MakeBench) -> None:
    bench = make_bench(tier_cls=GatedTier, simulate_async=True)
    tier = gated(bench)
    job_id = bench.submit_store(prompt("a", 4))
    wait_until(lambda: tier.num_waiting == 1, "the store")
    stopper = threading.Thread(target=ExampleSecondaryTierManager.shutdown, args=(tier,))
    stopper.start()
    tier.drain_jobs()  # returns as soon as `stop` is called
    tier.permits.release(100)
    stopper.join(PATIENCE_S)
    assert not stopper.is_alive()
    result = bench.result_of(job_id)
    assert not result.success
    assert names(result.successful_keys or ()) == ["a0"]


def test_shutdown_ends_a_drain_that_takes_too_long(make_bench: MakeBench) -> None:
    bench = make_bench(simulate_async=True, latency_ms=3_600_000)
    job_id = bench.submit_store(prompt("a", 1))
    drain = threading.Thread(target=bench.tier.drain_jobs)
    drain.start()
    bench.tier.shutdown()
    drain.join(PATIENCE_S)
    assert not drain.is_alive()
    assert not bench.result_of(job_id).success


@BOTH_MODES
def test_a_job_after_shutdown_is_reported_as_failed(
    make_bench: MakeBench, simulate_async: bool
) -> None:
    bench = make_bench(simulate_async=simulate_async)
    bench.tier.shutdown()
    assert not bench.store(prompt("a", 1)).success
    assert not bench.load(prompt("b", 1)).success


@BOTH_MODES
def test_shutdown_lets_go_of_the_primary_tiers_memory(
    simulate_async: bool, caplog: pytest.LogCaptureFixture
) -> None:
    region = SharedOffloadRegion("example-tier-test", 2, None, 4096, 4096)
    try:
        tier = ExampleSecondaryTierManager(
            CPUOffloadingSpec(make_config()),
            region.create_kv_memoryview(),
            "example",
            simulate_async=simulate_async,
        )
        job = TransferJob(1, prompt("a", 2), np.arange(2), False, CONTEXT, tier.fingerprint)
        tier.submit_store(job)
        tier.drain_jobs()
        tier.shutdown()
        with pytest.raises(ValueError, match="released"):
            tier.rows[0]
    finally:
        with caplog.at_level(logging.WARNING):
            region.cleanup()
    assert caplog.text == ""  # no slice of it is left


# --- what is told -------------------------------------------------------------------------------


@BOTH_MODES
def test_who_left_is_told_before_who_came(make_bench: MakeBench, simulate_async: bool) -> None:
    bench = make_bench(max_blocks=3, simulate_async=simulate_async)
    bench.store(prompt("a", 3))
    bench.store(prompt("b", 2))
    assert list(bench.tier.take_events()) == [
        OffloadingEvent(prompt("a", 3), Medium.CPU, False, Locality.LOCAL),
        OffloadingEvent([key("a2"), key("a1")], Medium.CPU, True, Locality.LOCAL),
        OffloadingEvent(prompt("b", 2), Medium.CPU, False, Locality.LOCAL),
    ]
    assert list(bench.tier.take_events()) == []


def test_events_carry_the_locality_that_the_user_gave(make_bench: MakeBench) -> None:
    bench = make_bench()
    bench.tier.locality = Locality.REMOTE
    bench.store(prompt("a", 1))
    assert [event.locality for event in bench.tier.take_events()] == [Locality.REMOTE]


def test_events_that_nobody_takes_do_not_pile_up(make_bench: MakeBench) -> None:
    bench = make_bench()
    bench.tier.enable_kv_events = False
    bench.store(prompt("a", 1))
    bench.tier.enable_kv_events = True
    assert list(bench.tier.take_events()) == []


def test_figures_are_defined_and_count_since_the_last_call(make_bench: MakeBench) -> None:
    bench = make_bench(max_blocks=2)
    bench.store(prompt("a", 2))
    bench.store(prompt("b", 3))
    bench.damage(key("b0"))
    bench.load(prompt("b", 2))
    stats = bench.tier.get_stats()
    assert stats.gauges == {"kvtier_example_resident_blocks": 1}
    assert stats.counters == {
        "kvtier_example_evicted_blocks": 2,
        "kvtier_example_refused_blocks": 1,
        "kvtier_example_forgotten_blocks": 1,
    }
    assert set(bench.tier.get_stats().counters.values()) == {0}
    definitions = ExampleSecondaryTierManager.build_metric_definitions({})
    assert definitions.keys() == stats.gauges.keys() | stats.counters.keys()


# --- in any order -------------------------------------------------------------------------------

UNIVERSE = [key(f"{name}{i}") for name in "abc" for i in range(4)]
some_blocks = st.lists(st.sampled_from(UNIVERSE), unique=True, max_size=6)


class ExampleTierMachine(RuleBasedStateMachine):
    """Random calls in random order: no job is lost, no wrong byte is loaded, nothing grows, and the
    events match the blocks in the tier."""

    @initialize(max_blocks=st.integers(1, 8), simulate_async=st.booleans())
    def start(self, max_blocks: int, simulate_async: bool) -> None:
        self.bench = Bench(len(UNIVERSE) * 20, max_blocks=max_blocks, simulate_async=simulate_async)
        self.max_blocks = max_blocks
        self.open: dict[int, TransferJob] = {}
        self.told: set[OffloadKey] = set()
        self.num_epochs = 0
        self.next_slot = 0

    def make_job(self, keys: list[OffloadKey], is_promotion: bool) -> TransferJob | None:
        """A job with slots that no other open job uses."""
        if not self.open:
            self.next_slot = 0
        slots = np.arange(self.next_slot, self.next_slot + len(keys))
        if slots.size and slots[-1] >= len(self.bench.slots):
            return None
        self.next_slot += len(keys)
        made = self.bench.make_job(keys, is_promotion)
        job = TransferJob(made.job_id, keys, slots, is_promotion, CONTEXT, made.fingerprint)
        self.open[job.job_id] = job
        return job

    def payload(self, block: OffloadKey, fingerprint: bytes) -> bytes:
        return payload_of(OffloadKey(block + fingerprint))

    @rule(keys=some_blocks)
    def store(self, keys: list[OffloadKey]) -> None:
        if job := self.make_job(keys, is_promotion=False):
            for block, slot in zip(keys, job.block_ids, strict=True):
                written = self.payload(block, job.fingerprint)
                self.bench.slots[slot] = np.frombuffer(written, np.uint8)
            self.bench.tier.submit_store(job)

    @rule(keys=some_blocks)
    def load(self, keys: list[OffloadKey]) -> None:
        if job := self.make_job(keys, is_promotion=True):
            self.bench.slots[job.block_ids] = 0
            self.bench.tier.submit_load(job)

    @rule(keys=some_blocks)
    def touch(self, keys: list[OffloadKey]) -> None:
        self.bench.tier.touch(keys, CONTEXT)

    @rule(keys=some_blocks)
    def look_up(self, keys: list[OffloadKey]) -> None:
        one_by_one = SecondaryTierManager.lookup_batch(self.bench.tier, keys, CONTEXT)
        assert list(self.bench.tier.lookup_batch(keys, CONTEXT)) == list(one_by_one)

    @rule(block=st.sampled_from(UNIVERSE))
    def damage(self, block: OffloadKey) -> None:
        if block in self.bench.tier.blocks:
            self.bench.damage(block)

    @rule()
    def begin_epoch(self) -> None:
        self.num_epochs += 1
        self.bench.tier.begin_epoch(self.num_epochs.to_bytes(16, "big"))
        assert not any(self.bench.tier.lookup(block, CONTEXT) is HIT for block in UNIVERSE)

    @rule()
    def drain(self) -> None:
        self.bench.tier.drain_jobs()

    @rule()
    def poll(self) -> None:
        for result in self.bench.tier.get_finished_jobs():
            job = self.open.pop(result.job_id)  # an unknown job, or one reported twice, fails here
            done = set(job.keys if result.success else result.successful_keys or ())
            assert done <= set(job.keys)
            if job.is_promotion:
                for block, slot in zip(job.keys, job.block_ids.tolist(), strict=True):
                    if block in done:
                        assert self.bench.loaded(slot) == self.payload(block, job.fingerprint)

    @precondition(lambda self: hasattr(self, "bench"))
    @invariant()
    def events_tell_what_is_kept_and_that_is_bounded(self) -> None:
        for event in self.bench.tier.take_events():
            if event.removed:
                assert self.told.issuperset(event.keys)
                self.told.difference_update(event.keys)
            else:
                assert self.told.isdisjoint(event.keys)
                self.told.update(event.keys)
            assert len(self.told) <= self.max_blocks
        assert self.told == {b for b in UNIVERSE if self.bench.tier.lookup(b, CONTEXT) is HIT}

    def teardown(self) -> None:
        if hasattr(self, "bench"):
            self.bench.tier.drain_jobs()
            self.bench.tier.shutdown()
            self.poll()
            assert not self.open


TestExampleTierMachine = ExampleTierMachine.TestCase
