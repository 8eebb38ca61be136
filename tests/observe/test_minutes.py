"""The line that an engine logs at the end of a minute of work."""

from __future__ import annotations

import logging
from pathlib import Path

import pytest

from kvtier.base import OffloadingStats
from kvtier.observe.minutes import MinuteLine
from kvtier.observe.totals import MetricTotals
from kvtier.tiering.spec import TieringOffloadingSpec
from tests.tiering.reference import BLOCK_BYTES, BLOCKS_PER_PROMPT, ReferenceEngine, prompts

EXAMPLE = {"type": "example", "max_blocks": 1000}


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


def totals() -> MetricTotals:
    keys = {"secondary_tiers": [EXAMPLE]}
    return MetricTotals(TieringOffloadingSpec.build_metric_definitions(keys))


def lines(caplog: pytest.LogCaptureFixture) -> list[str]:
    messages = [record.getMessage() for record in caplog.records if "Last minute" in record.msg]
    caplog.clear()
    return messages


def test_it_says_what_the_minute_brought(caplog: pytest.LogCaptureFixture, tmp_path: Path) -> None:
    caplog.set_level(logging.INFO)
    clock, disk = Clock(), {"type": "disk", "path": str(tmp_path / "slab"), "max_bytes": "64MiB"}
    some = prompts(4)
    with ReferenceEngine(disk) as engine:
        known = MetricTotals(engine.metric_definitions)
        line = MinuteLine(known, ("0:disk",), clock)
        engine.serve(some)
        engine.settle()
        known.add(engine.take_stats())
        clock.now = 59
        line.tick()
        assert lines(caplog) == []
        clock.now = 61
        line.tick()
        num_tokens = sum(map(len, some))
        (first,) = lines(caplog)
        assert first.startswith(f"Last minute: {num_tokens} prompt tokens, 100% computed")
        assert "hit ratio of host 0%, 0:disk 0%" in first
        assert " written, 0 B read, 0 B of it for the first time." in first
        assert "wrong" not in first
        engine.serve_from_tiers(some)
        engine.serve_from_tiers(some)
        engine.settle()
        known.add(engine.take_stats())
        clock.now = 122
        line.tick()
        (second,) = lines(caplog)
        share = BLOCKS_PER_PROMPT * 16 * 4 / num_tokens
        assert f"{2 * num_tokens:,} prompt tokens, {1 - share:.0%} computed" in second
        assert f"hit ratio of host 0%, 0:disk {share:.0%}" in second
        num_bytes = 4 * BLOCKS_PER_PROMPT * BLOCK_BYTES
        assert known.counters()['kvtier_tier_read_back_bytes{tier="0:disk"}'] == num_bytes
        clock.now = 200
        line.tick()
        assert lines(caplog) == [], "nothing when idle"


def test_it_names_what_is_wrong_and_comes_once_a_minute(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    clock, known = Clock(), totals()
    line = MinuteLine(known, ("0:example",), clock)
    tier = 'tier="0:example"'
    for _ in range(600):
        known.add(
            OffloadingStats(
                {
                    'kvtier_prompt_tokens{source="computed"}': 10,
                    f'kvtier_tier_seal_failures{{{tier},reason="digest"}}': 1,
                },
                {f'kvtier_tier_breaker_state{{{tier},direction="load"}}': 2},
            )
        )
        clock.now += 1
        line.tick()
    found = lines(caplog)
    assert len(found) == 10
    (text,) = set(found)
    assert text == (
        "Last minute: 600 prompt tokens, 100% computed; hit ratio of host 0%, 0:example 0%; "
        "wrong with 0:example: cut off, 60 blocks refused because of their seal."
    )


def test_trouble_alone_is_no_work(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    clock, known = Clock(), totals()
    line = MinuteLine(known, ("0:example",), clock)
    known.add(OffloadingStats({'kvtier_tier_late_jobs{tier="0:example",kind="store"}': 1}))
    clock.now = 61
    line.tick()
    assert lines(caplog) == []
