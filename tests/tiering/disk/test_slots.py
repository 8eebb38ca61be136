"""The slot table against a simple model: no slot has two blocks, whatever happens."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.stateful import (
    Bundle,
    RuleBasedStateMachine,
    consumes,
    initialize,
    invariant,
    rule,
)

from kvtier.base import OffloadKey, ReqContext
from kvtier.cpu.policies.arc import ARCCachePolicy
from kvtier.cpu.policies.base import CachePolicy
from kvtier.cpu.policies.density import DensityCachePolicy
from kvtier.cpu.policies.lru import LRUCachePolicy
from kvtier.cpu.policies.tenants import BlockQuota, Tenancy, TenantPolicy
from kvtier.tiering.disk.slots import FreeSlots, SlabBlock, SlabTable

# --- free slots ----------------------------------------------------------------------------------


def test_those_of_use_to_nobody_come_first_and_in_order() -> None:
    free = FreeSlots([0, 1, 4, 5], [2, 3])
    assert len(free) == 6
    assert free.take(3) == [0, 1, 4]
    assert free.take(2) == [5, 2]
    assert free.take(2) == [3]
    assert free.take(2) == []
    assert len(free) == 0


def test_taking_none_takes_none() -> None:
    free = FreeSlots([0, 1], [])
    assert free.take(0) == []
    assert len(free) == 2


def test_starting_over_hands_out_all_but_the_busy_ones() -> None:
    free = FreeSlots([7], [])
    free.reset(6, {1, 4})
    assert len(free) == 4
    assert free.take(2) == [0, 2]
    free.give([1])
    assert sorted(free.take(9)) == [1, 3, 5]
    free.give([4])
    assert free.take(9) == [4]


@given(
    num_slots=st.integers(1, 40),
    steps=st.lists(
        st.tuples(st.sampled_from(["take", "give", "start over"]), st.integers(0, 12)), max_size=60
    ),
)
def test_no_slot_is_handed_out_twice(num_slots: int, steps: list[tuple[str, int]]) -> None:
    free = FreeSlots(list(range(0, num_slots, 2)), list(range(1, num_slots, 2)))
    used: list[int] = []
    for what, number in steps:
        if what == "take":
            taken = free.take(number)
            assert len(taken) == min(number, num_slots - len(used))
            assert not set(taken) & set(used)
            used += taken
        elif what == "give":
            free.give(used[:number])
            del used[:number]
        else:
            del used[number:]  # the others are idle, and free now
            free.reset(num_slots, set(used))
        assert len(free) == num_slots - len(used)
    assert sorted(free.take(num_slots) + used) == list(range(num_slots))


# --- the table -----------------------------------------------------------------------------------

NOBODY = ReqContext("nobody")


def _stored(
    table: SlabTable,
    new: list[OffloadKey],
    brought: list[OffloadKey],
    context: ReqContext,
) -> tuple[list[SlabBlock], list[OffloadKey]]:
    """The blocks that got a slot, and the keys evicted for them."""
    wanted = table.wanted(new, context)
    evicted = table.make_room(wanted, brought, context)
    return table.place(wanted, context), evicted


def key(number: int) -> OffloadKey:
    return OffloadKey(b"%04d" % number)


def test_a_job_of_an_ended_request_that_the_policy_declines_is_not_remembered(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def decline(
        policy: DensityCachePolicy, keys: list[OffloadKey], num_free: int, context: ReqContext
    ) -> int:
        policy._prompt_of(context)
        return 0

    monkeypatch.setattr(DensityCachePolicy, "num_admitted", decline)
    table = SlabTable(DensityCachePolicy, 8, first_seq=1000)
    ended = ReqContext("ended")
    table.on_new_request(ended)
    table.on_request_finished(ended)
    policy = table._policy
    assert isinstance(policy, DensityCachePolicy)
    assert _stored(table, [key(1)], [key(1)], ended) == ([], [])
    assert not policy._prompts


def keys(*some: int) -> list[OffloadKey]:
    return [key(number) for number in some]


prompts = st.lists(st.integers(0, 24), max_size=8, unique=True).map(lambda some: keys(*some))


@dataclass(eq=False)
class Job:
    """A transfer in flight."""

    is_load: bool
    blocks: list[SlabBlock] = field(default_factory=list)


class Machine(RuleBasedStateMachine):
    policy_cls: Callable[[int], CachePolicy] = LRUCachePolicy

    jobs = Bundle("jobs")

    @initialize(num_slots=st.integers(1, 12), num_adopted=st.integers(0, 12), data=st.data())
    def start(self, num_slots: int, num_adopted: int, data: st.DataObject) -> None:
        self.num_slots = num_slots
        self.table = SlabTable(self.policy_cls, num_slots, first_seq=1000)
        slots = data.draw(st.permutations(range(num_slots)))[:num_adopted]
        adopted = keys(*range(len(slots)))
        self.table.adopt(adopted, slots, list(range(len(slots))))
        left = sorted(set(range(num_slots)) - set(slots))
        self.table.set_free(left[::2], left[1::2])
        self.kept = dict(zip(adopted, slots, strict=True))
        """Readable blocks and their slots, according to the model."""
        self.under_way: list[Job] = []
        self.largest_seq = 999
        self.live: set[str] = set()

    # --- what happens --------------------------------------------------------------------------

    @rule(target=jobs, wanted=prompts, request=st.sampled_from("abc"))
    def store(self, wanted: list[OffloadKey], request: str) -> Job:
        present = {*self.table.readable, *self.table.writing}
        new = [each for each in wanted if each not in present]
        pinned_before = self.slots_under_way()
        own = {k for k, block in self.table.readable.items() if block.place.owner == request}
        blocks, evicted = _stored(self.table, new, wanted, ReqContext(request))
        for gone in evicted:
            assert gone not in wanted, "a block left for others of its own prompt"
            assert self.kept.pop(gone) not in pinned_before, "a block left that is being read"
        slots = [block.block_id for block in blocks]
        assert slots == sorted(slots)
        assert [block.key for block in blocks] == new[: len(blocks)], "the head goes first"
        assert not set(slots) & pinned_before, "a busy slot was handed out"
        assert not set(slots) & set(self.kept.values()), "a slot has two blocks"
        seqs = [block.generation for block in blocks]
        assert seqs == sorted(seqs, reverse=True)
        assert all(seq > self.largest_seq for seq in seqs)
        self.largest_seq = max([self.largest_seq, *seqs])
        idle = set(self.kept) - set(wanted) - self.keys_being_read() - own
        assert len(blocks) == len(new) or not idle, "there was room"
        return self.begin(Job(False, blocks))

    @rule(target=jobs, wanted=prompts)
    def load(self, wanted: list[OffloadKey]) -> Job:
        pinned = self.table.pin(wanted)
        slots = [None if block is None else block.block_id for block in pinned]
        assert slots == [self.kept.get(key) for key in wanted]
        return self.begin(Job(True, [block for block in pinned if block is not None]))

    @rule(job=consumes(jobs), data=st.data())
    def finish(self, job: Job, data: st.DataObject) -> None:
        """A transfer ends; some of its blocks failed."""
        self.under_way.remove(job)
        good = [block for block in job.blocks if data.draw(st.booleans())]
        bad = [block for block in job.blocks if block not in good]
        if job.is_load:
            # Another load may have forgotten it already, or it is of an earlier epoch.
            current = [b.key for b in bad if self.table.readable.get(b.key) is b]
            assert self.table.unpin(good, bad) == current
            for gone in current:
                del self.kept[gone]
        else:
            current = [b.key for b in good if self.table.writing.get(b.key) is b]
            self.table.not_written(bad)
            assert self.table.written(good) == current
            slots = {block.key: block.block_id for block in good}
            self.kept |= {each: slots[each] for each in current}

    @rule(wanted=prompts, request=st.sampled_from("abc"))
    def touch(self, wanted: list[OffloadKey], request: str) -> None:
        first = self.table.touch(wanted, ReqContext(request))
        assert first > self.largest_seq
        self.largest_seq = max(self.largest_seq, first + len(wanted) - 1)

    @rule(request=st.sampled_from("abc"))
    def begin_request(self, request: str) -> None:
        self.table.on_new_request(ReqContext(request))

    @rule(request=st.sampled_from("abc"))
    def end_request(self, request: str) -> None:
        self.table.on_request_finished(ReqContext(request))

    @rule()
    def start_over(self) -> None:
        _, gone = self.table.reset(self.slots_under_way())
        assert set(gone) == set(self.kept)
        self.kept = {}

    # --- what always holds ---------------------------------------------------------------------

    def begin(self, job: Job) -> Job:
        self.under_way.append(job)
        return job

    def slots_under_way(self) -> set[int]:
        return {block.block_id for job in self.under_way for block in job.blocks}

    def keys_being_read(self) -> set[OffloadKey]:
        return {block.key for job in self.under_way if job.is_load for block in job.blocks}

    @invariant()
    def every_slot_is_accounted_for(self) -> None:
        used = set(self.kept.values()) | self.slots_under_way()
        assert self.table.num_used == len(used)
        assert len(set(self.kept.values())) == len(self.kept)

    @invariant()
    def what_is_kept_can_be_read(self) -> None:
        readable = self.table.readable
        assert {k: block.block_id for k, block in readable.items()} == self.kept
        assert not readable.keys() & self.table.writing.keys()
        wanted = keys(*range(25))
        assert self.table.slots_of(wanted) == [
            (position, self.kept[k]) for position, k in enumerate(wanted) if k in self.kept
        ]

    def teardown(self) -> None:
        """When all transfers have ended, every slot can be used again."""
        for job in getattr(self, "under_way", []):
            if job.is_load:
                self.table.unpin(job.blocks, [])
            else:
                self.table.written(job.blocks)
        if hasattr(self, "table"):
            fresh = keys(*range(1000, 1000 + self.num_slots))
            blocks, _ = _stored(self.table, fresh, fresh, NOBODY)
            assert [block.block_id for block in blocks] == list(range(self.num_slots))


class ARCMachine(Machine):
    policy_cls = ARCCachePolicy


class OneTenantMachine(Machine):
    """A single tenant that may have everything: no difference."""

    @staticmethod
    def policy_cls(num_slots: int) -> CachePolicy:
        tenancy = Tenancy((BlockQuota("default", 0, num_slots),), 0.25)
        return TenantPolicy(LRUCachePolicy, num_slots, tenancy)


TestResidentsInOrderOfUse = Machine.TestCase
TestResidentsWithARC = ARCMachine.TestCase
TestResidentsOfOneTenant = OneTenantMachine.TestCase


def filled(num_slots: int, policy_cls: type[CachePolicy] = LRUCachePolicy) -> SlabTable:
    table = SlabTable(policy_cls, num_slots, first_seq=100)
    table.set_free(list(range(num_slots)), [])
    blocks, _ = _stored(table, keys(*range(num_slots)), keys(*range(num_slots)), NOBODY)
    table.written(blocks)
    return table


@pytest.mark.parametrize("policy_cls", [LRUCachePolicy, ARCCachePolicy])
def test_of_one_prompt_the_tail_leaves_first(policy_cls: type[CachePolicy]) -> None:
    table = filled(4, policy_cls)
    _, evicted = _stored(table, keys(10, 11), keys(10, 11), NOBODY)
    assert set(evicted) == set(keys(2, 3))


def test_what_was_used_last_leaves_last() -> None:
    table = filled(4)
    table.touch(keys(2, 3), NOBODY)
    _, evicted = _stored(table, keys(10, 11), keys(10, 11), NOBODY)
    assert set(evicted) == set(keys(0, 1))


def test_what_was_adopted_leaves_in_the_order_of_its_last_use() -> None:
    table = SlabTable(LRUCachePolicy, 4, first_seq=100)
    table.adopt(keys(3, 1, 2, 0), [0, 1, 2, 3], [9, 8, 7, 6])  # most recently used first
    table.set_free([], [])
    order = []
    for number in range(10, 14):
        _, evicted = _stored(table, keys(number), keys(number), NOBODY)
        order += evicted
    assert order == keys(0, 2, 1, 3)


def test_a_block_that_two_loads_read_stays_until_both_have_ended() -> None:
    table = filled(1)
    first, second = (list(filter(None, table.pin(keys(0)))) for _ in range(2))
    table.unpin(first, [])
    assert _stored(table, keys(1), keys(1), NOBODY) == ([], [])
    table.unpin(second, [])
    blocks, evicted = _stored(table, keys(1), keys(1), NOBODY)
    assert (len(blocks), evicted) == (1, keys(0))


@pytest.mark.parametrize("policy_cls", [LRUCachePolicy, ARCCachePolicy])
def test_what_a_request_has_used_stays_and_all_else_leaves_for_it(
    policy_cls: type[CachePolicy],
) -> None:
    table = filled(8, policy_cls)
    request = ReqContext("a long prompt")
    table.on_new_request(request)
    table.touch(keys(0, 1), request)
    new = keys(*range(10, 20))
    blocks, evicted = _stored(table, new, new, request)
    assert set(evicted) == set(keys(*range(2, 8)))
    assert [block.key for block in blocks] == new[:6]


def test_requests_that_are_never_ended_are_forgotten_at_last(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("kvtier.tiering.disk.slots._MAX_LIVE_REQUESTS", 5)
    table = filled(4)
    for number in range(50):
        table.on_new_request(ReqContext(str(number)))
    assert len(table._live) <= 5
