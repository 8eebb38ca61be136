"""Which of the blocks that are found below are wanted, and in which order."""

from __future__ import annotations

from kvtier.tiering.manager import GroupShape
from tests.tiering.driven_manager import DrivenManager, keys


def test_the_same_prefix_again_in_a_step_takes_no_more_room() -> None:
    rig = DrivenManager(num_blocks=8)
    blocks = keys(*range(6))
    rig.keep_below(blocks)
    request = rig.begin("r")
    for _ in range(2):
        found = rig.manager.lookup_prefix(blocks, request)
        assert (found.num_hits, found.is_final) == (6, False)
    rig.step()
    (job,) = rig.tiers[0].loads()
    assert list(job.keys) == blocks


def test_what_is_behind_a_miss_takes_no_room_from_the_window() -> None:
    rig = DrivenManager(num_blocks=8, groups={1: GroupShape(16, window_blocks=4)})
    blocks = keys(*range(10), group=1)
    rig.keep_below([block for block in blocks if block != blocks[4]])
    request = rig.begin("r")
    assert rig.look_up(blocks[::-1], request) == "PPPPP" + "M" + "PPPP"
    rig.step()
    (job,) = rig.tiers[0].loads()
    assert list(job.keys) == blocks[:4]


def test_of_two_scans_in_a_step_the_last_one_gives_the_order() -> None:
    rig = DrivenManager(num_blocks=40, groups={1: GroupShape(16, window_blocks=4)})
    blocks = keys(*range(10), group=1)
    rig.keep_below(blocks)
    request = rig.begin("r")
    rig.look_up([blocks[5], blocks[4]], request)
    rig.look_up([blocks[7], blocks[6], blocks[5], blocks[4]], request)
    rig.step()
    (job,) = rig.tiers[0].loads()
    assert list(job.keys) == blocks[4:8]


def test_where_the_direction_is_not_known_a_miss_ends_nothing() -> None:
    rig = DrivenManager(num_blocks=16, groups={0: GroupShape(16, is_uncertain=True)})
    rig.keep_below(keys(1, 3, 4))
    request = rig.begin("r")
    assert rig.look_up(keys(1, 2, 3, 4), request) == "PMPP"
    rig.step()
    (job,) = rig.tiers[0].loads()
    assert list(job.keys) == keys(3, 4)


def test_nothing_is_promoted_behind_what_cannot_be() -> None:
    rig = DrivenManager(num_blocks=100, num_tiers=2, max_pinned_share=0.1, load_timeout_s=2.0)
    first, second = rig.tiers
    held = keys(*range(100, 132))
    rig.keep_below(held, first)
    waits = rig.begin("waits")
    rig.look_up(held, waits)
    rig.step(seconds=2.1)  # the first tier keeps all the slots that it may have
    rig.look_up(held, waits)
    rig.manager.on_request_finished(waits)
    rig.step()
    rig.keep_below(keys(1, 2), first)
    rig.keep_below(keys(3, 4), second)
    request = rig.begin("r")
    assert rig.look_up(keys(1, 2, 3, 4), request) == "PPPP"
    rig.step()
    assert second.loads() == []
    first.finish()
    rig.look_up(keys(1, 2, 3, 4), request)
    rig.step()
    assert [list(job.keys) for job in (*first.loads(), *second.loads())] == [
        keys(1, 2),
        keys(3, 4),
    ]
