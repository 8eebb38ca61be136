"""The samples of the last hour, against what was reported meanwhile."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest

from kvtier.base import OffloadingStats
from kvtier.observe.client import NoAnswer, ask, find_engine
from kvtier.observe.history import EVERY_S, History
from kvtier.observe.totals import MetricTotals
from kvtier.testing import TierHarness
from kvtier.tiering.metrics import tier_metric_definitions, tier_series
from kvtier.tiering.spec import TieringOffloadingSpec
from tests.tiering.engine import engine_with

DISK = "0:disk"
LOADED = tier_series(DISK, "loaded_bytes")
WAITING = tier_series(DISK, "waiting_blocks")
SECONDS = tier_series(DISK, "load_seconds")


class Watched:
    """A history over an engine whose clock the test moves."""

    def __init__(self) -> None:
        self.time_s = 1000.0
        self.totals = MetricTotals(tier_metric_definitions([DISK]))
        self.history = History(self.totals, lambda: self.time_s, lambda: self.time_s)

    def wait(self, seconds: float) -> None:
        for _ in range(int(seconds)):
            self.history.sample()
            self.time_s += 1

    def all(self) -> dict[str, Any]:
        """As a client reads it."""
        whole = self.history.answer({})
        while whole["has_more"]:
            part = self.history.answer({"after": whole["after"]})
            whole["times"] += part["times"]
            for series, values in part["series"].items():
                whole["series"][series] += values
            whole |= {"after": part["after"], "has_more": part["has_more"]}
        return whole


def test_samples_are_what_was_counted_by_then() -> None:
    its = Watched()
    its.wait(EVERY_S)
    its.totals.add(OffloadingStats({LOADED: 100}, {WAITING: 3}, {SECONDS: [0.5, 1.5]}))
    its.wait(EVERY_S)
    its.totals.add(OffloadingStats({LOADED: 50}, {WAITING: 0}))
    its.wait(EVERY_S)
    answer = its.all()
    assert answer["times"] == [1000, 1010, 1020]
    assert answer["series"] == {
        LOADED: [None, 100, 150],
        WAITING: [None, 3, 0],
        SECONDS.replace("seconds", "seconds_count"): [None, 2, 2],
        SECONDS.replace("seconds", "seconds_sum"): [None, 2, 2],
    }


def test_an_hour_is_kept_and_no_more() -> None:
    its = Watched()
    num_samples = 500
    for number in range(num_samples):
        its.totals.add(OffloadingStats({LOADED: number}))
        its.wait(EVERY_S)
    answer = its.all()
    assert len(answer["times"]) == 360
    assert answer["times"] == [1000 + EVERY_S * n for n in range(140, 500)]
    assert answer["series"][LOADED] == [n * (n + 1) // 2 for n in range(140, 500)]
    assert answer["after"] == num_samples


def test_only_what_is_new_is_sent() -> None:
    its = Watched()
    its.wait(3 * EVERY_S)
    seen = its.all()["after"]
    assert its.history.answer({"after": seen})["times"] == []
    its.totals.add(OffloadingStats({LOADED: 7}))
    its.wait(EVERY_S)
    answer = its.history.answer({"after": seen})
    assert (answer["times"], answer["series"]) == ([1030], {LOADED: [7]})
    assert its.history.answer({"after": answer["after"]})["times"] == []


def test_answers_stay_small() -> None:
    its = Watched()
    its.wait(400 * EVERY_S)
    assert len(its.history.answer({})["times"]) <= 60


@pytest.mark.parametrize("after", [-1, 1.5, "1", None])
def test_nonsense_is_refused(after: object) -> None:
    with pytest.raises(ValueError, match="give a number of samples"):
        Watched().history.answer({"after": after})


def test_many_tiers_stay_below_two_mebibytes() -> None:
    tiers = [{"type": "example", "max_blocks": 8} for _ in range(40)]
    definitions = TieringOffloadingSpec.build_metric_definitions({"secondary_tiers": tiers})
    totals = MetricTotals(definitions)
    every = {series: 1.0 for name, its in definitions.items() for series in its.series(name)}
    time_s = 0.0
    history = History(totals, lambda: time_s, lambda: time_s)
    for _ in range(400):
        totals.add(OffloadingStats(every))
        history.sample()
        time_s += EVERY_S
    columns = history._columns
    assert 300 < len(columns) < 500
    assert sum(sys.getsizeof(its) + sys.getsizeof(name) for name, its in columns.items()) < 2 << 20


def test_a_running_engine_answers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KVTIER_RUN_DIR", str(tmp_path / "run"))
    with engine_with({"type": "example", "max_blocks": 9}, num_rows=16, namespace="w") as engine:
        engine.serve(TierHarness.keys(8))
        engine.settle()
        answer = ask(find_engine(), "history")
        assert answer["every_s"] == EVERY_S
        assert len(json.dumps(answer)) < 10_000
        with pytest.raises(NoAnswer, match="give a number of samples"):
            ask(find_engine(), "history", after="now")
