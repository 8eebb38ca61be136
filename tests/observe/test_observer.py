"""What a running engine's status says, against what its metrics say."""

from __future__ import annotations

import json
import threading
import time
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from kvtier.base import MetricDefinition, MetricKind, OffloadingStats
from kvtier.observe.client import ask, find_engine, find_engines
from kvtier.observe.observer import Observer
from kvtier.observe.rollout import Switches
from kvtier.testing import TierHarness
from tests.tiering.engine import Engine, engine_with
from tests.tiering.patience import PATIENCE_S

KEYS = TierHarness.keys(8)
TIER = {"type": "example", "max_blocks": 100}


@pytest.fixture(autouse=True)
def run_dir(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("KVTIER_RUN_DIR", str(tmp_path / "run"))
    return tmp_path / "run"


def started(**options: Any) -> Engine:
    return engine_with(TIER, num_rows=16, namespace="weights", **options)


def test_the_status_has_what_the_metrics_have() -> None:
    reported: Counter[str] = Counter()
    with started() as engine:
        for number in range(20):
            engine.serve(TierHarness.keys(8, start=4 * number))
            engine.settle()
            if number % 3 == 0:
                reported.update(engine.manager.get_stats().counters)
        last = engine.manager.get_stats()
        reported.update(last.counters)
        status = ask(find_engine(), "status")
        assert {name: n for name, n in status["counters"].items() if n} == {
            name: n for name, n in reported.items() if n
        }
        assert status["gauges"] == last.gauges
        stored = status["histograms"]['kvtier_tier_seconds{tier="0:example",direction="store"}']
        assert sum(stored["counts"]) > 0
        assert len(stored["counts"]) == len(stored["bounds"]) + 1
        assert [tier["tier"] for tier in status["tiers"]] == ["host", "0:example"]
        (its,) = status["config"]["secondary_tiers"]
        assert its.items() >= TIER.items()
    assert find_engines() == []


def test_nothing_is_lost_for_an_engine_that_seldom_reads_its_metrics() -> None:
    with started() as engine:
        observer = engine.manager.observer
        assert observer is not None
        for number in range(5):
            engine.serve(TierHarness.keys(8, start=8 * number))
            engine.settle()
            observer.due_s = 0.0  # collect at the end of the next step
            engine.step()
        counters = engine.manager.get_stats().counters
        assert counters["kvtier_cpu_stored_blocks"] == 40
        assert "kvtier_cpu_stored_blocks" not in engine.manager.get_stats().counters
        assert observer.totals.counters()["kvtier_cpu_stored_blocks"] == 40


def test_an_engine_that_never_reads_its_metrics_keeps_a_bounded_number_of_times() -> None:
    name = "kvtier_x_seconds"
    observer = Observer({name: MetricDefinition(MetricKind.HISTOGRAM, "Times.")}, {}, Switches())
    for number in range(10):
        observer.collect(OffloadingStats(histograms={name: [float(number)] * 1000}), 0.0)
    kept = observer.report(OffloadingStats()).histograms[name]
    assert 0 < len(kept) < 5000
    assert kept[-1] == 9.0, "the last ones"
    assert sum(observer.totals.histograms()[name]["counts"]) == 10_000


def test_metrics_are_not_collected_at_every_step() -> None:
    with started() as engine:
        observer = engine.manager.observer
        assert observer is not None
        observer.due_s = 0.0
        engine.step()
        assert observer.due_s > time.monotonic() - PATIENCE_S
        observer.due_s = time.monotonic() + PATIENCE_S
        engine.serve(KEYS)
        engine.settle()
        assert not observer.totals.counters().get("kvtier_cpu_stored_blocks")


def test_secrets_are_not_in_the_status() -> None:
    with started(engine_config={"password": "hunter2hunter2"}):
        assert "hunter2" not in json.dumps(ask(find_engine(), "status"))


def test_off_means_no_socket_and_no_thread(run_dir: Path) -> None:
    threads = {thread.name for thread in threading.enumerate()}
    with started(status_socket="off") as engine:
        engine.serve(KEYS)
        assert {thread.name for thread in threading.enumerate()} <= threads
        assert find_engines() == []
        assert not run_dir.exists()


def test_a_socket_at_a_path(tmp_path: Path) -> None:
    path = tmp_path / "chat.sock"
    with started(status_socket=str(path)):
        assert ask(find_engine(str(path)), "status")["tiers"]
    assert not path.exists()


def test_an_engine_starts_without_a_socket_if_there_can_be_none(
    run_dir: Path, caplog: pytest.LogCaptureFixture
) -> None:
    run_dir.write_text("a file")
    with started() as engine:
        engine.serve(KEYS)
        engine.settle()
        assert engine.serve(KEYS) == 8
    assert "No status socket" in caplog.text
