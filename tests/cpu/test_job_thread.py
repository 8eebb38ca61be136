"""A job thread runs its jobs in order, even if one of them fails."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Iterator

import pytest

from kvtier.cpu.job_thread import JobThread

NAME = "kvtier-test-thread"
PATIENCE_S = 20


@pytest.fixture
def worker() -> Iterator[JobThread]:
    worker = JobThread(NAME)
    yield worker
    closing = threading.Thread(target=worker.close, daemon=True)
    closing.start()
    closing.join(PATIENCE_S)
    assert not closing.is_alive()
    assert threads() == []


def threads() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name == NAME]


def do(worker: JobThread) -> threading.Thread:
    """Run a job, and return the thread that ran it."""
    done_by: list[threading.Thread] = []
    done = threading.Event()

    def work() -> None:
        done_by.append(threading.current_thread())
        done.set()

    worker.put(work)
    assert done.wait(PATIENCE_S)
    (thread,) = done_by
    return thread


def test_all_is_done_in_order_by_one_other_thread(worker: JobThread) -> None:
    done: list[tuple[int, threading.Thread]] = []
    for number in range(100):
        worker.put(lambda number=number: done.append((number, threading.current_thread())))  # type: ignore[misc]
    worker.flush()
    (thread,) = threads()
    assert done == [(number, thread) for number in range(100)]
    assert thread.daemon  # an engine that ends without shutting down ends


def test_without_work_there_is_no_thread(worker: JobThread) -> None:
    worker.flush()
    worker.close()
    assert threads() == []


def test_a_flush_waits_for_what_was_put_before(worker: JobThread) -> None:
    may_go_on, done = threading.Event(), threading.Event()
    flushed = threading.Event()

    def work() -> None:
        assert may_go_on.wait(PATIENCE_S)
        done.set()

    def flush() -> None:
        worker.flush()
        assert done.is_set()
        flushed.set()

    worker.put(work)
    flusher = threading.Thread(target=flush)
    flusher.start()
    assert not flushed.is_set()
    may_go_on.set()
    flusher.join(PATIENCE_S)
    assert flushed.is_set()


@pytest.mark.parametrize("error", [RuntimeError, SystemExit, KeyboardInterrupt])
def test_no_error_ends_the_thread(
    error: type[BaseException], worker: JobThread, caplog: pytest.LogCaptureFixture
) -> None:
    def fail() -> None:
        raise error("injected")

    thread = do(worker)
    worker.put(fail)
    assert do(worker) is thread
    assert "injected" in caplog.text


def test_closing_does_what_is_left_and_can_be_repeated(worker: JobThread) -> None:
    done: list[int] = []
    for number in range(10):
        worker.put(lambda number=number: done.append(number))  # type: ignore[misc]
    for _ in range(2):
        worker.close()
        assert done == list(range(10))
        assert threads() == []


def test_what_a_lane_has_done_it_does_not_keep(worker: JobThread) -> None:
    class Cache:
        pass

    cache, is_gone = Cache(), threading.Event()
    weakref.finalize(cache, is_gone.set)
    worker.put(lambda cache=cache: None)  # type: ignore[misc]
    del cache
    assert is_gone.wait(PATIENCE_S)


def test_without_a_thread_nothing_is_added_and_the_next_time_is_as_the_first(
    worker: JobThread, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(_: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    done: list[str] = []
    with monkeypatch.context() as patch:
        patch.setattr(threading.Thread, "start", refuse)
        for _ in range(2):
            with pytest.raises(RuntimeError, match="can't start new thread"):
                worker.put(lambda: done.append("refused"))
        worker.flush()
        worker.close()
    do(worker)
    assert done == []


def test_an_interrupt_while_the_thread_starts_leaves_one_that_works_and_ends(
    worker: JobThread, monkeypatch: pytest.MonkeyPatch
) -> None:
    start = threading.Thread.start

    def start_and_be_interrupted(thread: threading.Thread) -> None:
        start(thread)
        raise KeyboardInterrupt

    done: list[str] = []
    with monkeypatch.context() as patch:
        patch.setattr(threading.Thread, "start", start_and_be_interrupted)
        with pytest.raises(KeyboardInterrupt):
            worker.put(lambda: done.append("interrupted"))
    (thread,) = threads()
    assert do(worker) is thread
    worker.flush()
    assert threads() == [thread]
    assert done == []
