"""Random lives of requests under each write policy, against an oracle.

The oracle sees which blocks leave host memory and what the tier has at that moment. Every block
that leaves is in the tier, or was counted. Planted bugs show that the oracle would see them.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

import pytest
from hypothesis import Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from kvtier.base import BlockIDsLoadStoreSpec, OffloadKey, ReqContext
from kvtier.config.options import WritePolicyName
from kvtier.cpu.policies.base import BlockStatus
from kvtier.cpu.policies.lru import LRUCachePolicy
from kvtier.tiering import write_policy
from kvtier.tiering.base import TransferJob
from kvtier.tiering.cleaner import Cleaner
from kvtier.tiering.health import BreakerSettings
from kvtier.tiering.write_policy import Adaptive, ReuseSample, SecondUse
from tests.tiering.driven_manager import DrivenManager, key, payload

NUM_SLOTS = 32
NUM_NODES = 60


class Lives(RuleBasedStateMachine):
    """Requests are paths in a tree of blocks. The tier ends its jobs when a rule says so."""

    write = WritePolicyName.ON_EVICT

    @initialize(
        parents=st.lists(st.integers(0, 10**6), min_size=NUM_NODES, max_size=NUM_NODES),
        names_missing=st.booleans(),
    )
    def begin(self, parents: list[int], names_missing: bool) -> None:
        self.paths: list[list[int]] = []
        for node, parent in enumerate(parents):
            before = self.paths[parent % (node + 1) - 1] if parent % (node + 1) else []
            self.paths.append([*before, node][-12:])
        self.rig = rig = DrivenManager(
            NUM_SLOTS,
            write_policy=self.write,
            max_pinned_share=0.5,
            breaker=BreakerSettings(min_failures=10**6, max_timeouts_in_a_row=10**6),
            shutdown_timeout_s=0.02,
        )
        self.tier = rig.tiers[0]
        self.tier.names_missing = names_missing
        self.num_requests = 0
        self.num_lost = 0
        self.num_counted = 0
        self.forgot: set[OffloadKey] = set()
        """Blocks that the tier has lost, or that were computed although it has them. The cleaner
        may not know that."""
        self.num_uses: Counter[OffloadKey] = Counter()
        """Requests that have used a block, also those that run."""
        self.wrong: list[AssertionError] = []
        """What was wrong with stores."""
        self._watch()

    def _watch(self) -> None:
        noted = self.rig.primary.slots.on_evicted
        assert noted is not None
        submit = self.tier.submit_store

        def on_evicted(victims: Sequence[tuple[OffloadKey, BlockStatus]]) -> None:
            noted(victims)
            lost = [k for k, _ in victims if not self.tier.holds(k) and k not in self.forgot]
            self.num_lost += len(lost)

        def submit_store(job: TransferJob) -> None:
            try:
                self._check_store(list(job.keys))
            except AssertionError as error:  # the orchestrator would treat it as the tier's
                self.wrong.append(error)
            submit(job)

        self.rig.primary.slots.on_evicted = on_evicted
        self.tier.submit_store = submit_store  # type: ignore[method-assign]

    def _check_store(self, stored: list[OffloadKey]) -> None:
        """Nothing is written twice, and heads come before tails."""
        twice = [k for k in stored if self.tier.holds(k) and k not in self.forgot]
        assert not twice, f"written again: {twice}"
        under_way = {k for job in self.tier.waiting if not job.is_promotion for k in job.keys}
        assert under_way.isdisjoint(stored), "it is being written already"
        place = {k: n for n, k in enumerate(stored)}
        for path in self.paths:
            order = [place[key(node)] for node in path if key(node) in place]
            if len(order) > 1 and self._is_of_one_run([key(node) for node in path]):
                assert order == sorted(order), "a tail comes before its head"

    def _is_of_one_run(self, blocks: list[OffloadKey]) -> bool:
        """True if the eviction policy keeps these blocks together. Only then is their order in a
        job the order of the prompt."""
        found = [self.rig.primary.slots.get(k) for k in blocks]
        places = {id(block.place) for block in found if block is not None}
        return len(places) == 1

    # --- rules ----------------------------------------------------------------------------------

    @rule(
        nodes=st.lists(st.integers(0, NUM_NODES - 1), min_size=1, max_size=6),
        at_once=st.integers(1, 4),
    )
    def serve_some(self, nodes: list[int], at_once: int) -> None:
        for node in nodes:
            self._serve(node, at_once)

    def _serve(self, node: int, at_once: int) -> None:
        blocks = [key(each) for each in self.paths[node]]
        self.num_requests += 1
        self.num_uses.update(blocks)
        request = self.rig.begin(f"r{self.num_requests}")
        found = self.rig.look_up(blocks, request)
        while "P" in found:
            self.rig.step()
            for load in self.tier.loads():
                self.tier.finish(load)
            found = self.rig.look_up(blocks, request)
        num_hits = len(found) - len(found.lstrip("H"))
        if num_hits:
            self.rig.load(blocks[:num_hits], request)
        self.rig.manager.touch(blocks, request)
        for start in range(num_hits, len(blocks), at_once):
            self._store(blocks[start : start + at_once], request)
            self.rig.step()
        self.rig.manager.on_request_finished(request)
        self.rig.step()

    def _store(self, blocks: list[OffloadKey], request: ReqContext) -> None:
        output = self.rig.manager.prepare_store(blocks, request)
        if output is not None:
            assert isinstance(output.store_spec, BlockIDsLoadStoreSpec)
            self.forgot.update(k for k in output.keys_to_store if self.tier.holds(k))
            for k, slot in zip(output.keys_to_store, output.store_spec.block_ids, strict=True):
                self.rig.memory.rows[slot] = payload(k)
            self.rig.manager.complete_store(set(output.keys_to_store), request)

    @rule(data=st.data())
    @precondition(lambda self: self.tier.waiting)
    def finish_one(self, data: st.DataObject) -> None:
        job = data.draw(st.sampled_from(self.tier.waiting))
        is_good = data.draw(st.booleans())
        self.tier.finish(job, fail=() if is_good else job.keys[::2])
        self.rig.step()

    @rule()
    def finish_all(self) -> None:
        self.tier.finish()
        self.rig.step()

    @rule(number=st.integers(0, 100))
    @precondition(lambda self: self.tier.kept and self.tier.names_missing)
    def tier_loses_a_block(self, number: int) -> None:
        fingerprint, lost = list(self.tier.kept)[number % len(self.tier.kept)]
        del self.tier.kept[fingerprint, lost]
        self.forgot.add(lost)

    @rule()
    def reset(self) -> None:
        self.rig.manager.reset_cache()
        self.rig.step()

    # --- what must hold -------------------------------------------------------------------------

    @invariant()
    def every_loss_is_counted(self) -> None:
        if not hasattr(self, "rig"):
            return
        for error in self.wrong:
            raise error
        counters = Counter(self.rig.tier_counters())
        self.num_counted += counters["unwritten_blocks"] + counters["left_out_blocks"]
        # A block that the tier has lost may be counted, if the cleaner has found out.
        assert self.num_lost <= self.num_counted
        if not self.forgot:
            assert self.num_counted == self.num_lost
        assert not counters["violations"]
        assert not counters["errors"]

    @invariant()
    def memory_is_bounded(self) -> None:
        if hasattr(self, "rig"):
            for tier in self.rig.manager._tiers:
                if isinstance(tier.write_policy, Adaptive):
                    policy = tier.write_policy
                    assert len(policy.sample) <= write_policy._MAX_WATCHED
                    assert len(policy._uses_of_left_out) <= policy._max_remembered

    def teardown(self) -> None:
        """At the end, all blocks of host memory are below."""
        if not hasattr(self, "rig"):
            return
        self.tier.finish()
        for _ in range(4):
            self.rig.step()
            self.tier.finish()
        self.rig.step()
        assert not any(self.rig.manager.open_work().values())
        if self.write is not WritePolicyName.SECOND_USE:
            warm = self.rig.primary.resident_keys()
            self.tier.at_once = True
            self.rig.manager.shutdown()
            assert self.tier.holds(*warm), "a restart would find less than there was"


class LivesWithAdaptive(Lives):
    write = WritePolicyName.ADAPTIVE


class LivesWithSecondUse(Lives):
    write = WritePolicyName.SECOND_USE

    def _check_store(self, stored: list[OffloadKey]) -> None:
        """Only blocks that two requests have used. They may be stored again, if an earlier store of
        them has not ended."""
        once = [k for k in stored if self.num_uses[k] < 2]
        assert not once, f"written though one request has used them: {once}"


MACHINES = [Lives, LivesWithAdaptive, LivesWithSecondUse]


@pytest.fixture(autouse=True)
def short_lives(monkeypatch: pytest.MonkeyPatch) -> None:
    """Lets `adaptive` learn from few blocks, and remember few."""
    monkeypatch.setattr(write_policy, "_ENOUGH", 8)
    monkeypatch.setattr(write_policy, "_UNKNOWN_CAPACITY", 0)
    monkeypatch.setattr(write_policy, "_MAX_WATCHED", 16)


@pytest.mark.parametrize("machine", MACHINES)
def test_random_lives(machine: type[Lives]) -> None:
    run_state_machine_as_test(machine, settings=settings(max_examples=80, stateful_step_count=30))


# --- planted bugs ---------------------------------------------------------------------------------

_note_written = Cleaner.note_written
_next_to_leave = LRUCachePolicy.next_to_leave


def _believes_every_store(
    cleaner: Cleaner, blocks: Sequence[BlockStatus], moved: Sequence[OffloadKey], tier: Any
) -> None:
    _note_written(cleaner, blocks, [block.key for block in blocks], tier)


def _notes_no_store(*args: Any) -> None:
    return None


def _heads_first(policy: LRUCachePolicy, n: int) -> list[tuple[OffloadKey, BlockStatus]]:
    return _next_to_leave(policy, n)[::-1]


def _everything(policy: SecondUse, keys: Sequence[OffloadKey], *args: Any) -> Sequence[OffloadKey]:
    return keys


def _nothing_at_shutdown(*args: Any) -> list[OffloadKey]:
    return []


@pytest.mark.parametrize(
    ("machine", "broken", "method", "replacement"),
    [
        (Lives, Cleaner, "note_written", _believes_every_store),
        (Lives, Cleaner, "note_written", _notes_no_store),
        (Lives, Cleaner, "note_promoted", _notes_no_store),
        (Lives, LRUCachePolicy, "next_to_leave", _heads_first),
        (Lives, Cleaner, "unwritten", _nothing_at_shutdown),
        (Lives, Cleaner, "_note_evicted", _notes_no_store),
        (LivesWithAdaptive, Cleaner, "note_written", _believes_every_store),
        (LivesWithAdaptive, Cleaner, "_note_evicted", _notes_no_store),
        (LivesWithAdaptive, Cleaner, "unwritten", _nothing_at_shutdown),
        (LivesWithAdaptive, ReuseSample, "_thin_out", _notes_no_store),
        (LivesWithSecondUse, SecondUse, "select", _everything),
    ],
)
def test_a_planted_bug_is_seen(
    machine: type[Lives],
    broken: type,
    method: str,
    replacement: Callable[..., Any],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(broken, method, replacement)
    with pytest.raises(AssertionError):
        run_state_machine_as_test(
            machine,
            settings=settings(
                max_examples=100,
                stateful_step_count=30,
                phases=[Phase.generate],
                report_multiple_bugs=False,
            ),
        )
