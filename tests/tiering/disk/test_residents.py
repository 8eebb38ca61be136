"""What the disk tier keeps, against a simple model: no slot has two blocks, whatever happens."""

from __future__ import annotations

from dataclasses import dataclass, field

import pytest
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
from kvtier.cpu.policies.lru import LRUCachePolicy
from kvtier.tiering.disk.residents import Residents
from kvtier.tiering.disk.transfer import SlabBlock

NOBODY = ReqContext("nobody")


def _stored(
    residents: Residents,
    new: list[OffloadKey],
    brought: list[OffloadKey],
    context: ReqContext,
) -> tuple[list[SlabBlock], list[OffloadKey]]:
    """The blocks that got a slot, and the keys of those that left for them."""
    evicted = residents.make_room(new, brought, context)
    return residents.place(new, context), evicted


def key(number: int) -> OffloadKey:
    return OffloadKey(b"%04d" % number)


def keys(*some: int) -> list[OffloadKey]:
    return [key(number) for number in some]


prompts = st.lists(st.integers(0, 24), max_size=8, unique=True).map(lambda some: keys(*some))


@dataclass(eq=False)
class Job:
    """A transfer under way, as the tier would have it."""

    is_load: bool
    blocks: list[SlabBlock] = field(default_factory=list)


class Machine(RuleBasedStateMachine):
    policy_cls: type[CachePolicy] = LRUCachePolicy

    jobs = Bundle("jobs")

    @initialize(num_slots=st.integers(1, 12), num_adopted=st.integers(0, 12), data=st.data())
    def start(self, num_slots: int, num_adopted: int, data: st.DataObject) -> None:
        self.num_slots = num_slots
        self.residents = Residents(self.policy_cls, num_slots, first_seq=1000)
        slots = data.draw(st.permutations(range(num_slots)))[:num_adopted]
        adopted = keys(*range(len(slots)))
        self.residents.adopt(adopted, slots, list(range(len(slots))))
        left = sorted(set(range(num_slots)) - set(slots))
        self.residents.set_free(left[::2], left[1::2])
        self.kept = dict(zip(adopted, slots, strict=True))
        """What the model says can be read, and where."""
        self.under_way: list[Job] = []
        self.largest_seq = 999
        self.live: set[str] = set()

    # --- what happens --------------------------------------------------------------------------

    @rule(target=jobs, wanted=prompts, request=st.sampled_from("abc"))
    def store(self, wanted: list[OffloadKey], request: str) -> Job:
        present = {*self.residents.readable, *self.residents.writing}
        new = [each for each in wanted if each not in present]
        pinned_before = self.slots_under_way()
        own = {k for k, block in self.residents.readable.items() if block.place.owner == request}
        blocks, evicted = _stored(self.residents, new, wanted, ReqContext(request))
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
        pinned = self.residents.pin(wanted)
        slots = [None if block is None else block.block_id for block in pinned]
        assert slots == [self.kept.get(key) for key in wanted]
        return self.begin(Job(True, [block for block in pinned if block is not None]))

    @rule(job=consumes(jobs), data=st.data())
    def finish(self, job: Job, data: st.DataObject) -> None:
        """Some of the blocks were moved, and some were not."""
        self.under_way.remove(job)
        good = [block for block in job.blocks if data.draw(st.booleans())]
        bad = [block for block in job.blocks if block not in good]
        if job.is_load:
            # By another load it may be forgotten already, or an earlier life may have had it.
            current = [b.key for b in bad if self.residents.readable.get(b.key) is b]
            assert self.residents.unpin(good, bad) == current
            for gone in current:
                del self.kept[gone]
        else:
            current = [b.key for b in good if self.residents.writing.get(b.key) is b]
            self.residents.not_written(bad)
            assert self.residents.written(good) == current
            slots = {block.key: block.block_id for block in good}
            self.kept |= {each: slots[each] for each in current}

    @rule(wanted=prompts, request=st.sampled_from("abc"))
    def touch(self, wanted: list[OffloadKey], request: str) -> None:
        first = self.residents.touch(wanted, ReqContext(request))
        assert first > self.largest_seq
        self.largest_seq = max(self.largest_seq, first + len(wanted) - 1)

    @rule(request=st.sampled_from("abc"))
    def begin_request(self, request: str) -> None:
        self.residents.on_new_request(ReqContext(request))

    @rule(request=st.sampled_from("abc"))
    def end_request(self, request: str) -> None:
        self.residents.on_request_finished(ReqContext(request))

    @rule()
    def start_over(self) -> None:
        _, gone = self.residents.start_over(self.slots_under_way())
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
        assert self.residents.num_used == len(used)
        assert len(set(self.kept.values())) == len(self.kept)

    @invariant()
    def what_is_kept_can_be_read(self) -> None:
        readable = self.residents.readable
        assert {k: block.block_id for k, block in readable.items()} == self.kept
        assert not readable.keys() & self.residents.writing.keys()
        wanted = keys(*range(25))
        assert self.residents.slots_of(wanted) == [
            (position, self.kept[k]) for position, k in enumerate(wanted) if k in self.kept
        ]

    def teardown(self) -> None:
        """When everything has ended, every slot can be used again."""
        for job in getattr(self, "under_way", []):
            if job.is_load:
                self.residents.unpin(job.blocks, [])
            else:
                self.residents.written(job.blocks)
        if hasattr(self, "residents"):
            fresh = keys(*range(1000, 1000 + self.num_slots))
            blocks, _ = _stored(self.residents, fresh, fresh, NOBODY)
            assert [block.block_id for block in blocks] == list(range(self.num_slots))


