"""The hit curve of a running engine, against exact stack distances over real traces."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable, Iterator, Sequence
from itertools import accumulate, islice
from typing import NamedTuple

import pytest

from kvtier.base import OffloadKey
from kvtier.cpu.hit_curve import CurvePoint, CurveSize, HitCurve, host_sizes, tier_sizes
from tests.trace_replay import key_of
from tests.traces import coding_agents, conversation

GAUGES = ("ratio", "ratio_of_double")
SIZES = (500, 1000, 2000, 4000, 8000, 16_000)


class ExactCurve:
    """The hit ratio of an LRU cache of any size, from the stack distance of every reference."""

    def __init__(self, requests: Sequence[Sequence[int]]) -> None:
        self._num_references = sum(map(len, requests))
        self._tree = [0] * (self._num_references + 1)
        """A Fenwick tree over the times of the last uses."""
        counts: dict[int, int] = {}
        last: dict[int, int] = {}
        now = 0
        for request in requests:
            for block in request:
                if block in last:
                    distance = len(last) - self._num_until(last[block])
                    counts[distance] = counts.get(distance, 0) + 1
            for block in reversed(request):
                if block in last:
                    self._add(last[block], -1)
                now += 1
                last[block] = now
                self._add(now, 1)
        self._distances = sorted(counts)
        self._num_hits = [0, *accumulate(counts[distance] for distance in self._distances)]

    def _add(self, at: int, n: int) -> None:
        while at <= self._num_references:
            self._tree[at] += n
            at += at & -at

    def _num_until(self, at: int) -> int:
        count = 0
        while at:
            count += self._tree[at]
            at -= at & -at
        return count

    def hit_ratio(self, num_blocks: int) -> float:
        return self._num_hits[bisect_left(self._distances, num_blocks)] / self._num_references


class Trace(NamedTuple):
    prompts: list[list[OffloadKey]]
    exact: ExactCurve


@pytest.fixture(scope="module", params=["conversation", "coding agents"])
def trace(request: pytest.FixtureRequest) -> Trace:
    requests = conversation() if request.param == "conversation" else coding_agents()
    some = list(islice(iter(requests), 12_000 if request.param == "conversation" else 1500))
    keys: dict[int, OffloadKey] = {}
    prompts = [[keys.setdefault(block, key_of(block)) for block in prompt] for prompt in some]
    return Trace(prompts, ExactCurve(some))


def known(points: Iterable[CurvePoint]) -> Iterator[tuple[CurveSize, float]]:
    for size, ratio in points:
        assert ratio is not None
        yield size, ratio


def fed(prompts: Iterable[list[OffloadKey]], num_blocks: int, seed: int = 1) -> HitCurve:
    curve = HitCurve(host_sizes(num_blocks), seed)
    for prompt in prompts:
        curve.note_prompt(prompt, len(prompt))
    return curve


def test_the_estimates_are_those_of_exact_stack_distances(
    trace: Trace, monkeypatch: pytest.MonkeyPatch
) -> None:
    # The exact curve gives all references the same weight.
    monkeypatch.setattr("kvtier.cpu.hit_curve._HALVED_AT", 1 << 60)
    errors = []
    for num_blocks in SIZES:
        for seed in range(2):
            for size, ratio in known(fed(trace.prompts, num_blocks, seed).points()):
                errors.append(abs(ratio - trace.exact.hit_ratio(size.num_blocks)))
    assert sum(errors) / len(errors) < 0.015
    assert max(errors) < 0.08


def test_more_memory_never_has_fewer_hits(trace: Trace) -> None:
    ratios = [ratio for _, ratio in known(fed(trace.prompts, 4000).points())]
    assert ratios == sorted(ratios)
    assert 0 <= ratios[0] <= ratios[-1] <= 1


def run_of(chat: int, length: int = 40) -> list[OffloadKey]:
    return [key_of(chat << 20 | block) for block in range(length)]


def test_nothing_is_estimated_from_few_requests() -> None:
    curve = fed([run_of(0)], 1000)
    assert [ratio for _, ratio in curve.points()] == [None] * 4
    assert curve.gauges == {}


def test_the_gauges_have_the_estimates() -> None:
    curve = fed((run_of(n % 10) for n in range(2000)), 1000)
    assert curve.gauges.keys() == {
        f"kvtier_cpu_estimated_hit_ratio{suffix}"
        for suffix in ("_half", "", "_double", "_quadruple")
    }
    for size, ratio in known(curve.points()):
        assert curve.gauges[size.gauge] == pytest.approx(ratio, abs=0.01)
        assert ratio == pytest.approx(0.995, abs=0.02)


def test_a_small_host_memory_is_estimated_exactly() -> None:
    """In turns, 10 chats of 40 blocks fit into 400 blocks, but not into 300."""
    curve = fed((run_of(n % 10) for n in range(500)), 200)
    half, same, double, quadruple = (ratio for _, ratio in known(curve.points()))
    assert half == same == 0
    assert double > 0.9
    assert quadruple > 0.9


def test_memory_is_bounded_and_old_keys_are_let_go() -> None:
    curve = HitCurve([*host_sizes(2000), *tier_sizes(GAUGES, "tier 0", 2000, 10**9, adds=True)], 1)
    bounded = fed((run_of(n, 2000) for n in range(400)), 2000)
    for watching in (curve, bounded):
        assert len(watching._numbers) == len(watching._keys) <= 9500
    assert len(bounded._numbers) * bounded.every < 1.3 * 4 * 2000
    assert sum(map(len, bounded._runs.values())) == len(bounded._numbers)
    assert curve.every > 200_000


def test_old_requests_count_less_and_less() -> None:
    curve = fed((run_of(n) for n in range(20_000)), 100)
    assert curve.gauges["kvtier_cpu_estimated_hit_ratio"] == 0
    for _ in range(40_000):
        curve.note_prompt(run_of(0), 40)
    assert curve.gauges["kvtier_cpu_estimated_hit_ratio"] > 0.9
    for number in range(20_000, 60_000):
        curve.note_prompt(run_of(number), 40)
    assert curve.gauges["kvtier_cpu_estimated_hit_ratio"] < 0.1


def test_answers_are_stored_but_not_looked_up() -> None:
    """Each chat has a second turn, whose prompt contains the first one and its answer."""
    curve = HitCurve(host_sizes(1000), 1)
    for chat in range(500):
        curve.note_prompt(run_of(chat, 40), 20)
        curve.note_prompt(run_of(chat, 40), 40)
    assert curve.num_blocks == 500 * 60
    same = dict(known(curve.points()))[host_sizes(1000)[1]]
    assert same == pytest.approx(40 / 60, abs=0.05)


def test_a_reset_forgets_all_blocks() -> None:
    curve = fed((run_of(n % 10) for n in range(400)), 1000)
    num_found = sum(curve._num_found)
    assert num_found > 0
    curve.reset()
    for chat in range(10):
        curve.note_prompt(run_of(chat), 40)
    assert sum(curve._num_found) == num_found


def test_prompts_that_branch_in_one_run_of_blocks() -> None:
    """Many prompts with the same first blocks: the run of the first one has many watched blocks."""
    head = run_of(0, 8)
    curve = fed((head + run_of(1 + n % 50, 40) for n in range(3000)), 8000)
    for _, ratio in known(curve.points()):
        assert ratio > 0.9


def test_a_tier_has_copies_or_blocks_of_its_own() -> None:
    copies = tier_sizes(GAUGES, "tier 0 (disk)", 100, 400, adds=False)
    assert [(size.factor, size.num_blocks) for size in copies] == [(1, 400), (2, 800)]
    assert tuple(size.gauge for size in copies) == GAUGES
    own = tier_sizes(GAUGES, "tier 0", 100, 400, adds=True)
    assert [size.num_blocks for size in own] == [500, 900]
    small = tier_sizes(GAUGES, "tier 0", 100, 40, adds=False)
    assert [size.num_blocks for size in small] == [100, 100]
