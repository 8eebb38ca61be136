"""Reports of kvtier's metrics to vLLM: what they contain, and that nothing is lost."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest

from tests.e2e.vllm.processes import VLLM
from tests.integrations.vllm import adapter_report, metrics_probe
from tests.integrations.vllm.metrics_probe import COUNTERS, SIZE

pytestmark = pytest.mark.vllm

Told = list[dict[str, float] | None]
ZEROS = {f"vllm:{name}": 0 for name in COUNTERS}
"""Counters in the first report, before any increase."""


def told(vllm: VLLM, *story: Mapping[str, Any]) -> Told:
    """The reports to vLLM; there must be no warning."""
    report = vllm.run(metrics_probe.reports, story)
    assert report["warnings"] == []
    answers: Told = report["told"]
    return answers


def test_steps_in_which_nothing_happens_cost_nothing(vllm: VLLM) -> None:
    figures = {"gauges": {"room": 5}}
    story = [
        {"at": 10.0} | figures,
        {"at": 10.1} | figures,
        {"at": 10.2, "happened": True} | figures,
        {"at": 10.3} | figures,
    ]
    report = vllm.run(metrics_probe.reports, story)
    first, quiet, same, quiet_again = report["told"]
    assert first == ZEROS | {"vllm:room": 5, "vllm:size": SIZE}
    assert quiet is None
    assert quiet_again is None
    assert same == {}
    assert report["num_asked"] == 2


def test_tiers_at_work_are_asked_now_and_then(vllm: VLLM) -> None:
    """A request that waits for them has the engine step every millisecond."""
    steps = [{"at": 10.0 + n / 1000, "gauges": {"room": n}} for n in range(100)]
    idle = told(vllm, *steps)
    at_work = told(vllm, *(step | {"tiers_are_busy": True} for step in steps))
    over = told(vllm, *(step | {"tiers_are_busy": n < 50} for n, step in enumerate(steps)))
    assert [n for n, answer in enumerate(idle) if answer is not None] == [0]
    asked = [n for n, answer in enumerate(at_work) if answer is not None]
    assert 4 <= len(asked) <= 6
    assert asked[-1] >= 75
    assert max(n for n, answer in enumerate(over) if answer is not None) < 50


def test_what_happens_while_tiers_are_at_work_is_told_at_once(vllm: VLLM) -> None:
    answers = told(
        vllm,
        {"at": 10.0, "gauges": {"room": 5}, "tiers_are_busy": True},
        {"at": 10.001, "gauges": {"room": 4}},
        {"at": 10.002, "gauges": {"room": 3}, "happened": True},
    )
    assert answers[1:] == [None, {"vllm:room": 3}]


def test_what_has_changed_is_told(vllm: VLLM) -> None:
    answers = told(
        vllm,
        {"at": 10.0, "gauges": {"room": 5}},
        {
            "at": 10.1,
            "happened": True,
            "counters": {"loads": 2, "failures": 0},
            "gauges": {"room": 4},
            "histograms": {"seconds": [0.5, 0.25]},
        },
        {"at": 10.2, "happened": True, "counters": {"loads": 0}, "gauges": {"room": 4}},
    )
    assert answers[1:] == [
        {"vllm:loads": 2, "vllm:room": 4, "vllm:seconds_count": 2, "vllm:seconds_sum": 0.75},
        {},
    ]


def test_those_who_come_late_are_told_all_gauges(vllm: VLLM) -> None:
    figures = {"gauges": {"room": 5}}
    answers = told(
        vllm,
        {"at": 10.0} | figures,
        {"at": 10.9} | figures,
        {"at": 11.0} | figures,
        {"at": 11.9, "happened": True} | figures,
        {"at": 12.0, "happened": True} | figures,
    )
    everything = {"vllm:room": 5, "vllm:size": SIZE}
    assert answers == [ZEROS | everything, None, everything, {}, everything]


def test_what_is_not_declared_is_left_out_and_warned_about_once(vllm: VLLM) -> None:
    figures = {
        "counters": {"loads": 1, "surprises": 1},
        "gauges": {"mood": 1},
        "histograms": {"days": [1.0]},
    }
    story = [{"at": float(second), "happened": True} | figures for second in range(3)]
    report = vllm.run(metrics_probe.reports, story)
    told = {"vllm:loads": 1, "vllm:size": SIZE}
    assert report["told"] == [ZEROS | told, told, told]
    assert len(report["warnings"]) == 3
    for name in ("surprises", "mood", "days"):
        assert sum(f"'{name}'" in line for line in report["warnings"]) == 1


def test_what_others_count_is_told_once_and_never_lost(vllm: VLLM) -> None:
    answers = told(
        vllm,
        {"at": 10.0},
        # As soon as it is counted.
        {"at": 10.1, "counts": {"failures": 1}},
        {"at": 10.2, "happened": True},
        # Not while the manager has no figures, but afterwards.
        {"at": 10.3, "counts": {"failures": 2}, "knows_nothing": True},
        {"at": 10.4, "counts": {"failures": 3}, "knows_nothing": True},
        {"at": 11.5, "counters": {"loads": 1}},
        {"at": 11.6, "happened": True},
    )
    assert answers == [
        ZEROS | {"vllm:size": SIZE},
        {"vllm:failures": 1},
        {},
        None,
        None,
        {"vllm:failures": 5, "vllm:loads": 1, "vllm:size": SIZE},
        {},
    ]


def test_a_job_of_a_tier_is_told_when_it_begins_and_ends_and_now_and_then(vllm: VLLM) -> None:
    told_of = vllm.once(adapter_report.jobs_report)["stores"]
    assert told_of["begun"]
    assert told_of["waiting"] == [False] * 5
    assert told_of["later"]
    assert told_of["ended"]
    assert told_of["stored"] == 1
    assert not told_of["idle"]


def test_an_engine_goes_on_until_it_has_told_what_is_late(vllm: VLLM) -> None:
    assert vllm.once(adapter_report.jobs_report)["late_store"] == {"late_stores": 1}


def test_an_engine_that_does_not_settle_says_what_is_open(vllm: VLLM) -> None:
    said = vllm.once(adapter_report.jobs_report)["unsettled"]
    assert said == "after 0.0 s there are still 1 jobs, 1 slots of tiers"
