"""Processes of the pool end, stand still, come back empty, or are full. An engine over the tier has
the tokens of one without, holds no request past its deadlines, uses the pool again when it can, and
ends in good order at any time."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import pytest

from kvtier.tiering.mooncake.pool import load_library
from tests.tiering.mooncake.harness import SEGMENT_BYTES, mooncake_harness, plain_client
from tests.tiering.mooncake.pool import Master, Segment, mooncake_master, segment
from tests.tiering.mooncake.serving import (
    TOKENS,
    EngineProcess,
    Start,
    engines,
    tier_on,
)
from tests.tiering.networks import Namespace
from tests.tiering.patience import wait_until

NUM_PROMPTS = 4
NOTHING, ALL = [0] * NUM_PROMPTS, [TOKENS] * NUM_PROMPTS
PATIENT_LIBRARY = {
    "MC_RPC_TIMEOUT_MS": "30000",
    "MC_TCP_STATUS_TIMEOUT_SEC": "30",
    "MC_TCP_PROGRESS_TIMEOUT_SEC": "30",
}
"""With these, a call to something that stands still takes three times as long as a request may."""
SMALLEST_BYTES = 16 << 20
"""A segment is as large at least."""
HANGS_FOR_S = 30.0
NEVER_FORGETS = "-client_ttl=600"
"""The master goes on to name hosts that stand still."""


@pytest.fixture(scope="module")
def master(tmp_path_factory: pytest.TempPathFactory, network: Namespace) -> Iterator[Master]:
    with mooncake_master(tmp_path_factory.mktemp("master"), network) as process:
        yield process


@pytest.fixture(scope="module")
def lender(master: Master, network: Namespace) -> Iterator[Segment]:
    with segment(master, SEGMENT_BYTES, network) as lent:
        yield lent


@contextmanager
def serving(master: Master, network: Namespace) -> Iterator[EngineProcess]:
    start = Start(network, tier_on(master), environment=PATIENT_LIBRARY)
    with engines(start) as (engine,):
        yield engine


@pytest.fixture(scope="module")
def warm(master: Master, lender: Segment, network: Namespace) -> Iterator[EngineProcess]:
    """An engine whose prompts are all in the pool, before each test and after it."""
    with serving(master, network) as engine:
        engine.serve_until_loaded(NUM_PROMPTS)
        yield engine
        engine.end()


def test_prompts_come_from_the_pool(master: Master, warm: EngineProcess) -> None:
    assert warm.serve(NUM_PROMPTS).loaded == ALL
    assert warm.figure("mooncake_failures_unreachable") == 0


def test_a_killed_master(master: Master, warm: EngineProcess) -> None:
    master.kill()
    try:
        assert warm.serve(NUM_PROMPTS).loaded == NOTHING
        assert warm.figure("mooncake_failures_unreachable") > 0
    finally:
        master.start()
    warm.serve_until_loaded(NUM_PROMPTS)


def test_a_master_that_stands_still(master: Master, warm: EngineProcess) -> None:
    with master.standing_still():
        for _ in range(2):
            assert warm.serve(NUM_PROMPTS).loaded == NOTHING
    warm.serve_until_loaded(NUM_PROMPTS)


def test_an_emptied_pool(master: Master, warm: EngineProcess) -> None:
    """Blocks that the engine takes to be there are misses, and not failures."""
    failures = warm.figure("mooncake_failures_unreachable")
    with plain_client(master) as client:
        client.remove_all(True)
    assert warm.serve(NUM_PROMPTS).loaded == NOTHING
    warm.serve_until_loaded(NUM_PROMPTS)
    assert warm.figure("mooncake_failures_unreachable") == failures


def test_a_killed_host(
    master: Master, lender: Segment, warm: EngineProcess, network: Namespace
) -> None:
    with segment(master, SEGMENT_BYTES, network) as other:
        # Half of the blocks go there.
        warm.serve_until_loaded(2 * NUM_PROMPTS, start=100)
        other.kill()
        served = warm.serve(2 * NUM_PROMPTS, start=100)
        assert sum(served.loaded) < 2 * NUM_PROMPTS * TOKENS
        assert (
            warm.figure("mooncake_vanished_blocks") + warm.figure("mooncake_forgotten_blocks") > 0
        )
    warm.serve_until_loaded(2 * NUM_PROMPTS, start=100)


def test_a_host_that_stands_still(master: Master, lender: Segment, warm: EngineProcess) -> None:
    with lender.standing_still():
        for _ in range(2):
            assert warm.serve(NUM_PROMPTS).loaded == NOTHING
    warm.serve_until_loaded(NUM_PROMPTS)


def test_other_hosts_are_used_while_one_stands_still(tmp_path: Path, network: Namespace) -> None:
    """A call that hangs costs a thread: other loads go on. The engine ends before it returns."""
    with ExitStack() as stack:
        master = stack.enter_context(mooncake_master(tmp_path, network, NEVER_FORGETS))
        lent = stack.enter_context(segment(master, SEGMENT_BYTES, network))
        with serving(master, network) as writer:
            writer.serve_until_loaded(1)
        own = tier_on(master, segment_bytes=SEGMENT_BYTES, connections=1)
        start = Start(
            network, own, environment=PATIENT_LIBRARY, options={"shutdown_timeout_ms": 2000}
        )
        (engine,) = stack.enter_context(engines(start))
        engine.serve_until_loaded(2, start=100)
        assert engine.serve(1).loaded == [TOKENS]
        with lent.standing_still():
            assert engine.serve(1).loaded == [0]
            engine.serve_until_loaded(2, start=100)
            assert engine.serve(1).loaded == [0]
            assert engine.end() < HANGS_FOR_S


def test_a_full_pool_that_evicts_nothing(tmp_path: Path, network: Namespace) -> None:
    """The engine counts what was refused, and stores when there is room again."""
    with (
        mooncake_master(tmp_path, network) as master,
        segment(master, SMALLEST_BYTES, network),
        serving(master, network) as engine,
        plain_client(master) as client,
    ):
        pinned = load_library().ReplicateConfig()
        pinned.with_hard_pin = True
        held: list[str] = []
        for size in (1 << 20, 1 << 16, 1 << 12):
            while client.put(name := f"of-others-{len(held)}", bytes(size), pinned) == 0:
                held.append(name)
        for _ in range(2):
            assert engine.serve(NUM_PROMPTS).loaded == NOTHING
        assert engine.figure("mooncake_refused_blocks") > 0
        assert engine.figure("mooncake_failures_full") > 0
        assert engine.figure("mooncake_failed_blocks") == 0
        client.batch_remove(held, True)
        engine.serve_until_loaded(NUM_PROMPTS)
        assert engine.figure("mooncake_failures_unreachable") == 0


def test_a_full_pool_that_evicts(tmp_path: Path, network: Namespace) -> None:
    """What the master has evicted is a miss, and no failure; what is there is right."""
    with (
        mooncake_master(tmp_path, network) as master,
        segment(master, SMALLEST_BYTES, network),
        mooncake_harness(master, row_bytes=1 << 16, segment_bytes=0) as harness,
    ):
        num_fitting = SMALLEST_BYTES >> 16
        parts = [harness.keys(32, start=start) for start in range(0, 2 * num_fitting, 32)]
        for part in parts:
            wait_until(
                lambda some=part: harness.wait_for(harness.store(some))[0].result.success,  # type: ignore[misc]
                "there is room again",
            )
        reports = [harness.wait_for(harness.load(part))[0] for part in parts]
        num_loaded = sum(len(report.moved) for report in reports)
        assert 0 < num_loaded < num_fitting
        assert sum(report.result.num_gone for report in reports) == 2 * num_fitting - num_loaded
