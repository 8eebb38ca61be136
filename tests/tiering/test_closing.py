"""Shutdown of tiers: each has its time, and a tier that fails keeps no other open."""

from __future__ import annotations

import logging
import threading
import time
from typing import Any

import numpy as np
import pytest

from kvtier.base import LookupResult, OffloadingSpec, OffloadKey, ReqContext
from kvtier.tiering.base import JobResult, SecondaryTierManager, TransferJob
from kvtier.tiering.factory import SecondaryTierFactory
from kvtier.tiering.spec import TieringOffloadingSpec
from kvtier.tiering.tier_calls import close_tiers
from tests.config.sample import make_config
from tests.tiering.driven_manager import DrivenManager

AFTERWARDS_S = 0.05


def test_a_drain_that_ends_with_the_shutdown_is_waited_for(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    rig = DrivenManager(shutdown_timeout_s=20.0)
    told, ended = threading.Event(), threading.Event()

    def drain() -> None:
        told.wait(60)
        time.sleep(AFTERWARDS_S)  # what is left to do, after `shutdown` has returned
        ended.set()

    monkeypatch.setattr("kvtier.tiering.tier_calls._SHUTDOWN_SHARE", 0.005)
    monkeypatch.setattr(rig.tiers[0], "drain_jobs", drain)
    monkeypatch.setattr(rig.tiers[0], "shutdown", told.set)
    with caplog.at_level(logging.ERROR):
        rig.manager.shutdown()
    assert ended.is_set()
    assert caplog.text == ""


class Bare(SecondaryTierManager):
    """A tier whose constructor has failed before its base class."""

    def __init__(self) -> None:
        self.ended: list[str] = []

    def lookup(self, key: OffloadKey, req_context: ReqContext) -> LookupResult:
        return LookupResult.MISS

    def submit_store(self, job: TransferJob) -> None:
        raise NotImplementedError

    def submit_load(self, job: TransferJob) -> None:
        raise NotImplementedError

    def get_finished_jobs(self) -> list[JobResult]:
        return []

    def drain_jobs(self) -> None:
        self.ended.append("drained")

    def shutdown(self) -> None:
        self.ended.append("shut down")


class StuckRows:
    def release(self) -> None:
        raise BufferError("in use")


class Stuck(Bare):
    def __init__(self) -> None:
        super().__init__()
        self.rows: Any = StuckRows()

    def drain_jobs(self) -> None:
        raise OSError("cannot drain")


@pytest.fixture
def spec() -> OffloadingSpec:
    return TieringOffloadingSpec(make_config())


def new_tier(spec: OffloadingSpec) -> SecondaryTierManager:
    """A tier with a thread of its own."""
    view = np.zeros((4, 4096), np.uint8).data
    entry = {"type": "example", "simulate_async": True}
    return SecondaryTierFactory.create_secondary_tier(entry, view, spec)


def test_a_tier_that_lacks_everything_keeps_no_other_open(
    spec: OffloadingSpec, caplog: pytest.LogCaptureFixture
) -> None:
    threads = set(threading.enumerate())
    bare, stuck, sound = Bare(), Stuck(), new_tier(spec)
    assert set(threading.enumerate()) > threads
    close_tiers([bare, stuck, sound], timeout_s=60)
    assert set(threading.enumerate()) <= threads
    assert bare.ended == ["drained", "shut down"]
    assert stuck.ended == ["shut down"]
    with pytest.raises(ValueError, match="released"):
        sound.rows[0]
    assert caplog.messages == [
        "Tier 'Stuck': drain_jobs raised",
        "Tier 'Stuck': its rows cannot be released",
    ]


def test_a_tier_without_a_type_is_told_by_its_class(caplog: pytest.LogCaptureFixture) -> None:
    may_end = threading.Event()

    class Endless(Bare):
        def drain_jobs(self) -> None:
            may_end.wait(60)

    with caplog.at_level(logging.ERROR):
        close_tiers([Endless()], timeout_s=0.01)
    may_end.set()
    (message,) = caplog.messages
    assert message.startswith("Tier 'Endless' did not end within 0.01 s")


@pytest.mark.parametrize("timeout_s", [1e10, 1e300, float("inf")])
def test_no_time_is_too_long(spec: OffloadingSpec, timeout_s: float) -> None:
    tier = new_tier(spec)
    close_tiers([tier], timeout_s)
    with pytest.raises(ValueError, match="released"):
        tier.rows[0]
