"""The primary tier's promises, one by one. Random orders of calls are in the state machine."""

from __future__ import annotations

import logging
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest

from kvtier.base import (
    LookupResult,
    Medium,
    OffloadKey,
    PrepareStoreOutput,
    ReqContext,
    ScheduleEndContext,
    make_offload_key,
)
from kvtier.cpu.common import CPULoadStoreSpec
from kvtier.cpu.manager import NO_BLOCK, CPUOffloadingManager
from kvtier.cpu.policies.arc import ARCCachePolicy
from kvtier.cpu.policies.base import SlotState
from kvtier.cpu.policies.lru import LRUCachePolicy
from kvtier.cpu.spec import CPUOffloadingSpec
from kvtier.misuse import ContractViolation

POLICIES = ["lru", "arc"]


def key(name: str) -> OffloadKey:
    return make_offload_key(name.encode(), 0)


def prompt(name: str, length: int) -> list[OffloadKey]:
    """Keys of a prompt, head first."""
    return [key(f"{name}{i}") for i in range(length)]


def names(keys: Iterable[OffloadKey]) -> set[str]:
    return {k[:-4].decode() for k in keys}


def slots_of(output: PrepareStoreOutput) -> list[int]:
    assert isinstance(output.store_spec, CPULoadStoreSpec)
    ids: list[int] = output.store_spec.block_ids.tolist()
    return ids


class Engine:
    """Calls a manager for one request as an engine would."""

    def __init__(self, manager: CPUOffloadingManager, name: str) -> None:
        self.manager = manager
        self.context = ReqContext(name)
        manager.on_new_request(self.context)

    def look_up(self, keys: Iterable[OffloadKey]) -> int:
        hits = 0
        for k in keys:
            if self.manager.lookup(k, self.context) is not LookupResult.HIT:
                break
            hits += 1
        return hits

    def prepare_store(self, keys: list[OffloadKey]) -> PrepareStoreOutput:
        output = self.manager.prepare_store(keys, self.context)
        assert output is not None
        return output

    def store(self, keys: list[OffloadKey]) -> set[str]:
        """Store, and return the evicted keys."""
        output = self.prepare_store(keys)
        self.manager.complete_store(set(output.keys_to_store), self.context)
        return names(output.evicted_keys)

    def finish(self) -> None:
        self.manager.on_request_finished(self.context)

    def end_step(self) -> None:
        self.manager.on_schedule_end(ScheduleEndContext((), ()))


def run(manager: CPUOffloadingManager, name: str, keys: list[OffloadKey]) -> set[str]:
    """One whole request: look up, store what is missing, finish. Returns the evicted keys."""
    engine = Engine(manager, name)
    engine.look_up(keys)
    evicted = engine.store(keys)
    engine.finish()
    return evicted


