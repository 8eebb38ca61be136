"""The guard with an engine: prompts are loaded or computed, whichever is faster."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvtier.base import OffloadingManager, OffloadKey, ReqContext
from kvtier.cpu.manager import CPUOffloadingManager
from kvtier.tiering.base import TransferJob
from kvtier.tiering.manager import GroupShape
from tests.tiering.driven_manager import DrivenManager, key, keys

TOKENS = 16
"""Tokens of a block."""
CHUNK = 2048
AT_START, PER_POSITION = 23e-6, 1e-9
"""Cost of a token: about 50 ms for 2,048, 220 ms for 8,192, 1,300 ms for 32,768."""
SHORT, LONG = 2048, 32768
SHORT_BLOCK_S = TOKENS * (AT_START + PER_POSITION * SHORT / 2)
"""Seconds per block at which a disk is as fast as computing a short prompt."""
LONG_BLOCK_S = TOKENS * (AT_START + PER_POSITION * LONG / 2)


def compute_time(num_tokens: int, start: int = 0) -> float:
    return num_tokens * (AT_START + PER_POSITION * (start + num_tokens / 2))


class GuardedEngine:
    """An engine that computes at a known speed, or loads from a disk of a known speed."""

    def __init__(self, block_s: float, latency_s: float = 0.0, num_tiers: int = 1) -> None:
        self.rig = DrivenManager(
            num_blocks=4096,
            num_tiers=num_tiers,
            groups={0: GroupShape(TOKENS)},
            prefill_tokens_per_s=None,
            load_timeout_s=100.0,
        )
        self.block_s, self.latency_s = block_s, latency_s
        self._num_prompts = 0

    def new_prompt(self, num_tokens: int) -> list[OffloadKey]:
        self._num_prompts += 1
        first = self._num_prompts * 100_000
        return keys(*range(first, first + num_tokens // TOKENS))

    def load_time(self, num_blocks: int) -> float:
        return self.latency_s + self.block_s * num_blocks

    def compute(self, num_tokens: int, start: int = 0, slowdown: float = 1.0) -> float:
        """Compute a prompt and report it. Returns how long it takes."""
        total = 0.0
        for first in range(start, start + num_tokens, CHUNK):
            n = min(CHUNK, start + num_tokens - first)
            seconds = compute_time(n, first) * slowdown
            self.rig.manager.note_prefill(n, first + n / 2, seconds)
            self.rig.step(seconds=seconds)
            total += seconds
        return total

    def is_loaded(
        self, prompt: list[OffloadKey], start: int = 0, *, num_prompt_tokens: int | None
    ) -> bool:
        """Look up a prompt behind its first `start` tokens. Returns True if all of it was
        loaded."""
        rig = self.rig
        wanted = prompt[start // TOKENS :]
        request = rig.begin(f"request {self._num_prompts}", num_prompt_tokens=num_prompt_tokens)
        answers = rig.look_up(wanted, request)
        found = [block for block, answer in zip(wanted, answers, strict=True) if answer != "M"]
        rig.step(seconds=0.0)
        for tier in rig.tiers:
            for job in tier.loads():
                seconds = self.load_time(len(job.keys))
                rig.clock.now += seconds
                tier.finish(job, transfer_time=seconds)
        is_loaded = bool(found) and rig.look_up(found, request) == "H" * len(found)
        rig.manager.on_request_finished(request)
        rig.step()
        return is_loaded

    def loads_again(self, num_tokens: int, start: int = 0) -> bool:
        """True if a prompt is loaded, of which everything behind `start` is only on disk."""
        prompt = self.new_prompt(num_tokens)
        self.rig.keep_below(prompt[start // TOKENS :])
        return self.is_loaded(prompt, start, num_prompt_tokens=num_tokens)

    def learn_disk(self) -> None:
        for number in range(1, 13):
            assert self.loads_again(number * 2 * TOKENS)

    def learn_computing(self, *lengths: int) -> None:
        for _ in range(8):
            for length in lengths:
                self.compute(length)

    def stop_exploring(self) -> None:
        for tier in self.rig.manager._tiers:
            tier.load_speed.explored(self.rig.clock.now + 1e6)


def learnt(block_s: float, *lengths: int, latency_s: float = 0.0) -> GuardedEngine:
    engine = GuardedEngine(block_s, latency_s)
    engine.learn_disk()
    engine.learn_computing(*lengths)
    engine.stop_exploring()
    return engine


@pytest.mark.parametrize(
    ("block_s", "short_is_loaded", "long_is_loaded"),
    [
        (SHORT_BLOCK_S * 0.9, True, True),
        (SHORT_BLOCK_S * 1.1, False, True),
        (LONG_BLOCK_S * 0.9, False, True),
        (LONG_BLOCK_S * 1.1, False, False),
    ],
)
def test_each_side_of_the_break_even_for_short_and_long_prompts(
    block_s: float, short_is_loaded: bool, long_is_loaded: bool
) -> None:
    engine = learnt(block_s, SHORT, LONG)
    assert engine.loads_again(SHORT) == short_is_loaded
    assert engine.loads_again(LONG) == long_is_loaded


def test_what_is_looked_up_as_a_whole_is_declined_in_the_same_step() -> None:
    """Host memory has the head of it."""
    engine = learnt(SHORT_BLOCK_S * 1.5, SHORT)
    rig, prompt = engine.rig, engine.new_prompt(SHORT)
    num_above = 16
    before = rig.begin("before")
    rig.store(prompt[:num_above], before)
    rig.manager.on_request_finished(before)
    rig.keep_below(prompt[num_above:])
    rig.step()
    request = rig.begin("asks", num_prompt_tokens=SHORT)
    assert rig.manager.lookup_prefix(prompt, request) == (num_above, True)
    assert rig.stat("declined_slower_blocks") == len(prompt) - num_above
    rig.step()
    assert rig.tiers[0].loads() == []
    assert rig.manager.lookup_prefix(prompt, request) == (num_above, True)


def test_what_is_looked_up_as_a_whole_is_awaited_if_it_is_worth_it() -> None:
    engine = learnt(SHORT_BLOCK_S / 2, SHORT)
    rig, prompt = engine.rig, engine.new_prompt(SHORT)
    rig.keep_below(prompt)
    request = rig.begin("asks", num_prompt_tokens=SHORT)
    assert rig.manager.lookup_prefix(prompt, request) == (len(prompt), False)
    rig.step()
    assert [job.keys for job in rig.tiers[0].loads()] == [prompt]


def explored(engine: GuardedEngine, prompt: list[OffloadKey]) -> tuple[ReqContext, TransferJob]:
    """A request whose prompt is declined when it is time to explore, and the job that does."""
    rig = engine.rig
    rig.keep_below(prompt)
    rig.clock.now += 2e6
    request = rig.begin("asks", num_prompt_tokens=len(prompt) * TOKENS)
    assert rig.manager.lookup_prefix(prompt, request) == (0, True)
    rig.step()
    (job,) = rig.tiers[0].loads()
    return request, job


def test_a_slow_tier_is_still_explored_and_nobody_waits_for_that() -> None:
    engine = learnt(SHORT_BLOCK_S * 1.5, SHORT)
    rig, prompt = engine.rig, engine.new_prompt(SHORT)
    request, job = explored(engine, prompt)
    assert job.keys == prompt  # it takes less than a quarter of a second
    for asks in (request, rig.begin("has the same prompt", num_prompt_tokens=SHORT)):
        assert rig.manager.lookup_prefix(prompt, asks) == (0, True)
        rig.manager.on_request_finished(asks)
    rig.tiers[0].finish(job, transfer_time=engine.load_time(len(prompt)))
    rig.step()
    after = rig.begin("asks again", num_prompt_tokens=SHORT)
    assert rig.manager.lookup_prefix(prompt, after) == (len(prompt), True)
    rig.manager.on_request_finished(after)
    another = engine.new_prompt(SHORT)
    rig.keep_below(another)
    other = rig.begin("asks for another", num_prompt_tokens=SHORT)
    assert rig.manager.lookup_prefix(another, other) == (0, True)
    rig.step()
    assert rig.tiers[0].loads() == []  # not so soon


def test_a_tier_that_was_slow_once_is_found_to_be_quick_again() -> None:
    """Although no request has waited for it since."""
    engine = learnt(LONG_BLOCK_S * 1.2, SHORT, LONG)
    rig = engine.rig
    for _ in range(4):
        for tier in rig.manager._tiers:
            tier.load_speed.estimate.note(LONG // TOKENS, engine.load_time(LONG // TOKENS))
    assert not engine.loads_again(LONG)
    engine.block_s = SHORT_BLOCK_S / 2
    num_explored = 0
    for _ in range(40):
        rig.clock.now += 1e7  # past the time that it was not to be explored before
        if engine.loads_again(LONG):
            break
        num_explored += 1
    assert 1 <= num_explored < 25


def test_what_is_explored_takes_little_of_a_slow_disk() -> None:
    engine = learnt(0.02, SHORT)
    prompt = engine.new_prompt(LONG)
    _, job = explored(engine, prompt)
    assert job.keys == prompt[:8]


@pytest.mark.parametrize("latency_s", [0.05, 0.13, 0.3, 0.45])
@pytest.mark.parametrize("known", [(8, 8, 8), (4, 6, 8)], ids=["alike", "some"])
def test_a_tier_that_takes_its_time_for_any_number_is_not_taken_to_be_slow(
    latency_s: float, known: tuple[int, ...]
) -> None:
    """In proportion to a few blocks, a prompt would take minutes."""
    engine = GuardedEngine(1e-4, latency_s)
    for turn in range(12):
        assert engine.loads_again(known[turn % len(known)] * TOKENS)
    engine.learn_computing(SHORT, LONG)
    num_computed = 0
    while not engine.loads_again(LONG):
        engine.rig.clock.now += 20
        num_computed += 1
        assert num_computed < 15
    assert all(engine.loads_again(LONG) for _ in range(10))


def test_exploring_never_keeps_a_slow_tier_busy_for_long() -> None:
    engine = learnt(0.02, LONG, latency_s=0.1)
    longest = 0.0
    for number in range(30):
        engine.rig.clock.now += number * 2e6
        before = engine.rig.stat("loaded_blocks")
        assert not engine.loads_again(LONG)
        longest = max(longest, engine.load_time(int(engine.rig.stat("loaded_blocks") - before)))
    assert 0.3 < longest <= 1.0


def test_what_a_tier_has_lost_is_no_queue_for_the_next_load() -> None:
    engine = learnt(SHORT_BLOCK_S * 0.3, SHORT, LONG)
    rig, prompt = engine.rig, engine.new_prompt(LONG // 2)
    rig.keep_below(prompt)
    request = rig.begin("loses", num_prompt_tokens=LONG // 2)
    rig.look_up(prompt, request)
    rig.step()
    (lost,) = rig.tiers[0].loads()
    rig.tiers[0].waiting.remove(lost)
    rig.step(seconds=101.0)
    rig.manager.on_request_finished(request)
    assert all(engine.loads_again(SHORT) for _ in range(10))


def test_where_one_tier_is_declined_the_next_one_is_asked() -> None:
    engine = GuardedEngine(SHORT_BLOCK_S * 1.5, num_tiers=2)
    rig = engine.rig
    slow, unknown = rig.tiers
    engine.learn_disk()
    engine.learn_computing(SHORT)
    engine.stop_exploring()
    prompt = engine.new_prompt(SHORT)
    rig.keep_below(prompt, slow)
    rig.keep_below(prompt, unknown)
    request = rig.begin("asks", num_prompt_tokens=SHORT)
    assert rig.manager.lookup_prefix(prompt, request) == (len(prompt), False)
    rig.step()
    assert slow.loads() == []
    assert [job.keys for job in unknown.loads()] == [prompt[:8]], "it is measured first"
    unknown.finish(transfer_time=0.001)
    assert rig.manager.lookup_prefix(prompt, request) == (len(prompt), False)
    rig.step()
    assert [job.keys for job in unknown.loads()] == [prompt[8:]]


MIDDLE = 8192
TAIL = 65


def answer(engine: GuardedEngine, overhead_s: float) -> bool:
    """A prompt on disk, followed by a few computed tokens. Returns True if it was loaded."""
    is_loaded = engine.loads_again(MIDDLE)
    if not is_loaded:
        engine.compute(MIDDLE)
    tail_s = overhead_s + compute_time(TAIL, MIDDLE)
    engine.rig.manager.note_prefill(TAIL, MIDDLE + TAIL / 2, tail_s)
    engine.rig.step(seconds=tail_s)
    return is_loaded


def test_what_few_tokens_cost_is_found_out_not_to_be_what_many_cost() -> None:
    """Only the few tokens behind the prompts are ever computed: mostly overhead."""
    engine = GuardedEngine(TOKENS * 80e-6)
    engine.learn_disk()
    loaded = [answer(engine, overhead_s=0.012) for _ in range(400)]
    assert all(loaded[:8])
    assert sum(loaded[-100:]) < 5
    assert 1 <= engine.rig.stat("trial_requests") < loaded.count(False)


def test_where_loading_is_quicker_by_far_hardly_anything_is_computed() -> None:
    engine = GuardedEngine(TOKENS * 8e-6)
    engine.learn_disk()
    engine.learn_computing(MIDDLE)
    loaded = [answer(engine, overhead_s=0.0) for _ in range(300)]
    assert all(loaded)


def test_a_trial_is_computed_whoever_else_could_bring_it() -> None:
    engine = GuardedEngine(TOKENS * 20e-6, num_tiers=2)
    rig = engine.rig
    engine.learn_disk()
    engine.rig.manager._guard._trials.note_load(1e6)
    engine.learn_computing(SHORT)
    prompt = engine.new_prompt(MIDDLE)
    for tier in rig.tiers:
        rig.keep_below(prompt, tier)
    request = rig.begin("is tried", num_prompt_tokens=MIDDLE)
    assert rig.look_up(prompt, request) == "P" * len(prompt)
    for _ in range(3):
        rig.step()
        assert rig.look_up(prompt, request) == "M" * len(prompt)
    assert [tier.loads() for tier in rig.tiers] == [[], []]
    assert rig.stat("trial_requests") == 1
    assert engine.is_loaded(prompt, num_prompt_tokens=MIDDLE)


def test_what_cannot_be_loaded_spares_nothing_for_trials(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = learnt(TOKENS * 20e-6, MIDDLE)
    rig, prompt = engine.rig, engine.new_prompt(MIDDLE)
    rig.keep_below(prompt)
    monkeypatch.setattr(rig.manager._tiers[0].jobs, "num_loadable", lambda _: 0)
    request = rig.begin("waits for room", num_prompt_tokens=MIDDLE)
    before = rig.manager._guard._trials._saved_s
    for _ in range(10):
        rig.look_up(prompt, request)
        rig.step()
    assert rig.manager._guard._trials._saved_s == before


@pytest.mark.parametrize("configured", [0, 1000.0])
def test_what_is_configured_is_not_doubted(configured: float) -> None:
    rig = DrivenManager(
        num_blocks=4096, groups={0: GroupShape(TOKENS)}, prefill_tokens_per_s=configured
    )
    rig.manager._guard._trials.note_load(1e6)
    estimate = rig.manager._tiers[0].load_speed.estimate
    for number in range(1, 13):
        estimate.note(number, number * 0.001)
    rig.manager.note_prefill(CHUNK, CHUNK / 2, 0.05)
    prompt = keys(*range(500))
    rig.keep_below(prompt)
    assert rig.look_up(prompt, rig.begin("asks")) == "P" * len(prompt)
    rig.step()
    assert [job.keys for job in rig.tiers[0].loads()] == [prompt]


def test_before_it_is_known_what_computing_takes_quick_loads_are_made() -> None:
    engine = GuardedEngine(block_s=0.005)
    engine.learn_disk()
    assert engine.loads_again(SHORT)


def test_before_it_is_known_what_computing_takes_some_slow_loads_are_not_made() -> None:
    """Computing shows the cost. An engine that never reports its steps still loads."""
    engine = GuardedEngine(block_s=0.02)
    engine.learn_disk()
    assert [engine.loads_again(SHORT) for _ in range(10)] == [False] * 8 + [True] * 2


def test_the_latency_of_a_disk_counts_most_for_short_prompts() -> None:
    engine = learnt(SHORT_BLOCK_S * 0.8, SHORT, LONG, latency_s=0.02)
    assert not engine.loads_again(SHORT)
    assert engine.loads_again(LONG)


def test_the_end_of_a_long_prompt_is_dearer_than_its_start() -> None:
    """The same number of blocks; the rest of the prompt is on the device."""
    engine = learnt(SHORT_BLOCK_S * 1.3, SHORT, LONG)
    assert not engine.loads_again(SHORT)
    assert engine.loads_again(LONG, start=LONG - SHORT)


def test_without_the_length_of_the_prompt_it_is_taken_for_its_start() -> None:
    engine = learnt(SHORT_BLOCK_S * 1.3, SHORT, LONG)
    prompt = engine.new_prompt(LONG)
    engine.rig.keep_below(prompt[-SHORT // TOKENS :])
    assert not engine.is_loaded(prompt, LONG - SHORT, num_prompt_tokens=None)


def test_what_a_miss_has_ended_is_taken_for_the_start_of_the_prompt() -> None:
    engine = learnt(SHORT_BLOCK_S * 1.3, SHORT, LONG)
    prompt = engine.new_prompt(LONG)
    engine.rig.keep_below(prompt[: SHORT // TOKENS])
    assert not engine.is_loaded(prompt, num_prompt_tokens=LONG)


def test_a_request_that_has_more_tokens_than_its_prompt_is_priced_from_its_start() -> None:
    """It was preempted, and what it had generated comes back as well."""
    engine = learnt(SHORT_BLOCK_S * 1.1, SHORT, LONG)
    prompt = engine.new_prompt(SHORT)
    engine.rig.keep_below(prompt)
    assert not engine.is_loaded(prompt, num_prompt_tokens=SHORT // 2)


@pytest.mark.parametrize(("token_s", "is_loaded"), [(30e-6, True), (35e-6, False)])
def test_what_comes_from_several_tiers_is_priced_no_deeper_than_its_first_half(
    token_s: float, is_loaded: bool
) -> None:
    """Which of them has the end of the prompt is not asked. A token costs 31 us around the first
    quarter of it, and 47 us around the third."""
    engine = GuardedEngine(TOKENS * token_s, num_tiers=2)
    first, second = engine.rig.tiers
    for number in range(1, 13):
        prompt = engine.new_prompt(number * 4 * TOKENS)
        engine.rig.keep_below(prompt[::2], first)
        engine.rig.keep_below(prompt[1::2], second)
        assert engine.is_loaded(prompt, num_prompt_tokens=None)
    engine.learn_computing(SHORT, LONG)
    engine.stop_exploring()
    prompt = engine.new_prompt(LONG)
    engine.rig.keep_below(prompt[: len(prompt) // 2], first)
    engine.rig.keep_below(prompt[len(prompt) // 2 :], second)
    assert engine.is_loaded(prompt, num_prompt_tokens=LONG) == is_loaded


@pytest.mark.parametrize("slowdown", [3.0, 1000.0])
def test_a_slow_moment_of_the_engine_does_not_make_a_slow_disk_welcome(slowdown: float) -> None:
    engine = learnt(LONG_BLOCK_S * 1.2, SHORT, LONG)
    for number in range(40):
        engine.compute(SHORT, slowdown=1.0 if number % 3 else slowdown)
        assert not engine.loads_again(SHORT)


def test_a_disk_that_becomes_quicker_is_used_again() -> None:
    engine = learnt(SHORT_BLOCK_S * 2, SHORT)
    assert not engine.loads_again(SHORT)
    engine.block_s = SHORT_BLOCK_S / 4
    engine.rig.clock.now += 1e6
    for _ in range(100):
        engine.rig.clock.now += 11
        engine.loads_again(SHORT)  # a few blocks of it, to see
    assert engine.loads_again(SHORT)


def test_the_rate_that_is_shown_is_the_one_it_goes_by() -> None:
    engine = learnt(SHORT_BLOCK_S, SHORT)
    rate = engine.rig.stat("prefill_tokens_per_s")
    assert rate == pytest.approx(SHORT / compute_time(SHORT))


def test_a_step_that_is_told_ends_learning_from_stores() -> None:
    engine = GuardedEngine(1.0)
    engine.rig.manager.note_prefill(CHUNK, CHUNK / 2, 0.05)
    request = engine.rig.begin("r")
    for number in range(20):
        engine.rig.store([key(number)], request)
        engine.rig.step(seconds=0.1)
    assert engine.rig.stat("prefill_tokens_per_s") == 0


@given(
    block_s=st.floats(1e-5, 1e-2),
    latency_s=st.floats(0, 0.1),
    factor=st.floats(1, 10),
    num_blocks=st.integers(1, 300),
    head=st.integers(0, 1000),
)
def test_a_slower_disk_is_never_loaded_from_more(
    block_s: float, latency_s: float, factor: float, num_blocks: int, head: int
) -> None:
    loads = []
    for slowness in (1.0, factor):
        engine = GuardedEngine(block_s * slowness, latency_s * slowness)
        # Not by loads: a thousand of them for each example.
        estimate = engine.rig.manager._tiers[0].load_speed.estimate
        for number in range(1, 13):
            estimate.note(2 * number, engine.load_time(2 * number))
        engine.learn_computing(SHORT, LONG)
        engine.stop_exploring()
        loads.append(engine.loads_again((head + num_blocks) * TOKENS, head * TOKENS))
    assert loads[0] or not loads[1]


def serve(engine: GuardedEngine, guard: bool, lengths: list[int]) -> float:
    """Prompts that were on disk from the start: how long until all are on the device."""
    total = 0.0
    for length in lengths:
        if not guard or engine.loads_again(length):
            total += engine.load_time(length // TOKENS)
        else:
            total += engine.compute(length)
    return total


@pytest.mark.parametrize("factor", [0.25, 0.9, 1.2, 1.5, 2.5, 10.0])
@pytest.mark.parametrize("latency_s", [0.0, 0.03])
def test_all_in_all_it_takes_hardly_longer_than_the_better_of_both_for_each(
    factor: float, latency_s: float
) -> None:
    engine = learnt(SHORT_BLOCK_S * factor, SHORT, 8192, LONG, latency_s=latency_s)
    lengths = [SHORT, 8192, SHORT, LONG, SHORT, 8192] * 2
    best = sum(min(engine.load_time(n // TOKENS), compute_time(n)) for n in lengths)
    taken = serve(engine, True, lengths)
    assert taken <= best * 1.03
    always_loaded = serve(engine, False, lengths)
    assert taken <= always_loaded * 1.001


@pytest.mark.parametrize(
    "make",
    [lambda: CPUOffloadingManager(8), lambda: DrivenManager(prefill_tokens_per_s=500).manager],
    ids=["no guard", "configured"],
)
def test_any_manager_can_be_told(make: Callable[[], OffloadingManager]) -> None:
    manager = make()
    for _ in range(20):
        manager.note_prefill(CHUNK, CHUNK / 2, 0.05)
    stats = manager.get_stats()
    assert stats is not None
    assert stats.gauges.get("kvtier_tiering_prefill_tokens_per_s", 500) == 500


def test_a_request_need_not_say_how_long_its_prompt_is() -> None:
    assert ReqContext("r").num_prompt_tokens is None
    assert ReqContext("r", num_prompt_tokens=5).num_prompt_tokens == 5


def test_a_tier_whose_first_measurement_failed_is_used_all_the_same(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The load that was to measure it raised, and is never reported."""
    rig = DrivenManager(num_blocks=64, prefill_tokens_per_s=None)
    tier, prompt = rig.tiers[0], keys(*range(8))
    rig.keep_below(prompt)

    def refuse(job: TransferJob) -> None:
        monkeypatch.undo()
        raise ConnectionError("the server is restarting")

    monkeypatch.setattr(tier, "submit_load", refuse)
    first = rig.begin("first")
    assert not rig.manager.lookup_prefix(prompt, first).is_final
    rig.step()
    assert rig.manager.lookup_prefix(prompt, first) == (0, True)
    rig.manager.on_request_finished(first)
    rig.clock.now += 60
    rig.step()
    # The slots of the load that raised may still be written to: they stay out of use.
    prompt = keys(*range(100, 108))
    rig.keep_below(prompt)
    second = rig.begin("second")
    assert not rig.manager.lookup_prefix(prompt, second).is_final
    rig.step()
    tier.finish(transfer_time=0.001)
    assert rig.manager.lookup_prefix(prompt, second) == (8, True)


