"""Resets and shutdowns."""

from __future__ import annotations

import logging
import threading
import time

import pytest

from kvtier.base import ReqContext
from kvtier.cpu.policies.base import SlotState
from tests.tiering.driven_manager import DrivenManager, HandTier, PlainSpec, keys


def test_nothing_from_before_a_reset_is_found_after_it() -> None:
    rig = DrivenManager(num_tiers=2)
    request = rig.begin("r")
    rig.store(keys(1, 2), request)
    for tier in rig.tiers:
        tier.finish()
    rig.step()
    rig.manager.on_request_finished(request)
    rig.manager.reset_cache()
    assert rig.look_up(keys(1, 2), rig.begin("next")) == "MM"
    assert all(tier.fingerprint != rig.config.fingerprint() for tier in rig.tiers)
    assert rig.tiers[0].fingerprint == rig.tiers[1].fingerprint


def test_what_is_stored_after_a_reset_is_found_in_its_epoch() -> None:
    rig = DrivenManager(num_blocks=4)
    rig.manager.reset_cache()
    rig.step()
    rig.tiers[0].at_once = True
    for blocks in (keys(1, 2), keys(3, 4, 5)):
        request = rig.begin(f"stores {blocks}")
        rig.step(new_req_ids=[request.req_id])
        rig.store(blocks, request)
        rig.manager.on_request_finished(request)
        rig.step()
    request = rig.begin("r")
    assert rig.look_up(keys(1, 2), request) == "HP"
    rig.step()
    assert rig.look_up(keys(1, 2), request) == "HH"
    rig.load(keys(1, 2), request)
    rig.manager.reset_cache()
    assert rig.look_up(keys(1, 2), rig.begin("last")) == "MM"


def test_a_reset_of_the_primary_tier_alone_leaves_the_others() -> None:
    rig = DrivenManager(keeps_epoch=True)
    rig.tiers[0].at_once = True
    request = rig.begin("r")
    rig.store(keys(1), request)
    rig.step()
    rig.manager.on_request_finished(request)
    rig.manager.reset_cache()
    rig.step()
    request = rig.begin("next")
    assert rig.look_up(keys(1), request) == "P"
    rig.step()
    assert rig.look_up(keys(1), request) == "H"
    rig.load(keys(1), request)


def test_slots_that_tiers_use_at_a_reset_are_quarantined_until_they_report() -> None:
    rig = DrivenManager(num_blocks=8, num_tiers=2)
    rig.keep_below(keys(1, 2))
    storing, loading = rig.begin("storing"), rig.begin("loading")
    rig.store(keys(11, 12), storing)
    rig.look_up(keys(1, 2), loading)
    rig.step()
    first, second = rig.tiers
    rig.manager.reset_cache()
    assert rig.primary.slots.states()[SlotState.QUARANTINED] == 4
    rig.step()
    first.finish(first.loads()[0])
    rig.step()
    assert rig.primary.slots.states()[SlotState.QUARANTINED] == 2
    first.finish()
    rig.step()
    assert rig.primary.slots.states()[SlotState.QUARANTINED] == 2, "the other tier reads them too"
    second.finish()
    rig.step()
    assert rig.primary.slots.states()[SlotState.FREE] == 8
    assert rig.look_up(keys(1, 2, 11, 12), rig.begin("next")) == "MMMM"


def test_a_slot_that_device_and_tier_use_waits_for_both() -> None:
    rig = DrivenManager(num_blocks=4)
    request = rig.begin("r")
    rig.store(keys(1), request)
    rig.manager.prepare_load(keys(1), request)
    rig.manager.reset_cache()
    assert rig.primary.slots.states()[SlotState.QUARANTINED] == 1
    rig.tiers[0].finish()
    rig.step()
    assert rig.primary.slots.states()[SlotState.QUARANTINED] == 1, "the device may be reading it"
    other = rig.begin("other")
    rig.step(new_req_ids=["other"])
    rig.store(keys(2), other)
    assert rig.primary.slots.states()[SlotState.QUARANTINED] == 0


def test_a_store_under_way_at_a_reset_never_reaches_a_tier_in_the_new_epoch() -> None:
    rig = DrivenManager()
    request = rig.begin("r")
    rig.store(keys(1), request)
    rig.manager.reset_cache()
    rig.tiers[0].finish()
    rig.step()
    assert list(rig.tiers[0].kept) == [(rig.config.fingerprint(), keys(1)[0])]
    assert rig.look_up(keys(1), rig.begin("next")) == "M"