def make_full(policy: str, num_blocks: int = 8) -> CPUOffloadingManager:
    """A tier full with two prompts of equal length, `a` older than `b`."""
    manager = CPUOffloadingManager(num_blocks, cache_policy=policy)
    run(manager, "A", prompt("a", num_blocks // 2))
    run(manager, "B", prompt("b", num_blocks // 2))
    return manager


# --- order of eviction --------------------------------------------------------------------------


@pytest.mark.parametrize("policy", POLICIES)
def test_the_oldest_prompt_goes_first_and_its_head_last(policy: str) -> None:
    manager = make_full(policy)
    evicted = [run(manager, f"C{i}", prompt(f"c{i}", 1)) for i in range(5)]
    assert evicted == [{"a3"}, {"a2"}, {"a1"}, {"a0"}, {"b3"}]


@pytest.mark.parametrize("policy", POLICIES)
def test_a_prompt_stored_in_steps_still_loses_its_tail_first(policy: str) -> None:
    manager = CPUOffloadingManager(6, cache_policy=policy)
    engine = Engine(manager, "A")
    keys = prompt("a", 6)
    for start in (0, 2, 4):
        engine.store(keys[start : start + 2])
    assert Engine(manager, "B").store(prompt("b", 2)) == {"a5", "a4"}


@pytest.mark.parametrize("policy", POLICIES)
def test_completions_do_not_change_the_order(policy: str) -> None:
    manager = CPUOffloadingManager(6, cache_policy=policy)
    engine = Engine(manager, "A")
    keys = prompt("a", 4)
    manager.prepare_store(keys, engine.context)
    for k in keys:  # first to last, one by one
        manager.complete_store([k], engine.context)
    manager.prepare_load(keys, engine.context)
    for k in keys:
        manager.complete_load([k], engine.context)
    engine.finish()
    assert run(manager, "B", prompt("b", 4)) == {"a3", "a2"}


def test_a_gap_closed_later_is_in_its_place() -> None:
    manager = CPUOffloadingManager(6)
    keys = prompt("a", 4)
    first = Engine(manager, "A")
    first.prepare_store(keys)
    manager.complete_store([keys[0], keys[2], keys[3]], first.context)
    manager.complete_store([keys[1]], first.context, success=False)
    first.finish()
    run(manager, "again", keys)
    assert [run(manager, f"B{i}", prompt(f"b{i}", 2)) for i in range(3)] == [
        set(),
        {"a3", "a2"},
        {"a1", "a0"},
    ]


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("how", ["lookup", "lookup_prefix", "load", "store", "touch"])
def test_use_is_learnt_from_every_call_that_reveals_it(policy: str, how: str) -> None:
    manager = make_full(policy)
    engine = Engine(manager, "C")
    keys = prompt("a", 4)
    if how == "lookup":
        engine.look_up(keys)
    elif how == "lookup_prefix":
        manager.lookup_prefix(keys, engine.context)
    elif how == "load":
        manager.prepare_load(keys, engine.context)
        manager.complete_load(keys, engine.context)
    elif how == "store":
        assert engine.store(keys) == set()
    else:
        manager.touch(keys, engine.context)
    assert run(manager, "D", prompt("d", 4)) == {"b0", "b1", "b2", "b3"}


def test_a_finished_request_was_the_last_to_use_its_blocks() -> None:
    manager = CPUOffloadingManager(8)
    long = Engine(manager, "long")
    long.store(prompt("a", 4))
    run(manager, "B", prompt("b", 4))
    long.finish()
    assert run(manager, "C", prompt("c", 4)) == {"b0", "b1", "b2", "b3"}


def test_lookups_from_the_end_of_a_prompt_do_not_turn_its_order_round() -> None:
    manager = make_full("lru")
    reader = Engine(manager, "reader")
    keys = prompt("a", 4)
    for k in reversed(keys):
        assert manager.lookup(k, reader.context) is LookupResult.HIT
    manager.prepare_load(keys, reader.context)
    manager.complete_load(set(keys), reader.context)
    reader.finish()
    assert [run(manager, f"C{i}", prompt(f"c{i}", 2)) for i in range(3)] == [
        {"b3", "b2"},
        {"b1", "b0"},
        {"a3", "a2"},
    ]


def test_a_waiting_request_does_not_renew_its_claim_at_every_step() -> None:
    manager = make_full("lru")
    waiting = Engine(manager, "waiting")
    waiting.look_up(prompt("a", 4))
    waiting.end_step()
    run(manager, "other", prompt("b", 4))
    for _ in range(3):
        assert waiting.look_up(prompt("a", 4)) == 4
        waiting.end_step()
    assert run(manager, "D", prompt("d", 4)) == {"a0", "a1", "a2", "a3"}


def test_arc_counts_a_request_once_however_often_it_asks() -> None:
    manager = make_full("arc")
    policy = manager.slots.policy
    assert isinstance(policy, ARCCachePolicy)
    keys = prompt("a", 4)
    first = Engine(manager, "C")
    first.store(prompt("c", 1))
    for _ in range(3):
        first.look_up(prompt("c", 1))
        manager.touch(prompt("c", 1), first.context)
        first.end_step()
    assert key("c0") in policy.t1, "its own block, asked for again, has been used once"
    second = Engine(manager, "D")
    second.look_up(keys)
    second.end_step()
    assert names(policy.t2) == {"a0", "a1", "a2"}, "used by a second request"


def test_arc_starts_anew_after_a_reset_and_its_target_stays_within_the_tier() -> None:
    manager = CPUOffloadingManager(4, cache_policy="arc")
    policy = manager.slots.policy
    assert isinstance(policy, ARCCachePolicy)
    run(manager, "F", prompt("f", 1))
    run(manager, "F again", prompt("f", 1))
    for i in range(60):
        run(manager, f"r{i}", prompt(f"p{i % 4}-", 1))
        assert policy.target_t1_size <= 4
    assert policy.target_t1_size > 0
    manager.reset_cache()
    assert policy.target_t1_size == 0


def test_arc_takes_a_block_back_as_one_used_twice() -> None:
    manager = make_full("arc")
    policy = manager.slots.policy
    assert isinstance(policy, ARCCachePolicy)
    run(manager, "B again", prompt("b", 4))
    run(manager, "C", prompt("c", 4))
    assert names(policy.b1) == {"a0", "a1", "a2", "a3"}
    run(manager, "A again", prompt("a", 2))
    assert names(policy.t2) == {"a0", "a1", "b0", "b1", "b2", "b3"}
    assert policy.target_t1_size == 2, "both had been evicted from t1"


@pytest.mark.parametrize("policy", POLICIES)
def test_a_store_is_refused_only_if_too_few_blocks_can_leave(policy: str) -> None:
    manager = make_full(policy)
    reader = Engine(manager, "reader")
    # ARC prefers one list, but the evictable blocks are on the other.
    manager.prepare_load(prompt("a", 4), reader.context)
    writer = Engine(manager, "writer")
    assert manager.prepare_store(prompt("x", 5), writer.context) is None
    before = sorted(manager.resident_keys())
    assert sorted(manager.resident_keys()) == before, "all or nothing"
    output = writer.prepare_store(prompt("x", 3))
    assert names(output.evicted_keys) == {"b1", "b2", "b3"}


@pytest.mark.parametrize("policy", POLICIES)
def test_of_a_prompt_larger_than_the_tier_the_head_is_stored(policy: str) -> None:
    manager = CPUOffloadingManager(8, cache_policy=policy)
    output = Engine(manager, "A").prepare_store(prompt("a", 20))
    assert output.keys_to_store == prompt("a", 20)[: 8 - manager.reserve]
    assert manager.get_stats().counters["kvtier_cpu_truncated_blocks"] == 12 + manager.reserve


@pytest.mark.parametrize("policy", POLICIES)
def test_a_request_does_not_evict_its_own_head_for_its_tail(policy: str) -> None:
    manager = CPUOffloadingManager(8, cache_policy=policy)
    engine = Engine(manager, "A")
    keys = prompt("a", 20)
    evicted = [engine.store(keys[start : start + 4]) for start in range(0, 20, 4)]
    assert evicted == [set()] * 5
    assert engine.look_up(keys) == 8


def test_a_request_that_filled_the_tier_may_store_again_after_a_failed_store() -> None:
    manager = CPUOffloadingManager(1)
    writer, other = ReqContext("writer"), ReqContext("other")
    keys = prompt("p", 2)
    for context in (writer, other):
        manager.on_new_request(context)
    assert manager.prepare_store(keys[:1], writer) is not None
    output = manager.prepare_store(keys, other)
    assert output is not None
    assert output.keys_to_store == [], "its own head, which is being written, fills the tier"
    manager.complete_store(keys[:1], writer, success=False)
    output = manager.prepare_store(keys, other)
    assert output is not None
    assert output.keys_to_store == keys[:1]


def test_what_has_left_since_a_prompt_was_used_is_stored_again() -> None:
    manager = make_full("lru")
    again = Engine(manager, "again")
    manager.touch(prompt("a", 4), again.context)
    assert again.prepare_store(prompt("a", 4)).keys_to_store == []
    assert run(manager, "other", prompt("c", 6)) == {"b0", "b1", "b2", "b3", "a2", "a3"}
    assert names(again.prepare_store(prompt("a", 4)).keys_to_store) == {"a2", "a3"}


def test_a_request_uses_what_another_has_stored_since_it_came() -> None:
    manager = CPUOffloadingManager(4)
    waiting = Engine(manager, "waiting")
    manager.touch(prompt("p", 2), waiting.context)
    run(manager, "first", prompt("p", 2))
    run(manager, "other", prompt("q", 2))
    manager.touch(prompt("p", 2), waiting.context)
    assert run(manager, "last", prompt("r", 2)) == {"q0", "q1"}


def test_a_key_offered_twice_in_one_call_is_stored_once() -> None:
    manager = CPUOffloadingManager(8)
    keys = prompt("a", 2)
    assert Engine(manager, "A").prepare_store(keys + keys).keys_to_store == keys


# --- slots --------------------------------------------------------------------------------------


def test_a_block_is_no_hit_before_it_is_stored() -> None:
    manager = CPUOffloadingManager(4)
    engine = Engine(manager, "A")
    manager.prepare_store([key("a")], engine.context)
    assert manager.lookup(key("a"), engine.context) is LookupResult.HIT_PENDING
    manager.complete_store([key("a")], engine.context)
    assert manager.lookup(key("a"), engine.context) is LookupResult.HIT


def test_a_slot_has_a_new_generation_for_every_block() -> None:
    manager = CPUOffloadingManager(2)
    generations = []
    for name in ("a", "b", "c"):
        engine = Engine(manager, name)
        engine.store([key(name)])
        block = manager.slots.policy.get(key(name))
        assert block is not None
        generations.append((block.block_id, block.generation))
        engine.finish()
    assert len(set(generations)) == 3


def test_a_pinned_block_stays() -> None:
    manager = make_full("lru")
    reader = Engine(manager, "reader")
    spec = manager.prepare_load(prompt("a", 2), reader.context)
    assert isinstance(spec, CPULoadStoreSpec)
    assert run(manager, "C", prompt("c", 4)) == {"a2", "a3", "b2", "b3"}
    manager.complete_load(prompt("a", 2), reader.context)
    assert reader.look_up(prompt("a", 2)) == 2


def test_loading_the_same_block_twice_takes_two_completions() -> None:
    manager = make_full("lru")
    reader = Engine(manager, "reader")
    for _ in range(2):
        manager.prepare_load([key("a0")], reader.context)
    manager.complete_load([key("a0")], reader.context)
    assert manager.get_stats().gauges["kvtier_cpu_pinned_blocks"] == 1
    manager.complete_load([key("a0")], reader.context)
    assert manager.get_stats().gauges["kvtier_cpu_pinned_blocks"] == 0


def test_two_loads_of_a_block_may_be_completed_at_once() -> None:
    manager = make_full("lru")
    reader = Engine(manager, "reader")
    for _ in range(2):
        manager.prepare_load([key("a0")], reader.context)
    manager.complete_load([key("a0"), key("a0")], reader.context)
    gauges = manager.get_stats().gauges
    assert gauges["kvtier_cpu_pinned_blocks"] == 0
    assert gauges["kvtier_cpu_resident_blocks"] == len(manager.resident_keys())
    assert manager.slots.num_evictable == len(manager.resident_keys())


def test_a_failed_store_leaves_no_block() -> None:
    manager = CPUOffloadingManager(4, enable_events=True)
    engine = Engine(manager, "A")
    manager.prepare_store(prompt("a", 3), engine.context)
    manager.complete_store(prompt("a", 3), engine.context, success=False)
    assert manager.lookup(key("a0"), engine.context) is LookupResult.MISS
    assert manager.slots.states()[SlotState.FREE] == 4
    assert list(manager.take_events()) == []


# --- reset --------------------------------------------------------------------------------------


def test_reset_forgets_everything_at_once() -> None:
    manager = make_full("lru")
    manager.reset_cache()
    assert Engine(manager, "C").look_up(prompt("a", 4)) == 0
    assert manager.slots.states() == {SlotState.FREE: 8}


def test_a_slot_in_transfer_at_a_reset_is_not_used_before_the_transfer_has_ended() -> None:
    manager = CPUOffloadingManager(8)
    old = Engine(manager, "old")
    writing = set(slots_of(old.prepare_store(prompt("a", 3))))
    manager.reset_cache()
    assert manager.slots.states()[SlotState.QUARANTINED] == 3
    # The same request offers the same blocks again, as vLLM's do, having computed them again.
    manager.on_schedule_end(ScheduleEndContext((), ["old"]))
    second = old.prepare_store(prompt("a", 3))
    assert writing.isdisjoint(slots_of(second))
    # vLLM never delivers what was under way before the reset; this is the new transfer.
    manager.complete_store(set(second.keys_to_store), old.context)
    assert manager.slots.states()[SlotState.QUARANTINED] == 0
    assert old.look_up(prompt("a", 3)) == 3


@pytest.mark.parametrize("loads", [False, True])
@pytest.mark.parametrize("event", ["none", "begins", "is preempted"])
def test_what_a_request_computed_before_a_reset_is_not_stored_after_it(
    event: str, loads: bool
) -> None:
    manager = CPUOffloadingManager(8)
    run(manager, "A", prompt("a", 2))
    engine = Engine(manager, "B")
    if loads:
        manager.prepare_load(prompt("a", 2), engine.context)
    manager.reset_cache()
    begun = ["B"] if event == "begins" else []
    preempted = ["B"] if event == "is preempted" else []
    manager.on_schedule_end(ScheduleEndContext(begun, preempted))
    stored = engine.prepare_store(prompt("a", 2)).keys_to_store
    # When it begins, it still holds the blocks that it loaded before the reset.
    computes_all_anew = event == "is preempted" or (event == "begins" and not loads)
    assert stored == (prompt("a", 2) if computes_all_anew else [])
    stale = manager.get_stats().counters.get("kvtier_cpu_stale_blocks", 0)
    assert stale == (0 if computes_all_anew else 2)


@pytest.mark.parametrize("num_blocks", [2, 4, 8, 1000])
def test_the_next_store_after_a_reset_is_always_possible(num_blocks: int) -> None:
    manager = CPUOffloadingManager(num_blocks)
    Engine(manager, "A").prepare_store(prompt("a", num_blocks))
    manager.reset_cache()
    engine = Engine(manager, "B")
    output = engine.prepare_store(prompt("b", num_blocks))
    assert output.keys_to_store
    manager.complete_store(output.keys_to_store, engine.context)
    engine.finish()
    assert manager.slots.states()[SlotState.QUARANTINED] == 0
    most = num_blocks - manager.reserve
    run(manager, "C", prompt("c", most))
    assert Engine(manager, "D").look_up(prompt("c", most)) == most


def test_resets_in_a_row_leave_a_slot_for_the_next_store() -> None:
    manager = CPUOffloadingManager(1024)
    for i in range(3):
        for j in range(40):
            manager.prepare_store(prompt(f"a{i}-{j}-", 100), ReqContext(f"A{i}-{j}"))
        manager.reset_cache()
    engine = Engine(manager, "B")
    assert engine.prepare_store(prompt("b", 1)).keys_to_store
    manager.complete_store(prompt("b", 1), engine.context)
    assert manager.slots.states()[SlotState.QUARANTINED] == 0


@pytest.mark.parametrize("num_blocks", [1, 2, 100])
def test_a_tier_wholly_in_transfers_at_a_reset_comes_back_after_two_steps(num_blocks: int) -> None:
    manager = CPUOffloadingManager(num_blocks)
    for i in range(num_blocks):
        run(manager, f"A{i}", prompt(f"a{i}-", 1))
    reader = Engine(manager, "reader")
    keys = [key(f"a{i}-0") for i in range(num_blocks)]
    manager.prepare_load(keys, reader.context)
    manager.reset_cache()
    engine = Engine(manager, "B")
    assert manager.prepare_store(prompt("b", 1), engine.context) is None
    for _ in range(2):
        engine.end_step()
    assert engine.prepare_store(prompt("b", 1)).keys_to_store


def test_behind_a_head_that_was_withheld_nothing_is_stored() -> None:
    manager = CPUOffloadingManager(8)
    engine = Engine(manager, "A")
    keys = prompt("a", 4)
    manager.reset_cache()
    assert engine.prepare_store(keys[:2]).keys_to_store == []
    manager.on_schedule_end(ScheduleEndContext((), ["A"]))
    assert engine.prepare_store(keys[2:]).keys_to_store == [], "of no use without its head"
    assert engine.prepare_store(keys).keys_to_store == keys


def test_an_id_used_again_has_nothing_to_do_with_the_one_before() -> None:
    manager = CPUOffloadingManager(8)
    run(manager, "A", prompt("a", 2))
    first = Engine(manager, "B")
    manager.prepare_load(prompt("a", 2), first.context)
    first.finish()
    manager.reset_cache()
    second = Engine(manager, "B")
    assert second.prepare_store(prompt("b", 2)).keys_to_store == prompt("b", 2)


# --- mistakes -----------------------------------------------------------------------------------


def lenient(num_blocks: int = 4) -> CPUOffloadingManager:
    return CPUOffloadingManager(num_blocks, strict=False)


def test_completions_that_fit_nothing_change_nothing_and_are_counted() -> None:
    manager = lenient()
    mine, other = Engine(manager, "mine"), Engine(manager, "other")
    manager.prepare_store([key("a")], mine.context)
    manager.complete_store([key("a")], other.context)  # foreign
    assert manager.lookup(key("a"), mine.context) is LookupResult.HIT_PENDING
    manager.complete_store([key("a")], mine.context)
    manager.complete_store([key("a")], mine.context, success=False)  # double
    manager.complete_store([key("never")], mine.context)  # never begun
    manager.complete_load([key("a")], mine.context)  # never begun
    assert manager.lookup(key("a"), mine.context) is LookupResult.HIT
    assert manager.get_stats().counters["kvtier_cpu_misuse"] == 4
    manager.prepare_store([key("b")], mine.context)
    manager.reset_cache()
    manager.complete_store([key("b")], mine.context)  # late
    assert manager.lookup(key("b"), mine.context) is LookupResult.MISS
    assert manager.slots.states()[SlotState.QUARANTINED] == 1, "it proves nothing about others"
    assert manager.misuse.total == 5


def test_a_load_of_a_block_that_is_not_there_gets_no_slot() -> None:
    manager = lenient()
    engine = Engine(manager, "A")
    engine.store([key("a")])
    spec = manager.prepare_load([key("x"), key("a")], engine.context)
    assert isinstance(spec, CPULoadStoreSpec)
    assert spec.block_ids.tolist() == [NO_BLOCK, 0]
    manager.complete_load([key("a")], engine.context)
    assert manager.get_stats().gauges["kvtier_cpu_pinned_blocks"] == 0
    assert manager.misuse.total == 1


def test_a_mistake_is_logged_once_with_its_key(caplog: pytest.LogCaptureFixture) -> None:
    manager = lenient()
    engine = Engine(manager, "A")
    with caplog.at_level(logging.WARNING):
        for _ in range(3):
            manager.complete_load([key("x")], engine.context)
    assert len(caplog.records) == 1
    assert key("x").hex() in caplog.text
    assert "'A'" in caplog.text


def test_odd_collections_and_keys_are_no_reason_to_stop() -> None:
    manager = lenient(8)
    engine = Engine(manager, "A")
    keys = prompt("a", 3)
    output = manager.prepare_store((k for k in keys), engine.context)  # type: ignore[arg-type]
    assert output is not None
    assert output.keys_to_store == keys
    manager.complete_store(keys, engine.context)
    spec = manager.prepare_load((k for k in [*keys, keys[0]]), engine.context)  # type: ignore[arg-type]
    assert isinstance(spec, CPULoadStoreSpec)
    assert spec.block_ids.tolist() == [0, 1, 2, 0]
    manager.complete_load(set(keys), engine.context)
    assert manager.get_stats().gauges["kvtier_cpu_pinned_blocks"] == 0, "named twice, loaded once"
    manager.complete_load([None], engine.context)  # type: ignore[list-item]
    manager.prepare_load([None], engine.context)  # type: ignore[list-item]
    assert manager.misuse.total == 2


def test_strict_mode_raises_instead() -> None:
    manager = CPUOffloadingManager(4)
    engine = Engine(manager, "A")
    with pytest.raises(ContractViolation, match=key("x").hex()):
        manager.complete_store([key("x")], engine.context)
    with pytest.raises(ContractViolation, match="after a HIT"):
        manager.prepare_load([key("x")], engine.context)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("num_blocks", 0),
        ("num_blocks", 1.5),
        ("num_blocks", True),
        ("store_threshold", -1),
        ("max_tracker_size", 0),
    ],
)
def test_a_figure_that_cannot_be_is_refused_by_name(name: str, value: object) -> None:
    arguments: dict[str, Any] = {"num_blocks": 4, name: value}
    with pytest.raises(ValueError, match=f"{name} is {value}: give a whole number of at least"):
        CPUOffloadingManager(**arguments)


def test_nothing_is_remembered_of_requests_that_are_done() -> None:
    manager = lenient(64)
    for i in range(200):
        run(manager, f"r{i}", prompt(f"p{i % 7}-", 5))
        stranger = ReqContext(f"s{i}")
        manager.lookup(key(f"p{i % 7}-0"), stranger)
        manager.complete_store([key("late")], ReqContext(f"r{i}"))
        output = manager.prepare_store([key(f"s{i}")], stranger)
        assert output is not None
        manager.complete_store(output.keys_to_store, stranger)
    assert not manager.uses
    policy = manager.slots.policy
    assert isinstance(policy, LRUCachePolicy)
    assert not policy._order._by_owner
    assert not manager.uses.unsettled


# --- the reuse filter ---------------------------------------------------------------------------


def test_a_block_is_stored_when_enough_requests_have_brought_it() -> None:
    manager = CPUOffloadingManager(16, store_threshold=3)
    keys = prompt("a", 6)
    stored = []
    for i in range(3):
        engine = Engine(manager, f"r{i}")
        for _ in range(5):  # a waiting request counts once
            engine.look_up(keys)
        stored.append(len(engine.prepare_store(keys).keys_to_store))
    assert stored == [0, 0, 6], "every key counts, also those behind the first miss"
    assert manager.get_stats().counters["kvtier_cpu_filtered_blocks"] == 12


def test_a_lookup_of_a_whole_prefix_counts_too() -> None:
    manager = CPUOffloadingManager(16, store_threshold=2)
    manager.lookup_prefix([key("a")], Engine(manager, "A").context)
    assert Engine(manager, "B").prepare_store([key("a")]).keys_to_store == [key("a")]


def test_a_block_used_from_the_device_counts_as_brought() -> None:
    manager = CPUOffloadingManager(16, store_threshold=2)
    first = Engine(manager, "A")
    manager.touch([key("a")], first.context)
    assert Engine(manager, "B").prepare_store([key("a")]).keys_to_store == [key("a")]


# --- events and figures -------------------------------------------------------------------------


def test_removed_events_precede_the_stored_events_of_what_replaces_them() -> None:
    manager = CPUOffloadingManager(4, enable_events=True)
    run(manager, "A", prompt("a", 3))
    run(manager, "B", prompt("b", 3))
    events = [(event.removed, names(event.keys)) for event in manager.take_events()]
    assert events == [
        (False, {"a0", "a1", "a2"}),
        (True, {"a1", "a2"}),
        (False, {"b0", "b1", "b2"}),
    ]
    assert list(manager.take_events()) == []


def test_events_carry_keys_of_several_groups_and_the_medium() -> None:
    manager = CPUOffloadingManager(4, enable_events=True)
    keys = [make_offload_key(b"x", 0), make_offload_key(b"x", 1)]
    run(manager, "A", keys)
    (event,) = manager.take_events()
    assert event.medium is Medium.CPU
    assert sorted(event.keys) == keys


def test_reset_announces_what_is_gone() -> None:
    manager = CPUOffloadingManager(4, enable_events=True)
    run(manager, "A", prompt("a", 2))
    list(manager.take_events())
    manager.reset_cache()
    (event,) = manager.take_events()
    assert event.removed
    assert names(event.keys) == {"a0", "a1"}


def test_without_events_none_are_kept() -> None:
    manager = CPUOffloadingManager(4)
    run(manager, "A", prompt("a", 2))
    assert list(manager.take_events()) == []


def test_every_figure_is_defined_and_counters_start_again() -> None:
    manager = make_full("lru")
    run(manager, "C", prompt("c", 2))
    stats = manager.get_stats()
    assert stats.counters["kvtier_cpu_stored_blocks"] == 10
    assert stats.counters["kvtier_cpu_evicted_blocks"] == 2
    definitions = CPUOffloadingSpec.build_metric_definitions({})
    assert {*stats.counters, *stats.gauges, *stats.histograms} <= definitions.keys()
    assert manager.get_stats().counters == {}


# --- a policy of somebody else's ----------------------------------------------------------------

FOREIGN_POLICY = '''
from collections import OrderedDict
from kvtier.cpu.policies.base import CachePolicy

class FirstInFirstOut(CachePolicy):
    """Keeps its blocks itself and knows only the plain interface."""

    def __init__(self, cache_capacity):
        super().__init__(cache_capacity)
        self.queue = OrderedDict()
        self.evictable = set()

    def get(self, key):
        return self.queue.get(key)

    def insert(self, key, block):
        self.queue[key] = block

    def remove(self, key):
        del self.queue[key]

    def touch(self, keys, req_context):
        pass

    def evict(self, n, protected):
        victims = [
            (key, block)
            for key, block in self.queue.items()
            if key in self.evictable and key not in protected
        ][:n]
        if len(victims) < n:
            return None
        for key, _ in victims:
            del self.queue[key]
            self.evictable.remove(key)
        return victims

    def clear(self):
        self.queue.clear()
        self.evictable.clear()

    def mark_evictable(self, key):
        assert key not in self.evictable
        self.evictable.add(key)

    def mark_non_evictable(self, key):
        self.evictable.remove(key)
'''


def test_a_policy_that_knows_only_the_plain_interface(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "foreign_policy.py").write_text(FOREIGN_POLICY)
    monkeypatch.syspath_prepend(tmp_path)
    manager = CPUOffloadingManager(
        4, cache_policy="FirstInFirstOut", cache_policy_module_path="foreign_policy"
    )
    run(manager, "A", prompt("a", 3))
    reader = Engine(manager, "reader")
    manager.prepare_load([key("a2")], reader.context)
    assert run(manager, "B", prompt("b", 2)) == {"a1"}, "the first one in that is not in use"
    manager.complete_load([key("a2")], reader.context)
    assert run(manager, "C", prompt("c", 1)) == {"a2"}
    manager.reset_cache()
    assert manager.slots.states() == {SlotState.FREE: 4}
    sys.modules.pop("foreign_policy")
