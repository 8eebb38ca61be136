"""What an operator reads about a server that fails: each kind once a minute, and how often."""

from __future__ import annotations

import logging
import time

import pytest

from kvtier.tiering.remote.errors import FailureKind, ServerErrors, ServerFailure, TierHasEnded

SILENT = ServerFailure(FailureKind.SILENT, "it says nothing")
FULL = ServerFailure(FailureKind.FULL, "it has no room")


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """The time, which tests set."""
    now = [1000.0]
    monkeypatch.setattr(time, "monotonic", lambda: now[0])
    return now


def test_each_kind_is_logged_once_a_minute_and_always_counted(
    clock: list[float], caplog: pytest.LogCaptureFixture
) -> None:
    errors = ServerErrors("valkey://cache")
    for _ in range(3):
        errors.note(SILENT)
        errors.note(FULL)
        errors.note_unexpected(KeyError("surprise"))
    lines = [record.getMessage() for record in caplog.records]
    assert len(lines) == 3
    assert all(line.startswith("valkey://cache: ") for line in lines)
    assert "surprise" in caplog.text
    assert [record.levelno for record in caplog.records].count(logging.ERROR) == 1
    counted = {FailureKind.SILENT: 3, FailureKind.FULL: 3, FailureKind.GARBAGE: 3}
    assert errors.take() == counted
    assert not errors.take()

    clock[0] += 59
    errors.note(SILENT)
    assert len(caplog.records) == 3
    clock[0] += 2
    errors.note(SILENT)
    assert len(caplog.records) == 4


def test_the_end_of_the_tier_is_no_failure(caplog: pytest.LogCaptureFixture) -> None:
    errors = ServerErrors("mooncake://cache")
    errors.note(TierHasEnded())
    assert not caplog.records
    assert not errors.take()
