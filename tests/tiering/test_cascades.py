"""Which blocks cascade to which tiers."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from kvtier.base import OffloadKey, OffloadPolicy, ReqContext
from kvtier.config.options import WritePolicyName
from kvtier.tiering.base import TransferJob
from kvtier.tiering.write_policy import WRITE_POLICIES, WriteMoment, WritePolicy
from tests.tiering.driven_manager import DrivenManager, HandTier, keys


def with_whole_requests(num_blocks: int = 8) -> DrivenManager:
    """A tier that wants all blocks of a request."""
    rig = DrivenManager(num_blocks)
    rig.tiers[0].policy = OffloadPolicy.REQUEST_LEVEL
    return rig


def jobs_of(tier: HandTier, context: ReqContext) -> list[list[OffloadKey]]:
    """The blocks of each store for a request."""
    return [list(job.keys) for job in stores(tier) if job.req_context is context]


def stores(tier: HandTier) -> list[TransferJob]:
    return [job for job in tier.waiting if not job.is_promotion]


def being_written(rig: DrivenManager, *numbers: int) -> ReqContext:
    """A request whose blocks are on their way from the device."""
    writer = rig.begin("writer")
    assert rig.manager.prepare_store(keys(*numbers), writer) is not None
    return writer


# --- blocks of a request that someone else is writing -------------------------------------------


def test_blocks_written_by_someone_else_reach_the_tier_for_this_request_too() -> None:
    rig = with_whole_requests()
    writer, other = being_written(rig, 1, 2), rig.begin("other")
    rig.store(keys(1, 2, 3), other)
    assert jobs_of(rig.tiers[0], other) == [keys(3)]
    rig.manager.complete_store(keys(1, 2), writer)
    assert jobs_of(rig.tiers[0], other) == [keys(3), keys(1, 2)]
    assert jobs_of(rig.tiers[0], writer) == [keys(1, 2)]


def test_blocks_that_are_never_written_are_not_sent() -> None:
    rig = with_whole_requests()
    writer, other = being_written(rig, 1), rig.begin("other")
    rig.manager.prepare_store(keys(1), other)
    rig.manager.complete_store(keys(1), writer, success=False)
    rig.manager.on_request_finished(other)
    assert stores(rig.tiers[0]) == []
    assert ("finished", "other") in rig.tiers[0].calls, "it waits for nothing"


def test_a_block_offered_twice_is_waited_for_once() -> None:
    rig = with_whole_requests()
    writer, other = being_written(rig, 1), rig.begin("other")
    for _ in range(2):
        rig.manager.prepare_store(keys(1), other)
    rig.manager.complete_store(keys(1), writer)
    rig.manager.on_request_finished(other)
    assert jobs_of(rig.tiers[0], other) == [keys(1)]
    assert ("finished", "other") in rig.tiers[0].calls


def test_nothing_is_sent_for_a_request_after_its_end_was_told() -> None:
    rig = with_whole_requests()
    writer, other = being_written(rig, 1), rig.begin("other")
    rig.manager.prepare_store(keys(1), other)
    rig.begin("other")  # the id is used again: nobody will say that the first one has finished
    rig.manager.complete_store(keys(1), writer)
    assert jobs_of(rig.tiers[0], other) == []


def test_blocks_that_are_being_promoted_are_sent_when_they_have_arrived() -> None:
    rig = with_whole_requests()
    rig.keep_below(keys(1))
    rig.look_up(keys(1), rig.begin("wants it"))
    rig.step()
    other = rig.begin("other")
    rig.manager.prepare_store(keys(1), other)
    assert jobs_of(rig.tiers[0], other) == []
    rig.tiers[0].finish()
    rig.step()
    assert jobs_of(rig.tiers[0], other) == [keys(1)]


def test_a_request_does_not_wait_for_blocks_of_a_late_promotion() -> None:
    rig = with_whole_requests()
    rig.keep_below(keys(1))
    rig.look_up(keys(1), rig.begin("wants it"))
    rig.step()
    other = rig.begin("other")
    rig.manager.prepare_store(keys(1), other)
    rig.manager.on_request_finished(other)
    assert ("finished", "other") not in rig.tiers[0].calls
    rig.step(seconds=3.0)
    rig.step()
    assert ("finished", "other") in rig.tiers[0].calls
    assert stores(rig.tiers[0]) == []


# --- what a job holds ---------------------------------------------------------------------------


def test_a_store_is_in_prompt_order_when_the_id_of_its_request_was_used_again() -> None:
    rig = DrivenManager(num_blocks=64)
    blocks = keys(*range(40))
    request = rig.begin("r")
    rig.manager.prepare_store(blocks, request)
    rig.begin("r")
    rig.manager.complete_store(set(blocks), request)
    (job,) = stores(rig.tiers[0])
    assert list(job.keys) == blocks


def test_blocks_that_were_never_prepared_are_not_sent(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KVTIER_STRICT", "0")
    rig = DrivenManager()
    request = rig.begin("r")
    rig.manager.prepare_store(keys(1, 2), request)
    rig.manager.complete_store(keys(1, 99, 2), request)
    (job,) = stores(rig.tiers[0])
    assert list(job.keys) == keys(1, 2)
    assert len(job.block_ids) == 2


class EverySecond(WritePolicy):
    def select(
        self, keys: Sequence[OffloadKey], moment: WriteMoment, req_context: ReqContext
    ) -> Sequence[OffloadKey]:
        return keys[::2] if moment is WriteMoment.STORED else ()


def test_a_tier_gets_what_its_write_policy_selects(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(WRITE_POLICIES, WritePolicyName.THROUGH, EverySecond)
    rig = with_whole_requests()
    rig.store(keys(1, 2, 3), rig.begin("r"))
    again = rig.begin("brings them again")
    rig.manager.prepare_store(keys(1, 2, 3), again)
    assert [list(job.keys) for job in stores(rig.tiers[0])] == [keys(1, 3)]
    rig.tiers[0].finish()
    rig.step()
    assert rig.stat("cpu_pinned_blocks") == 0


def test_slots_of_stores_that_have_ended_are_there_for_the_next_store() -> None:
    """The engine has not looked anything up since: it offers the last blocks of a prompt."""
    rig = DrivenManager(num_blocks=8, max_pinned_share=1.0)
    request = rig.begin("r")
    rig.store(keys(*range(7)), request)
    rig.manager.on_request_finished(request)
    rig.step()
    rig.tiers[0].finish()
    assert rig.store(keys(10, 11, 12), rig.begin("next")) == keys(10, 11, 12)


def test_a_step_without_room_asks_tiers_once_more_and_not_for_every_request() -> None:
    rig = DrivenManager(num_blocks=8, max_pinned_share=1.0)
    request = rig.begin("slow")
    rig.store(keys(*range(7)), request)
    others = [rig.begin(f"other {n}") for n in range(50)]
    rig.step()
    before = rig.tiers[0].num_polls
    for n, other in enumerate(others):
        rig.manager.prepare_store(keys(100 + 2 * n, 101 + 2 * n), other)
    assert rig.tiers[0].num_polls == before + 1


def test_what_ends_while_the_engine_computes_is_found_by_the_next_lookup() -> None:
    """Stores are offered after the step has ended: where there is room, tiers are not asked then,
    but when the next step begins."""
    rig = DrivenManager(num_blocks=8)
    rig.keep_below(keys(1))
    request = rig.begin("waits")
    rig.look_up(keys(1), request)
    rig.step()
    rig.store(keys(10), rig.begin("computes"))
    rig.tiers[0].finish(rig.tiers[0].loads()[0])
    assert rig.look_up(keys(1), request) == "H"
