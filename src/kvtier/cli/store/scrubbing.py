"""Reading everything and judging it, whatever it is kept in."""

from __future__ import annotations

import mmap
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import TypeVar

from kvtier.base import OffloadKey
from kvtier.cli.store.rate_limit import RateLimit
from kvtier.cli.store.store import Damage, Scrub

__all__ = ["UNREADABLE", "Scrubber", "Verdict"]

T = TypeVar("T")

_NUM_THREADS = 4
UNREADABLE = "unreadable"


@dataclass(frozen=True, slots=True)
class Verdict:
    """What was found in one place."""

    place: int | str
    key: OffloadKey | None
    """Of the block that should be there, or is; None: it cannot be said which."""
    reason: str | None = None
    """Why it is damaged."""
    is_empty: bool = False
    """There is no block, and none is missing."""
    is_gone: bool = False
    """There was a block, and it has left."""
    is_forbidden: bool = False
    """There is a block, and we may not read it."""


class Scrubber:
    """One pass over a store: several reads under way, at a limited rate."""

    def __init__(self, max_rate: int | None, on_progress: Callable[[int, int], None]) -> None:
        self._limit = RateLimit(max_rate)
        self._on_progress = on_progress
        self._scrub = Scrub()
        self._buffers = threading.local()

    def _judge_all(
        self,
        total_bytes: int,
        verdicts: Iterable[Verdict],
        look_again: Callable[[list[Verdict]], list[Verdict]],
    ) -> Scrub:
        """Take the verdicts as they come. `look_again`: those of the damaged that still are. Ctrl-C
        ends it early."""
        started = time.monotonic()
        scrub = self._scrub
        scrub.total_bytes = total_bytes
        suspects: list[Verdict] = []
        try:
            self._on_progress(0, total_bytes)
            for verdict in verdicts:
                if verdict.reason is not None:
                    suspects.append(verdict)
                elif verdict.is_gone:
                    scrub.num_gone += 1
                elif verdict.is_forbidden:
                    scrub.num_forbidden += 1
                elif not verdict.is_empty:
                    scrub.num_good += 1
                self._on_progress(scrub.num_bytes, total_bytes)
            suspects = look_again(suspects)
        except KeyboardInterrupt:
            scrub.is_complete = False
        for verdict in suspects:
            assert verdict.reason is not None
            scrub.damaged.append(Damage(verdict.place, verdict.key, verdict.reason))
        scrub.seconds = time.monotonic() - started
        return scrub

    def _read_all(
        self,
        pieces: Iterable[T],
        bytes_of: Callable[[T], int],
        check: Callable[[T], list[Verdict]],
    ) -> Iterator[Verdict]:
        """`check` each piece on a thread of the pool; verdicts come in the order of the pieces."""
        under_way: deque[tuple[int, Future[list[Verdict]]]] = deque()
        with ThreadPoolExecutor(_NUM_THREADS, "kvtier-scrub") as pool:
            try:
                for piece in pieces:
                    num_bytes = bytes_of(piece)
                    self._limit.wait_for(num_bytes)
                    under_way.append((num_bytes, pool.submit(check, piece)))
                    if len(under_way) >= 2 * _NUM_THREADS:
                        yield from self._counted(*under_way.popleft())
                while under_way:
                    yield from self._counted(*under_way.popleft())
            finally:
                for _, future in under_way:
                    future.cancel()

    def _counted(self, num_bytes: int, future: Future[list[Verdict]]) -> list[Verdict]:
        verdicts = future.result()
        self._scrub.num_bytes += num_bytes
        return verdicts

    def _buffer(self, num_bytes: int) -> memoryview:
        """Page-aligned memory of the calling thread."""
        memory: memoryview | None = getattr(self._buffers, "memory", None)
        if memory is None or len(memory) < num_bytes:
            memory = self._buffers.memory = memoryview(mmap.mmap(-1, num_bytes))
        return memory[:num_bytes]
