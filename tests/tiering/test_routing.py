"""Routing: which tiers a request's blocks go to and come from, by rules and hints."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest

from kvtier.base import Locality, OffloadKey, OffloadPolicy, ReqContext
from kvtier.config.options import WritePolicyName
from kvtier.hints import HintReader, new_context
from tests.config.sample import options_of
from tests.tiering.driven_manager import DrivenManager, HandTier, keys
from tests.tiering.test_write_policies import LEAVING

LOCAL, SHARED = 0, 1
"""The places of the two tiers."""
RULES = {"acme": {"tiers": ["hand0"]}, "here": {"tiers": []}, "chat": {}}
TIERS = [{"type": "hand0"}, {"type": "hand1"}]
READER = HintReader(options_of({"tenants": RULES, "secondary_tiers": TIERS}))
ONLY_LOCAL = [{"locality": "LOCAL"}]


class PlacedTier(HandTier):
    """The first tier is local, and the second one is shared over a network."""

    def __init__(self, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.locality = Locality.LOCAL if self.tier_type == "hand0" else Locality.REMOTE


def rig_with(write: WritePolicyName = WritePolicyName.THROUGH, **keywords: Any) -> DrivenManager:
    rig = DrivenManager(64, 2, write_policy=write, tier_cls=PlacedTier, **keywords)
    for tier in rig.tiers:
        tier.at_once = True
    return rig


def begin(rig: DrivenManager, name: str, **hints: Any) -> ReqContext:
    context = new_context(name, hints, READER.read(hints))
    rig.manager.on_new_request(context)
    return context


def serve(rig: DrivenManager, name: str, blocks: Sequence[OffloadKey], **hints: Any) -> int:
    """One request from beginning to end. Returns how many of its blocks were loaded."""
    request = begin(rig, name, **hints)
    while "P" in (found := rig.look_up(blocks, request)):
        rig.step()
    num_hits = len(found) - len(found.lstrip("H"))
    if num_hits:
        rig.load(blocks[:num_hits], request)
    rig.manager.touch(blocks, request)
    if num_hits < len(blocks):
        rig.store(blocks[num_hits:], request)
    rig.step()
    rig.manager.on_request_finished(request)
    rig.step()
    return num_hits


def push_out(rig: DrivenManager, blocks: Sequence[OffloadKey]) -> None:
    """Serve requests of another tenant until these blocks have left host memory."""
    for number in range(40):
        first = 1000 + 4 * number
        serve(rig, f"other {number}", keys(*range(first, first + 4)), tenant="chat")
    assert not any(map(rig.primary.has, blocks))


MINE = keys(1, 2, 3, 4)


@pytest.mark.parametrize("write", WritePolicyName)
@pytest.mark.parametrize(
    ("hints", "allowed"),
    [
        ({"tenant": "acme"}, {LOCAL}),
        ({"tenant": "here"}, set()),
        ({"store_tiers": ONLY_LOCAL}, {LOCAL}),
        ({"store_tiers": []}, set()),
        ({"tenant": "acme", "store_tiers": [{"locality": "REMOTE"}]}, set()),
        ({"tenant": "acme", "store_tiers": ["STORAGE"], "write": "through"}, {LOCAL}),
        ({"tenant": "chat"}, {LOCAL, SHARED}),
    ],
    ids=str,
)
def test_blocks_go_only_where_they_may(
    write: WritePolicyName, hints: dict[str, Any], allowed: set[int]
) -> None:
    """Whenever the write policy sends them: at once, after a second use, when they leave, or when
    the engine ends."""
    rig = rig_with(write)
    late = keys(5, 6, 7)
    for round_ in range(3):
        serve(rig, f"mine {round_}", MINE, **hints)
        rig.clock.now += 10
    for round_ in range(2):
        serve(rig, f"theirs {round_}", keys(91, 92), tenant="chat")
    push_out(rig, MINE)
    serve(rig, "late", late, **hints)
    rig.manager.shutdown()
    for place, tier in enumerate(rig.tiers):
        stored = {key for _, key in tier.kept}
        if place not in allowed:
            assert stored.isdisjoint([*MINE, *late])
        elif write is not WritePolicyName.ADAPTIVE:
            assert stored.issuperset(MINE)
        assert stored, "others go everywhere"


@pytest.mark.parametrize(
    ("hints", "expected"),
    [
        ({"tenant": "acme"}, "MM"),
        ({"tenant": "here"}, "MM"),
        ({"kv_load_tiers": ONLY_LOCAL}, "MM"),
        ({"tenant": "chat"}, "PP"),
        ({"tenant": "chat", "store_tiers": ONLY_LOCAL}, "PP"),
        ({"tenant": "acme", "kv_load_tiers": ["STORAGE"]}, "MM"),
    ],
    ids=str,
)
def test_blocks_come_only_from_where_they_may(hints: dict[str, Any], expected: str) -> None:
    rig = rig_with()
    rig.keep_below(keys(1, 2), rig.tiers[SHARED])
    request = begin(rig, "r", **hints)
    assert rig.look_up(keys(1, 2), request) == expected
    if hints.get("tenant") in ("acme", "here"):
        assert ("new", "r") not in rig.tiers[SHARED].calls, "the tier does not hear of the request"


@pytest.mark.parametrize("write", LEAVING)
def test_what_was_promoted_for_a_tenant_is_not_written_where_its_rule_forbids(
    write: WritePolicyName,
) -> None:
    rig = rig_with(write)
    rig.keep_below(MINE, rig.tiers[LOCAL])
    for round_ in range(3):
        assert serve(rig, f"mine {round_}", MINE, tenant="acme") == len(MINE)
        rig.clock.now += 10
    push_out(rig, MINE)
    rig.manager.shutdown()
    assert not rig.tiers[SHARED].holds(MINE[0])
    assert {key for _, key in rig.tiers[SHARED].kept}.isdisjoint(MINE)


@pytest.mark.parametrize(
    "write", [WritePolicyName.THROUGH, WritePolicyName.SECOND_USE, WritePolicyName.ON_EVICT]
)
def test_a_block_that_others_use_too_goes_where_they_may_send_it(write: WritePolicyName) -> None:
    rig = rig_with(write)
    serve(rig, "mine", MINE, tenant="acme")
    assert not rig.tiers[SHARED].holds(*MINE)
    for round_ in range(2):
        assert serve(rig, f"theirs {round_}", MINE, tenant="chat") == len(MINE)
        rig.clock.now += 10
    push_out(rig, MINE)
    assert rig.tiers[SHARED].holds(*MINE)


@pytest.mark.parametrize("write", WritePolicyName)
def test_what_is_dropped_counts_as_used_in_no_tier(write: WritePolicyName) -> None:
    """Otherwise the tiers would keep it the longest."""
    rig = rig_with(write)
    serve(rig, "turn", MINE)
    for tier in rig.tiers:
        tier.touched = []
        tier.kept = {}
    assert serve(rig, "last turn", MINE, drop=True) == len(MINE)
    for tier in rig.tiers:
        assert tier.touched == []
        assert tier.kept == {}
    assert serve(rig, "another", MINE) == len(MINE)
    assert rig.tiers[LOCAL].touched == [MINE]


def test_what_was_kept_out_is_counted() -> None:
    rig = rig_with()
    serve(rig, "mine", MINE, store_tiers=[{"locality": "REMOTE"}])
    assert rig.tier_counters()["kept_out_blocks"] == len(MINE)


def test_a_tier_that_wants_whole_requests_gets_only_those_that_may_go_there() -> None:
    rig = rig_with()
    rig.tiers[SHARED].policy = OffloadPolicy.REQUEST_LEVEL
    serve(rig, "mine", MINE, tenant="acme")
    again = begin(rig, "again", store_tiers=ONLY_LOCAL)
    assert rig.store(MINE, again) == []
    rig.step()
    assert not rig.tiers[SHARED].holds(MINE[0])
    others = begin(rig, "others", tenant="chat")
    assert rig.store(MINE, others) == []
    assert rig.tiers[SHARED].holds(*MINE)