# --- other requests ----------------------------------------------------------------------------


@pytest.mark.parametrize(("num_others", "is_loaded"), [(0, False), (1, True)])
def test_computing_counts_once_more_for_every_request_that_it_holds_up(
    num_others: int, is_loaded: bool
) -> None:
    """Loading takes one and a half times as long as computing."""
    engine = learnt(SHORT_BLOCK_S * 1.5, SHORT)
    for n in range(num_others):
        engine.rig.begin(f"decodes {n}")
    assert engine.loads_again(SHORT) == is_loaded


def test_requests_that_wait_for_loads_are_not_held_up() -> None:
    """Behind another load, loading takes 1.8 times as long as computing."""
    engine = learnt(SHORT_BLOCK_S * 0.9, SHORT)
    rig = engine.rig
    first, second = engine.new_prompt(SHORT), engine.new_prompt(SHORT)
    rig.keep_below([*first, *second])
    loads = rig.begin("loads", num_prompt_tokens=SHORT)
    assert rig.manager.lookup_prefix(first, loads) == (len(first), False)
    rig.step()
    assert len(rig.tiers[0].loads()) == 1
    other = rig.begin("is alone with the device", num_prompt_tokens=SHORT)
    assert rig.manager.lookup_prefix(second, other) == (0, True)