class ARCMachine(Machine):
    policy_cls = ARCCachePolicy


TestResidentsInOrderOfUse = Machine.TestCase
TestResidentsWithARC = ARCMachine.TestCase


def filled(num_slots: int, policy_cls: type[CachePolicy] = LRUCachePolicy) -> Residents:
    residents = Residents(policy_cls, num_slots, first_seq=100)
    residents.set_free(list(range(num_slots)), [])
    blocks, _ = _stored(residents, keys(*range(num_slots)), keys(*range(num_slots)), NOBODY)
    residents.written(blocks)
    return residents


@pytest.mark.parametrize("policy_cls", [LRUCachePolicy, ARCCachePolicy])
def test_of_one_prompt_the_tail_leaves_first(policy_cls: type[CachePolicy]) -> None:
    residents = filled(4, policy_cls)
    _, evicted = _stored(residents, keys(10, 11), keys(10, 11), NOBODY)
    assert set(evicted) == set(keys(2, 3))


def test_what_was_used_last_leaves_last() -> None:
    residents = filled(4)
    residents.touch(keys(2, 3), NOBODY)
    _, evicted = _stored(residents, keys(10, 11), keys(10, 11), NOBODY)
    assert set(evicted) == set(keys(0, 1))


def test_what_was_adopted_leaves_in_the_order_of_its_last_use() -> None:
    residents = Residents(LRUCachePolicy, 4, first_seq=100)
    residents.adopt(keys(3, 1, 2, 0), [0, 1, 2, 3], [9, 8, 7, 6])  # the most recent first
    residents.set_free([], [])
    order = []
    for number in range(10, 14):
        _, evicted = _stored(residents, keys(number), keys(number), NOBODY)
        order += evicted
    assert order == keys(0, 2, 1, 3)


def test_a_block_that_two_loads_read_stays_until_both_have_ended() -> None:
    residents = filled(1)
    first, second = (list(filter(None, residents.pin(keys(0)))) for _ in range(2))
    residents.unpin(first, [])
    assert _stored(residents, keys(1), keys(1), NOBODY) == ([], [])
    residents.unpin(second, [])
    blocks, evicted = _stored(residents, keys(1), keys(1), NOBODY)
    assert (len(blocks), evicted) == (1, keys(0))


@pytest.mark.parametrize("policy_cls", [LRUCachePolicy, ARCCachePolicy])
def test_what_a_request_has_used_stays_and_all_else_leaves_for_it(
    policy_cls: type[CachePolicy],
) -> None:
    residents = filled(8, policy_cls)
    request = ReqContext("a long prompt")
    residents.on_new_request(request)
    residents.touch(keys(0, 1), request)
    new = keys(*range(10, 20))
    blocks, evicted = _stored(residents, new, new, request)
    assert set(evicted) == set(keys(*range(2, 8)))
    assert [block.key for block in blocks] == new[:6]


def test_requests_that_are_never_ended_are_forgotten_at_last(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("kvtier.tiering.disk.residents._MAX_LIVE_REQUESTS", 5)
    residents = filled(4)
    for number in range(50):
        residents.on_new_request(ReqContext(str(number)))
    assert len(residents._live) <= 5