def test_requests_that_finished_before_a_reset_are_let_go() -> None:
    rig = DrivenManager()
    request = rig.begin("r")
    rig.manager.prepare_store(keys(1), request)
    rig.manager.on_request_finished(request)
    assert ("finished", "r") not in rig.tiers[0].calls
    rig.manager.reset_cache()
    assert ("finished", "r") in rig.tiers[0].calls
    assert not rig.manager._requests


# --- shutdown -----------------------------------------------------------------------------------


def test_shutdown_drains_and_takes_the_slots_from_the_tiers() -> None:
    rig = DrivenManager(num_tiers=2)
    request = rig.begin("r")
    rig.store(keys(1), request)
    rig.manager.shutdown()
    rig.manager.shutdown()
    for tier in rig.tiers:
        assert tier.holds(*keys(1)), "what was under way has been stored"
        with pytest.raises(ValueError, match="released"):
            tier.rows[0]
    with pytest.raises(ValueError, match="released"):
        rig.primary.get_kv_memoryview().tobytes()
    assert rig.memory.is_cleaned_up


class Stuck(HandTier):
    """A tier whose shutdown does not return before the test lets it."""

    let_go = threading.Event()

    def drain_jobs(self) -> None:
        self.let_go.wait(60)


def test_shutdown_does_not_wait_for_a_tier_that_hangs(caplog: pytest.LogCaptureFixture) -> None:
    rig = DrivenManager()
    tiers = [
        cls(
            offloading_spec=PlainSpec(rig.config),
            primary_kv_view=rig.primary.get_kv_memoryview(),
            tier_type=cls.__name__,
        )
        for cls in (Stuck, HandTier)
    ]
    hanging = DrivenManager(tiers=tiers, shutdown_timeout_s=0.2)
    hanging.store(keys(1), hanging.begin("r"))
    start = time.monotonic()
    try:
        with caplog.at_level(logging.ERROR):
            hanging.manager.shutdown()
        assert time.monotonic() - start < 30
        assert "'Stuck' did not end within 0.2 s" in caplog.text
        assert "'HandTier'" not in caplog.text
        assert tiers[1].holds(*keys(1))
        for tier in tiers:
            with pytest.raises(ValueError, match="released"):
                tier.rows[0]
    finally:
        Stuck.let_go.set()


def test_shutdown_survives_tiers_that_raise(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def fail() -> None:
        raise OSError("the disk is gone")

    rig = DrivenManager()
    monkeypatch.setattr(rig.tiers[0], "drain_jobs", fail)
    monkeypatch.setattr(rig.tiers[0], "shutdown", fail)
    with caplog.at_level(logging.ERROR):
        rig.manager.shutdown()
    assert [record.getMessage().split()[2] for record in caplog.records] == [
        "drain_jobs",
        "shutdown",
    ]
    assert rig.memory.is_cleaned_up


def test_a_request_that_was_waiting_at_a_reset_starts_anew() -> None:
    rig = DrivenManager(load_timeout_s=2.0)
    rig.keep_below(keys(1))
    request = ReqContext("r")
    rig.manager.on_new_request(request)
    rig.look_up(keys(1), request)
    rig.step(seconds=3.0)
    assert rig.look_up(keys(1), request) == "M"
    rig.manager.reset_cache()
    rig.keep_below(keys(2))
    assert rig.look_up(keys(2), request) == "P"


def test_what_waits_for_a_tier_is_sent_at_shutdown() -> None:
    rig = DrivenManager(num_blocks=128, max_pinned_share=0.25)
    (tier,) = rig.tiers
    request = rig.begin("r")
    rig.store(keys(*range(100)), request)
    rig.manager.on_request_finished(request)
    assert rig.manager.open_work()["waiting blocks"] == 100 - 32
    tier.at_once = True
    tier.finish()
    rig.manager.shutdown()
    assert tier.holds(*keys(*range(100)))


def test_a_tier_that_takes_no_more_stores_does_not_hold_up_the_end() -> None:
    rig = DrivenManager(num_blocks=128, max_pinned_share=0.25, shutdown_timeout_s=0.3)
    rig.store(keys(*range(100)), rig.begin("r"))
    rig.manager.shutdown()
    assert rig.memory.is_cleaned_up
