"""The load of a fleet: copies of a trace, what they have in common, and conversations."""

from __future__ import annotations

from itertools import islice

import pytest

from kvtier.replay.copies import Conversations, FleetLoad
from kvtier.replay.trace import Request, open_trace
from tests.replay.oracle import some_requests
from tests.trace_replay import key_of
from tests.traces import CONVERSATION

REQUESTS = some_requests(1, 200, longest=10)


def numbers(*prompts: tuple[int, ...]) -> list[int]:
    conversations = Conversations()
    return [conversations.number_of([key_of(block) for block in blocks]) for blocks in prompts]


def test_a_prompt_that_continues_an_earlier_one_is_its_next_turn() -> None:
    assert numbers((1, 2), (1, 2, 3), (1, 2, 3, 4, 5), (1, 2, 3, 4, 5)) == [0, 0, 0, 0]


def test_another_continuation_is_another_conversation() -> None:
    assert numbers((1, 2), (1, 2, 3), (1, 2, 4), (1, 2, 4, 5), (1, 2, 3, 6)) == [0, 0, 1, 1, 0]


def test_a_common_beginning_is_no_conversation() -> None:
    assert numbers((1,), (1, 2), (1, 3), (1, 2, 4), (1,), (), ()) == [0, 1, 2, 1, 3, 4, 5]


def test_one_copy_is_the_trace() -> None:
    load = FleetLoad(REQUESTS)
    assert [copied.request for copied in load] == REQUESTS
    assert load.progress() == (200, 200)
    assert (load.first_s, load.last_s) == (REQUESTS[0].arrives_s, REQUESTS[-1].arrives_s)


@pytest.mark.parametrize("common", [0.0, 30.0, 100.0])
def test_copies_have_in_common_what_is_stated(common: float) -> None:
    load = FleetLoad(REQUESTS, 4, common)
    served = list(load)
    assert len(served) == 800
    times = [copied.request.arrives_s for copied in served]
    assert times == sorted(times)
    assert times[-1] == load.last_s
    assert times[-1] - times[0] == pytest.approx(
        REQUESTS[-1].arrives_s - REQUESTS[0].arrives_s + 45.0
    )
    by_copy: list[list[Request]] = [[], [], [], []]
    num_conversations = max(copied.conversation for copied in served) // 4 + 1
    for copied in served:
        by_copy[copied.conversation // num_conversations].append(copied.request)
    first = by_copy[0]
    assert first == REQUESTS
    num_common = 0
    for copy in by_copy[1:]:
        for one, other in zip(first, copy, strict=True):
            same = [a == b for a, b in zip(one.keys, other.keys, strict=True)]
            assert same == sorted(same, reverse=True), "common blocks come first in a prompt"
            num_common += sum(same)
            assert one._replace(keys=[], arrives_s=0) == other._replace(keys=[], arrives_s=0)
    num_references = sum(len(request.keys) for request in REQUESTS)
    share = 100 * num_common / 3 / num_references
    assert share == pytest.approx(load.common_references_percent)
    assert share in (0.0, 100.0) if common in (0.0, 100.0) else 0 < share < 100


def test_blocks_are_the_same_within_a_copy_exactly_where_the_trace_has_them_twice() -> None:
    for common in (0.0, 50.0):
        copied = [one for one in FleetLoad(REQUESTS, 2, common) if one.conversation >= 0]
        keys = [key for one in copied for key in one.request.keys]
        different = {key for request in REQUESTS for key in request.keys}
        assert len(different) <= len(set(keys)) <= 2 * len(different)
        if not common:
            assert len(set(keys)) == 2 * len(different)


def test_a_larger_share_contains_a_smaller_one() -> None:
    shares = [FleetLoad(REQUESTS, 2, p).common_references_percent for p in range(0, 101, 10)]
    assert shares == sorted(shares)
    with open_trace(str(CONVERSATION)) as trace:
        chats = list(islice(trace.requests(), 2000))
    # All prompts of this trace begin with the same block.
    assert FleetLoad(chats, 2, 1.0).common_references_percent == pytest.approx(5.5, abs=2.0)
    assert FleetLoad(chats, 2, 25.0).common_references_percent == pytest.approx(28, abs=6.0)


def test_a_trace_without_requests_is_served_at_once() -> None:
    load = FleetLoad([], 3)
    assert list(load) == []
    assert (load.first_s, load.progress()) == (0.0, (0, 0))
