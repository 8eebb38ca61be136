"""Makes the tests short: how much is measured decides how exact the speeds are, which no test
compares."""

from __future__ import annotations

import pytest

from kvtier.cli.doctor import bench, canary
from kvtier.cli.doctor import command as doctor
from kvtier.replay import calibration


@pytest.fixture(autouse=True)
def _short_measurements(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(canary, "_LOADED_FOR_S", 0.05)
    monkeypatch.setattr(canary, "_TOTAL_BYTES", 16 << 20)
    monkeypatch.setattr(calibration, "_COPIED_BYTES", 16 << 20)
    monkeypatch.setattr(bench, "_LIMIT_BYTES", 64 << 20)
    monkeypatch.setattr(doctor, "_DISK_BYTES", 64 << 20)
