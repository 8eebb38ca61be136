"""Random lives of requests under the policy `density`, against an oracle that sees every eviction.

The policy learns from few requests, changes its rule often, and remembers few requests. A second
manager gets the same calls and must always do the same. Planted bugs show that the oracle would see
them.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Collection, Iterator, Sequence, Set
from dataclasses import dataclass, field
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

from kvtier.base import OffloadKey, ReqContext
from kvtier.cpu.manager import CPUOffloadingManager
from kvtier.cpu.policies import density, eviction_rules, reuse_odds
from kvtier.cpu.policies.base import BlockStatus, SlotState
from kvtier.cpu.policies.density import DensityCachePolicy
from kvtier.cpu.policies.eviction_rules import Sticky, _Shadow
from kvtier.cpu.policies.prompt_tree import PromptTree, Segment, _Preview
from kvtier.cpu.policies.reuse_odds import ReuseOdds, Sample
from kvtier.misuse import ContractViolation
from tests.cpu.policies.test_density import BUGS as TREE_BUGS
from tests.cpu.policies.tree_checks import check_tree, with_empty_parents
from tests.trace_replay import key_of

NUM_NODES = 40
MOST_PROMPTS = 8


@pytest.fixture(autouse=True, scope="module")
def hasty() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(reuse_odds, "_PERIOD", 4)
        patch.setattr(reuse_odds, "_MIN_REUSED", 2)
        patch.setattr(eviction_rules, "_CERTAINTY", 0.5)
        patch.setattr(Sticky, "_ONE_IN", 2)
        patch.setattr(density, "_MAX_PROMPTS", MOST_PROMPTS)
        yield


class Twins:
    """Two managers that get the same calls and must give the same answers."""

    def __init__(self, *managers: CPUOffloadingManager) -> None:
        self._managers = managers

    def __getattr__(self, name: str) -> Any:
        first, second = (getattr(manager, name) for manager in self._managers)
        if not callable(first):
            return first

        def call(*args: Any) -> Any:
            answer = first(*args)
            assert _plain(second(*args)) == _plain(answer), f"{name}: the twin differs"
            return answer

        return call


def _plain(answer: Any) -> Any:
    """An answer without objects of the manager."""
    if answer is None or not hasattr(answer, "store_spec"):
        return repr(answer)
    return answer.keys_to_store, answer.store_spec.block_ids.tolist(), answer.evicted_keys


@dataclass(eq=False)
class Running:
    """A request that has not ended."""

    context: ReqContext
    path: list[OffloadKey]
    num_offered: int = 0
    writing: list[list[OffloadKey]] = field(default_factory=list)
    """Stores that have not ended."""


class DensityLives(RuleBasedStateMachine):
    """Requests are paths in a tree of blocks. Several run at a time."""

    @initialize(
        num_blocks=st.integers(2, 14),
        parents=st.lists(st.integers(0, 10**6), min_size=NUM_NODES, max_size=NUM_NODES),
    )
    def start(self, num_blocks: int, parents: list[int]) -> None:
        self.num_blocks = num_blocks
        self.paths: list[list[OffloadKey]] = []
        for node, parent in enumerate(parents):
            before = self.paths[parent % node] if node and parent % 6 else []
            self.paths.append([*before, key_of(node)])
        self.nodes = {path[-1]: node for node, path in enumerate(self.paths)}
        self.ancestors = {path[-1]: set(path[:-1]) for path in self.paths}
        managers = [CPUOffloadingManager(num_blocks, cache_policy="density") for _ in range(2)]
        self.manager: CPUOffloadingManager = Twins(*managers)  # type: ignore[assignment]
        policy = self.manager.slots.policy
        assert isinstance(policy, DensityCachePolicy)
        self.policy = policy
        self.running: list[Running] = []
        self.loads: list[tuple[list[OffloadKey], ReqContext]] = []
        """Loads that have not ended."""
        self.num_requests = 0
        self.users: dict[OffloadKey, tuple[int, set[str]]] = {}
        """Requests that have used a block, and its generation."""
        self._watch()

    def _watch(self) -> None:
        evict = self.policy.evict

        def watched(
            n: int, protected: Set[OffloadKey]
        ) -> list[tuple[OffloadKey, BlockStatus]] | None:
            before = dict(self.policy.blocks)
            victims = evict(n, protected)
            self._check_evicted(n, protected, before, victims)
            return victims

        self.policy.evict = watched  # type: ignore[method-assign]

    def _check_evicted(
        self,
        n: int,
        protected: Set[OffloadKey],
        before: dict[OffloadKey, BlockStatus],
        victims: list[tuple[OffloadKey, BlockStatus]] | None,
    ) -> None:
        left = {k: None for k, block in before.items() if not block.ref_cnt and k not in protected}
        if victims is None:
            assert len(left) < n, "enough blocks could have been evicted"
            assert self.policy.blocks == before
            return
        gone = [key for key, _ in victims]
        assert len(set(gone)) == len(gone) == n
        assert self.policy.blocks.keys() == before.keys() - set(gone)
        assert all(before[key] is block for key, block in victims)
        assert left.keys() >= set(gone), "a block in use was evicted"
        for key in gone:
            del left[key]
            assert not any(self._is_tail(other, key, before) for other in left), "a tail stays"

    def _is_tail(
        self, tail: OffloadKey, head: OffloadKey, blocks: dict[OffloadKey, BlockStatus]
    ) -> bool:
        """True if one block comes behind another one in a prompt, and a request has used both."""
        if head not in self.ancestors[tail]:
            return False
        return not self._users(head, blocks).isdisjoint(self._users(tail, blocks))

    # --- what an engine does --------------------------------------------------------------------

    @rule(
        nodes=st.lists(st.integers(0, NUM_NODES - 1), min_size=1, max_size=8),
        at_once=st.integers(2, NUM_NODES),
    )
    def serve(self, nodes: list[int], at_once: int) -> None:
        """Requests from beginning to end, one after the other."""
        for node in nodes:
            request = self._arrive(node)
            while request.num_offered < len(request.path):
                self._store(request, at_once)
                self._end_stores(request)
            self._finish(request)

    @rule(nodes=st.lists(st.integers(0, NUM_NODES - 1), min_size=1, max_size=4))
    def begin(self, nodes: list[int]) -> None:
        for node in nodes[: MOST_PROMPTS - 1 - len(self.running)]:
            self._arrive(node)

    @rule(
        choices=st.lists(st.integers(0, 99), min_size=1, max_size=6),
        length=st.integers(1, 6),
        ends=st.booleans(),
    )
    @precondition(lambda self: self.running)
    def store(self, choices: list[int], length: int, ends: bool) -> None:
        for choice in choices:
            request = self.running[choice % len(self.running)]
            self._store(request, length)
            if ends:
                self._end_stores(request)

    @rule(choice=st.integers(0, 99), success=st.sampled_from((True, True, True, False)))
    @precondition(lambda self: any(r.writing for r in self.running))
    def end_stores(self, choice: int, success: bool) -> None:
        writing = [request for request in self.running if request.writing]
        self._end_stores(writing[choice % len(writing)], success)

    @rule(choice=st.integers(0, 99), skipped=st.integers(0, 3))
    @precondition(lambda self: self.policy.blocks)
    def load(self, choice: int, skipped: int) -> None:
        """A request loads blocks, and ends before the load does."""
        blocks = list(self.policy.blocks)
        request = self._arrive(self.nodes[blocks[choice % len(blocks)]])
        wanted = request.path[skipped : request.num_offered]
        ready = [key for key in wanted if self.policy.blocks[key].is_ready]
        if ready:
            self.manager.prepare_load(ready, request.context)
            self.loads.append((ready, request.context))
        self._finish(request)

    @rule(choice=st.integers(0, 99))
    @precondition(lambda self: self.loads)
    def end_load(self, choice: int) -> None:
        self.manager.complete_load(*self.loads.pop(choice % len(self.loads)))

    @rule(protected=st.sets(st.integers(0, NUM_NODES - 1), max_size=8))
    def ask_for_too_much(self, protected: set[int]) -> None:
        kept = {key_of(node) for node in protected}
        blocks = self.policy.blocks
        num_idle = sum(not block.ref_cnt and key not in kept for key, block in blocks.items())
        assert self.policy.evict(num_idle + 1, kept) is None

    @rule(choice=st.integers(0, 99))
    @precondition(lambda self: self.running)
    def finish(self, choice: int) -> None:
        self._finish(self.running[choice % len(self.running)])

    def _arrive(self, node: int) -> Running:
        self.num_requests += 1
        request = Running(ReqContext(f"r{self.num_requests}"), self.paths[node])
        self.running.append(request)
        self.manager.on_new_request(request.context)
        request.num_offered = self.manager.lookup_prefix(request.path, request.context).num_hits
        self.manager.touch(request.path, request.context)
        self._note_use(request, request.path)
        return request

    def _store(self, request: Running, length: int) -> None:
        offered = request.path[request.num_offered :][:length]
        request.num_offered += len(offered)
        output = self.manager.prepare_store(offered, request.context) if offered else None
        if output is not None and output.keys_to_store:
            assert output.keys_to_store == [k for k in offered if k in output.keys_to_store]
            request.writing.append(output.keys_to_store)
        self._note_use(request, offered)

    def _end_stores(self, request: Running, success: bool = True) -> None:
        for keys in request.writing:
            self.manager.complete_store(keys, request.context, success)
        request.writing = []

    def _finish(self, request: Running) -> None:
        self._end_stores(request)
        self.manager.on_request_finished(request.context)
        self.running.remove(request)

    def _note_use(self, request: Running, keys: Sequence[OffloadKey]) -> None:
        for key in keys:
            block = self.policy.blocks.get(key)
            if block is not None:
                if self.users.get(key, (0,))[0] != block.generation:
                    self.users[key] = block.generation, set()
                self.users[key][1].add(request.context.req_id)

    def _users(self, key: OffloadKey, blocks: dict[OffloadKey, BlockStatus]) -> set[str]:
        generation, users = self.users[key]
        return users if generation == blocks[key].generation else set()

    # --- what must hold -------------------------------------------------------------------------

    @invariant()
    def the_tree_is_whole(self) -> None:
        if hasattr(self, "policy"):
            check_tree(self.policy)
            states = self.manager.slots.states()
            assert states[SlotState.READY] + states[SlotState.WRITING] == len(self.policy.blocks)
            assert len(self.policy.blocks) <= self.num_blocks

    @invariant()
    def what_leaves_next_is_named(self) -> None:
        """All blocks that could leave, and tails before heads."""
        if not hasattr(self, "policy"):
            return
        blocks = self.policy.blocks
        named = self.policy.next_to_leave(len(blocks))
        assert named == self.policy.next_to_leave(len(blocks))
        names = [key for key, _ in named]
        assert sorted(names) == sorted(key for key, block in blocks.items() if not block.ref_cnt)
        for number, key in enumerate(names):
            later = names[number + 1 :]
            assert not any(self._is_tail(other, key, blocks) for other in later)

    @invariant()
    def memory_is_bounded(self) -> None:
        if not hasattr(self, "policy"):
            return
        policy = self.policy
        assert len(policy._prompts) <= MOST_PROMPTS
        assert len(policy._odds) <= max(self.num_blocks, 16)
        for shadow in policy._contest._shadows:
            assert len(shadow._blocks) <= self.num_blocks
            assert sum(len(each.blocks) for each in shadow._tree) == len(shadow._blocks)
        num_kept = len(with_empty_parents(policy._tree)) - len(list(policy._tree))
        assert num_kept <= self.num_blocks, "too many segments without blocks"

    def teardown(self) -> None:
        if hasattr(self, "policy"):
            for request in list(self.running):
                self._finish(request)
            for load in self.loads:
                self.manager.complete_load(*load)
            assert not self.policy._prompts, "a request that has ended is remembered"
            assert self.policy._tree.num_idle == len(self.policy.blocks)


def test_random_lives() -> None:
    run_state_machine_as_test(
        DensityLives, settings=settings(max_examples=60, stateful_step_count=40)
    )


@pytest.mark.soak
def test_random_lives_for_long() -> None:
    run_state_machine_as_test(
        DensityLives, settings=settings(settings.get_profile("soak"), stateful_step_count=100)
    )


# --- planted bugs ---------------------------------------------------------------------------------

_take = PromptTree._take
_serve = _Shadow.serve


def _takes_pinned_blocks(
    tree: PromptTree, segment: Segment, n: int, protected: Set[OffloadKey]
) -> list[BlockStatus]:
    taken = [block for block in segment.blocks[::-1] if block.ref_cnt >= 0][:n]
    segment.blocks[:] = [block for block in segment.blocks if block not in taken]
    idle = sum(block.ref_cnt == 0 for block in taken)
    segment.idle -= idle
    tree.num_idle -= idle
    return taken


def _ignores_protection(
    tree: PromptTree, segment: Segment, n: int, protected: Set[OffloadKey]
) -> list[BlockStatus]:
    return _take(tree, segment, n, frozenset())


def _counts_everything(tree: PromptTree, protected: Set[OffloadKey], owner: str | None) -> int:
    return tree.num_idle


def _names_no_heads(*args: Any) -> list[BlockStatus]:
    return []


def _remembers_every_prompt(
    policy: DensityCachePolicy, keys: Collection[OffloadKey], req_context: ReqContext
) -> None:
    policy.renew(keys, req_context)


def _samples_without_limit(
    odds: ReuseOdds, key: OffloadKey, group: int, num_keys: int, turn: int
) -> None:
    odds._samples[key] = Sample(group, odds.now, num_keys, turn)


def _grows(shadow: _Shadow, keys: Sequence[OffloadKey], group: int, now: int) -> int:
    shadow._capacity += 1
    hits = _serve(shadow, keys, group, now)
    shadow._capacity -= 1
    return hits


def _draws_lots(rule: Sticky, tree: PromptTree, num_new: int, num_free: int, *_: Any) -> int:
    return random.choice((num_new, min(num_new, num_free)))


BUGS: dict[str, tuple[type, str, Callable[..., object]]] = {
    **{what: (PromptTree, *bug) for what, bug in TREE_BUGS.items()},
    "pinned blocks are evicted": (PromptTree, "_take", _takes_pinned_blocks),
    "blocks of the request that stores are evicted": (PromptTree, "_take", _ignores_protection),
    "more blocks count as evictable": (PromptTree, "num_evictable", _counts_everything),
    "heads of pinned tails are not named": (_Preview, "_heads", _names_no_heads),
    "ended requests are remembered": (
        DensityCachePolicy,
        "on_request_finished",
        _remembers_every_prompt,
    ),
    "samples are not limited": (ReuseOdds, "begin_sample", _samples_without_limit),
    "a shadow holds one block more": (_Shadow, "serve", _grows),
    "chance decides": (Sticky, "num_admitted", _draws_lots),
}


ERRORS = (
    *(AssertionError, KeyError, ValueError, AttributeError, IndexError, TypeError),
    ContractViolation,
)
"""What a planted bug ends in: the oracle sees it, or the policy stumbles over it."""


@pytest.mark.parametrize("bug", BUGS)
def test_a_planted_bug_is_seen(bug: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(*BUGS[bug])
    with pytest.raises(ERRORS):
        run_state_machine_as_test(
            DensityLives,
            settings=settings(
                max_examples=3_000,  # it ends with the first example that shows the bug
                stateful_step_count=40,
                phases=[Phase.generate],
                report_multiple_bugs=False,
            ),
        )
