"""How long promoted blocks are kept for the requests that wanted them."""

from __future__ import annotations

from kvtier.base import ReqContext
from kvtier.cpu.policies.base import SlotState
from tests.tiering.driven_manager import DrivenManager, keys


def leased() -> tuple[DrivenManager, ReqContext]:
    """Two blocks have arrived for a request."""
    rig = DrivenManager(num_blocks=8, load_timeout_s=2.0)
    rig.keep_below(keys(1, 2))
    request = rig.begin("r")
    rig.look_up(keys(1, 2), request)
    rig.step(seconds=0.0)
    rig.tiers[0].finish()
    rig.step(seconds=0.0)
    assert rig.stat("leased_blocks") == 2
    return rig, request


def test_a_lease_lasts_as_long_as_a_load_may_take() -> None:
    rig, _ = leased()
    rig.clock.now += 1.9
    rig.step()
    assert rig.stat("leased_blocks") == 2
    rig.clock.now += 0.1
    rig.step()
    assert rig.stat("leased_blocks") == 0


def test_a_request_may_come_after_its_lease_has_ended() -> None:
    rig, request = leased()
    rig.clock.now += 3.0
    rig.step()
    assert rig.look_up(keys(1, 2), request) == "HH"
    rig.load(keys(1, 2), request)
    rig.manager.on_request_finished(request)
    rig.step()
    assert not any(rig.manager.open_work().values())


def test_a_reset_ends_leases() -> None:
    rig, _ = leased()
    rig.manager.reset_cache()
    assert rig.stat("leased_blocks") == 0
    assert rig.primary.slots.states()[SlotState.FREE] == 8


def test_what_was_wanted_before_a_reset_is_not_brought_up_after_it() -> None:
    rig = DrivenManager()
    rig.keep_below(keys(1))
    rig.look_up(keys(1), rig.begin("r"))
    rig.manager.reset_cache()
    rig.step()
    assert rig.tiers[0].loads() == []