@pytest.mark.parametrize("what", ["has ended", "was never announced"])
def test_who_does_not_wait_for_its_load_makes_no_other_one_wait_less(what: str) -> None:
    """A request decodes, and would be held up. Another one's load goes on, though it has ended or
    was never counted."""
    engine = learnt(SHORT_BLOCK_S * 0.9, SHORT)
    rig = engine.rig
    first, second = engine.new_prompt(SHORT), engine.new_prompt(SHORT)
    rig.keep_below([*first, *second])
    loads = ReqContext("loads", num_prompt_tokens=SHORT)
    if what == "has ended":
        rig.manager.on_new_request(loads)
    assert rig.manager.lookup_prefix(first, loads) == (len(first), False)
    rig.step()
    if what == "has ended":
        rig.manager.on_request_finished(loads)
    rig.begin("decodes")
    other = rig.begin("other", num_prompt_tokens=SHORT)
    assert rig.manager.lookup_prefix(second, other) == (len(second), False)


def test_a_load_that_would_miss_its_deadline_is_not_begun() -> None:
    engine = GuardedEngine(SHORT_BLOCK_S)
    engine.learn_disk()
    engine.learn_computing(SHORT)
    engine.stop_exploring()
    for n in range(10_000):
        engine.rig.begin(f"decodes {n}")
    assert engine.loads_again(SHORT)
    (tier,) = engine.rig.manager._tiers
    for _ in range(8):
        tier.load_speed.estimate.note(SHORT // TOKENS, tier.settings.load_timeout_s * 1.1)
    assert not engine.loads_again(SHORT)


@pytest.mark.parametrize(("num_shared", "waits"), [(4, False), (8192 // TOKENS, True)])
def test_a_short_prompt_does_not_wait_for_the_end_of_a_long_one(
    num_shared: int, waits: bool
) -> None:
    """They begin with the same blocks, which another request is loading with many more."""
    engine = learnt(SHORT_BLOCK_S * 0.9, SHORT, LONG)
    rig = engine.rig
    long_prompt = engine.new_prompt(LONG)
    rig.keep_below(long_prompt)
    first = rig.begin("long", num_prompt_tokens=LONG)
    assert not rig.manager.lookup_prefix(long_prompt, first).is_final
    rig.step()
    (job,) = rig.tiers[0].loads()
    short_prompt = [*long_prompt[:num_shared], *engine.new_prompt(TOKENS)]
    num_tokens = len(short_prompt) * TOKENS
    second = rig.begin("short", num_prompt_tokens=num_tokens)
    answer = rig.manager.lookup_prefix(short_prompt, second)
    assert answer == ((num_shared, False) if waits else (0, True))
    rig.step()
    assert rig.manager.lookup_prefix(short_prompt, second) == answer, "it stays so"
    rig.tiers[0].finish(job, transfer_time=engine.load_time(len(job.keys)))
    rig.step()
    assert rig.manager.lookup_prefix(long_prompt, first) == (len(long_prompt), True)
    for request in (first, second):
        rig.manager.on_request_finished(request)
    rig.step()
    assert not any(rig.manager.open_work().values())


def test_requests_are_counted_until_they_end() -> None:
    """Whatever the order of their last calls, and also if an id is used again."""
    rig = DrivenManager(num_blocks=8)
    step = rig.manager._step
    one = rig.begin("one")
    rig.begin("two")
    assert step.num_requests == 2
    rig.begin("one")
    assert step.num_requests == 2
    rig.manager.on_request_finished(one)
    rig.manager.on_request_finished(one)
    assert step.num_requests == 1
    rig.manager.lookup(keys(1)[0], ReqContext("was never announced"))
    assert step.num_requests == 1
    rig.manager.on_request_finished(ReqContext("two"))
    assert step.num_requests == 0


def long_load() -> tuple[GuardedEngine, list[OffloadKey], ReqContext, TransferJob]:
    """A request loads a long prompt, all but its first four blocks, which host memory has or gets
    from the device. Returns the engine, the prompt, the request and its job."""
    engine = learnt(SHORT_BLOCK_S * 0.9, SHORT, LONG)
    rig = engine.rig
    prompt = engine.new_prompt(LONG)
    rig.keep_below(prompt[4:])
    head = rig.begin("stores the head")
    output = rig.manager.prepare_store(prompt[:4], head)
    assert output is not None
    request = rig.begin("long", num_prompt_tokens=LONG)
    assert not rig.manager.lookup_prefix(prompt, request).is_final
    rig.step()
    (job,) = rig.tiers[0].loads()
    assert list(job.keys) == prompt[4:]
    return engine, prompt, head, job


@pytest.mark.parametrize("is_ready", [False, True])
def test_a_head_that_the_device_is_still_writing_is_not_a_hit(is_ready: bool) -> None:
    """A short prompt does not wait for the tail of a long one, but for the head that both share."""
    engine, prompt, head, _ = long_load()
    if is_ready:
        engine.rig.manager.complete_store(prompt[:4], head)
    short = engine.rig.begin("short", num_prompt_tokens=9 * TOKENS)
    assert engine.rig.manager.lookup_prefix(prompt[:8], short) == (4, is_ready)
    engine.rig.step()
    assert engine.rig.manager.lookup_prefix(prompt[:8], short) == (4, is_ready)
    if not is_ready:
        engine.rig.manager.complete_store(prompt[:4], head)
        assert engine.rig.manager.lookup_prefix(prompt[:8], short) == (4, True)


def test_nothing_is_kept_for_a_request_that_computes_instead_of_waiting() -> None:
    engine, prompt, head, job = long_load()
    rig = engine.rig
    rig.manager.complete_store(prompt[:4], head)
    short = rig.begin("short", num_prompt_tokens=9 * TOKENS)
    assert rig.manager.lookup_prefix(prompt[:8], short) == (4, True)
    rig.manager.on_request_finished(rig.manager._requests._requests["long"].context)
    rig.tiers[0].finish(job, transfer_time=engine.load_time(len(job.keys)))
    rig.step()
    rig.step()
    assert rig.manager.open_work()["leased blocks"] == 0


def test_not_everybody_computes_what_one_load_brings() -> None:
    """Each of them would be faster alone."""
    engine, prompt, head, _ = long_load()
    engine.rig.manager.complete_store(prompt[:4], head)
    answers = []
    for n in range(100):
        short = engine.rig.begin(f"short {n}", num_prompt_tokens=65 * TOKENS)
        answers.append(engine.rig.manager.lookup_prefix(prompt[:64], short).is_final)
    assert answers[0]
    assert 1 <= sum(answers) < 10


def test_a_tier_that_did_not_know_a_block_keeps_nobody_waiting_for_it() -> None:
    """Another request has brought the block meanwhile, with many more."""
    engine = learnt(SHORT_BLOCK_S * 0.5, SHORT, LONG)
    rig = engine.rig
    prompt = engine.new_prompt(LONG)
    rig.keep_below(prompt)
    rig.tiers[0].unknown = {prompt[0]}
    short = rig.begin("short", num_prompt_tokens=9 * TOKENS)
    assert not rig.manager.lookup_prefix(prompt[:8], short).is_final
    rig.step()
    rig.tiers[0].unknown = set()
    request = rig.begin("long", num_prompt_tokens=LONG)
    assert not rig.manager.lookup_prefix(prompt, request).is_final
    rig.step()
    assert rig.manager.lookup_prefix(prompt[:8], short) == (0, True)


def test_its_own_load_is_waited_for() -> None:
    engine = learnt(SHORT_BLOCK_S * 0.9, SHORT)
    rig, prompt = engine.rig, engine.new_prompt(SHORT)
    rig.keep_below(prompt)
    request = rig.begin("asks", num_prompt_tokens=SHORT)
    assert rig.manager.lookup_prefix(prompt, request) == (len(prompt), False)
    rig.step()
    (job,) = rig.manager._promotions.jobs.values()
    job.ready_at += 1e6  # it was expected to take far longer than computing
    assert rig.manager.lookup_prefix(prompt[:4], request) == (4, False)


@pytest.mark.parametrize(("step_s", "is_loaded"), [(0.001, True), (0.05, False)])
def test_the_steps_in_which_the_engine_takes_over_the_blocks_count(
    step_s: float, is_loaded: bool
) -> None:
    """Loading takes 0.15 s, and computing 0.1 s, which would hold up one other request."""
    rig = DrivenManager(
        64, groups={0: GroupShape(TOKENS)}, prefill_tokens_per_s=100.0 * TOKENS, load_timeout_s=10.0
    )
    for n in range(1, 13):
        rig.manager._tiers[0].load_speed.estimate.note(n, n * 0.015)
    rig.begin("running")
    for _ in range(100):
        rig.step(seconds=step_s)
    prompt = keys(*range(10))
    rig.keep_below(prompt)
    answer = rig.manager.lookup_prefix(prompt, rig.begin("new", num_prompt_tokens=10 * TOKENS))
    assert (answer.num_hits == 10) == is_loaded


def test_a_step_that_was_stopped_for_a_minute_does_not_make_the_engine_slow() -> None:
    rig = DrivenManager(
        64, groups={0: GroupShape(TOKENS)}, prefill_tokens_per_s=100.0 * TOKENS, load_timeout_s=10.0
    )
    for n in range(1, 13):
        rig.manager._tiers[0].load_speed.estimate.note(n, n * 0.001)
    rig.begin("running")
    for seconds in (*[0.01] * 50, 60.0, 0.01):
        rig.step(seconds=seconds)
    prompt = keys(*range(10))
    rig.keep_below(prompt)
    answer = rig.manager.lookup_prefix(prompt, rig.begin("new", num_prompt_tokens=10 * TOKENS))
    assert answer.num_hits == 10
