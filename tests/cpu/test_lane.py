"""A lane does what it is given, in order and by one thread, whatever happens on the way."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Iterator

import pytest

from kvtier.cpu.lane import Lane

NAME = "kvtier-test-lane"
PATIENCE_S = 20


@pytest.fixture
def lane() -> Iterator[Lane]:
    lane = Lane(NAME)
    yield lane
    closing = threading.Thread(target=lane.close, daemon=True)
    closing.start()
    closing.join(PATIENCE_S)
    assert not closing.is_alive()
    assert threads() == []


def threads() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name == NAME]


def do(lane: Lane) -> threading.Thread:
    """Have something done, and return the thread that did it."""
    done_by: list[threading.Thread] = []
    done = threading.Event()

    def work() -> None:
        done_by.append(threading.current_thread())
        done.set()

    lane.put(work)
    assert done.wait(PATIENCE_S)
    (thread,) = done_by
    return thread


def test_all_is_done_in_order_by_one_other_thread(lane: Lane) -> None:
    done: list[tuple[int, threading.Thread]] = []
    for number in range(100):
        lane.put(lambda number=number: done.append((number, threading.current_thread())))  # type: ignore[misc]
    lane.flush()
    (thread,) = threads()
    assert done == [(number, thread) for number in range(100)]
    assert thread.daemon  # an engine that ends without shutting down ends


def test_without_work_there_is_no_thread(lane: Lane) -> None:
    lane.flush()
    lane.close()
    assert threads() == []


def test_a_flush_waits_for_what_was_put_before(lane: Lane) -> None:
    may_go_on, done = threading.Event(), threading.Event()
    flushed = threading.Event()

    def work() -> None:
        assert may_go_on.wait(PATIENCE_S)
        done.set()

    def flush() -> None:
        lane.flush()
        assert done.is_set()
        flushed.set()

    lane.put(work)
    flusher = threading.Thread(target=flush)
    flusher.start()
    assert not flushed.is_set()
    may_go_on.set()
    flusher.join(PATIENCE_S)
    assert flushed.is_set()


@pytest.mark.parametrize("error", [RuntimeError, SystemExit, KeyboardInterrupt])
def test_no_error_ends_the_thread(
    error: type[BaseException], lane: Lane, caplog: pytest.LogCaptureFixture
) -> None:
    def fail() -> None:
        raise error("injected")

    thread = do(lane)
    lane.put(fail)
    assert do(lane) is thread
    assert "injected" in caplog.text


def test_closing_does_what_is_left_and_can_be_repeated(lane: Lane) -> None:
    done: list[int] = []
    for number in range(10):
        lane.put(lambda number=number: done.append(number))  # type: ignore[misc]
    for _ in range(2):
        lane.close()
        assert done == list(range(10))
        assert threads() == []


def test_what_a_lane_has_done_it_does_not_keep(lane: Lane) -> None:
    class Cache:
        pass

    cache, is_gone = Cache(), threading.Event()
    weakref.finalize(cache, is_gone.set)
    lane.put(lambda cache=cache: None)  # type: ignore[misc]
    del cache
    assert is_gone.wait(PATIENCE_S)


def test_without_a_thread_nothing_is_added_and_the_next_time_is_as_the_first(
    lane: Lane, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(_: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    done: list[str] = []
    with monkeypatch.context() as patch:
        patch.setattr(threading.Thread, "start", refuse)
        for _ in range(2):
            with pytest.raises(RuntimeError, match="can't start new thread"):
                lane.put(lambda: done.append("refused"))
        lane.flush()
        lane.close()
    do(lane)
    assert done == []


def test_an_interrupt_while_the_thread_starts_leaves_one_that_works_and_ends(
    lane: Lane, monkeypatch: pytest.MonkeyPatch
) -> None:
    start = threading.Thread.start

    def start_and_be_interrupted(thread: threading.Thread) -> None:
        start(thread)
        raise KeyboardInterrupt

    done: list[str] = []
    with monkeypatch.context() as patch:
        patch.setattr(threading.Thread, "start", start_and_be_interrupted)
        with pytest.raises(KeyboardInterrupt):
            lane.put(lambda: done.append("interrupted"))
    (thread,) = threads()
    assert do(lane) is thread
    lane.flush()
    assert threads() == [thread]
    assert done == []
