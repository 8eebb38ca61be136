"""Waiting in tests: for something to become true, and for a disk that does not answer."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import ParamSpec, TypeVar

from kvtier.tiering.io.aio import AioQueue

P = ParamSpec("P")
T = TypeVar("T")

PATIENCE_S = 30.0


def wait_until(is_so: Callable[[], bool], what: str, patience_s: float = PATIENCE_S) -> None:
    deadline = time.monotonic() + patience_s
    while not is_so():
        assert time.monotonic() < deadline, f"not within {patience_s} s: {what}"
        time.sleep(0.005)


@contextmanager
def silent_queues(queues: Iterable[AioQueue]) -> Iterator[None]:
    """Reads and writes reach the disk, but are not reported before the context is left."""
    answers = threading.Event()
    queues = list(queues)
    for queue in queues:
        queue.reap = _when_set(answers, queue.reap)  # type: ignore[method-assign]
    try:
        yield
    finally:
        answers.set()
        for queue in queues:
            del queue.reap


def _when_set(event: threading.Event, call: Callable[P, T]) -> Callable[P, T]:
    def wait_and_call(*args: P.args, **kwargs: P.kwargs) -> T:
        event.wait()
        return call(*args, **kwargs)

    return wait_and_call
