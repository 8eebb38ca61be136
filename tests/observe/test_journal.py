"""The journal's rings: what they remember, how far back, and in how much memory."""

from __future__ import annotations

import gc
import tracemalloc

import pytest

from kvtier.base import OffloadKey, ReqContext, make_offload_key
from kvtier.observe.journal import HOST_PLACE, Event, Journal, TierLoad, What, _KeyRing

LIMIT = 16 << 20


def keys(first: int, count: int) -> list[OffloadKey]:
    return [make_offload_key(n.to_bytes(32, "big"), 0) for n in range(first, first + count)]


def event(when: float) -> Event:
    return Event(when, What.STORED, 1, 7)


@pytest.mark.parametrize("batch", [1, 3, 10, 16])
def test_a_ring_has_the_newest_events_and_no_others(batch: int) -> None:
    ring = _KeyRing(100, 20)
    for number in range(50):
        ring.add(event(number), keys(batch * number, batch))
        oldest = max(0, number + 1 - min(20, 100 // batch))
        for earlier in range(number + 1):
            for key in keys(batch * earlier, batch):
                found = ring.find(key)
                if earlier >= oldest:
                    assert found == [event(earlier)]
                else:
                    assert found in ([], [event(earlier)])
        assert ring.find(keys(10**6, 1)[0]) == []
        if oldest:
            assert oldest - 1 <= ring.since() <= oldest + 1


def test_events_of_one_block_are_in_order() -> None:
    ring = _KeyRing(100, 20)
    (key,) = keys(0, 1)
    for when in range(5):
        ring.add(event(when), [key, *keys(100 * when + 1, 3)])
    assert [each.when for each in ring.find(key)] == [0, 1, 2, 3, 4]
    assert ring.since() < 0


def test_nothing_is_recorded_until_the_journal_is_kept() -> None:
    journal = Journal()
    context = ReqContext("before")
    journal.begin(context)
    journal.note(What.STORED, HOST_PLACE, keys(0, 10), context)
    journal.take_over()
    assert journal.requests() == []
    assert journal.of(context) is None


def test_it_takes_at_most_16_mib_at_any_load() -> None:
    gc.collect()
    tracemalloc.start()
    try:
        journal = Journal()
        journal.keep()
        before = tracemalloc.get_traced_memory()[0]
        number = 0
        for round_ in range(60):
            for n in range(200):
                context = ReqContext(f"{round_}-{n}-" + "x" * 150, num_prompt_tokens=1000)
                journal.begin(context)
                record = journal.of(context)
                if record is not None:
                    journal.note_wanted(keys(number, 40), record)
                    for _ in range(50):
                        record.note_load(TierLoad(1, 10**6, 10**6, 1.5, False))
                journal.note(What.STORED, HOST_PLACE, keys(number, 40), context)
                journal.note(What.STORED, 1, keys(number, 1), context)
                number += 40
                if n % 4:
                    journal.end(context)
                journal.note_breaker(1, False, True, "cut off " * 10)
                journal.note_reset()
            if round_ % 2:  # at times, the socket's thread does not come for long
                journal.take_over()
        # Some megabytes of notes wait now.
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert journal.num_lost, "not all of this load fits"
    assert peak - before + journal_size_at_start() < LIMIT


def journal_size_at_start() -> int:
    """The rings alone."""
    tracemalloc.start()
    try:
        journal = Journal()
        journal.keep()
        assert journal.requests() == []
        return tracemalloc.get_traced_memory()[0]
    finally:
        tracemalloc.stop()


def test_a_reader_that_does_not_come_costs_the_newest_notes_only() -> None:
    journal = Journal()
    journal.keep()
    for n in range(200):
        journal.note(What.STORED, HOST_PLACE, keys(1000 * n, 1000))
    journal.take_over()
    assert journal.history(keys(0, 1)[0])
    assert not journal.history(keys(199_000, 1)[0])
    assert journal.num_lost
    journal.note(What.STORED, HOST_PLACE, keys(500_000, 10))
    journal.take_over()
    assert journal.history(keys(500_009, 1)[0])


def test_a_used_id_is_a_new_request() -> None:
    journal = Journal()
    journal.keep()
    journal.begin(ReqContext("same"))
    journal.begin(ReqContext("same"))
    journal.end(ReqContext("same"))
    newest, oldest = journal.requests()
    assert newest.number > oldest.number
    assert newest.ended is not None
