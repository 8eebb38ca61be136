"""Base class for `TierInspector.verify`: reads and checks every block of a storage."""

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
from kvtier.tiering.inspection import Damage, Progress, Scrub

__all__ = ["UNREADABLE", "RateLimit", "Scrubber", "Verdict"]

T = TypeVar("T")

UNREADABLE = "unreadable"
"""`Verdict.reason` of a block that cannot be read from the storage."""
_NUM_THREADS = 4
_LONGEST_NAP_S = 0.1


class RateLimit:
    """Delays reads to stay below a rate. Used by one thread."""

    def __init__(self, bytes_per_s: int | None) -> None:
        """`bytes_per_s`: None for no limit."""
        self._bytes_per_s = bytes_per_s
        self._free_at = time.monotonic()

    def wait_for(self, num_bytes: int) -> None:
        """Call this before reading `num_bytes`. Waits as long as they take at the allowed rate, so
        the rate holds from the first byte. Idle time does not allow faster reads later."""
        if self._bytes_per_s is None:
            return
        self._free_at = max(self._free_at, time.monotonic()) + num_bytes / self._bytes_per_s
        while (rest := self._free_at - time.monotonic()) > 0:
            time.sleep(min(rest, _LONGEST_NAP_S))


@dataclass(frozen=True, slots=True)
class Verdict:
    """What was found in one place of the storage. Without `reason` and with no flag set, it is a
    good block."""

    place: int | str
    key: OffloadKey | None
    """The block that is there or should be there. None if it cannot be identified."""
    reason: str | None = None
    """What is wrong with a damaged block."""
    is_empty: bool = False
    """There is no block in this place, and none should be there."""
    is_gone: bool = False
    """The block was removed or overwritten before it was read."""
    is_forbidden: bool = False
    """This user may not read the block."""


class Scrubber:
    """One pass over a storage, with several reads in flight and a limited rate."""

    def __init__(self, max_rate: int | None, on_progress: Progress) -> None:
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
        """Count verdicts until there are no more. `look_again` checks the damaged blocks a second
        time, and returns those that are still damaged. Ctrl-C ends the pass early."""
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
        """Run `check` for each piece on a pool of threads, at the limited rate. Yields verdicts in
        the order of the pieces. `bytes_of`: number of bytes that `check` reads for a piece."""
        in_flight: deque[tuple[int, Future[list[Verdict]]]] = deque()
        with ThreadPoolExecutor(_NUM_THREADS, "kvtier-scrub") as pool:
            try:
                for piece in pieces:
                    num_bytes = bytes_of(piece)
                    self._limit.wait_for(num_bytes)
                    in_flight.append((num_bytes, pool.submit(check, piece)))
                    if len(in_flight) >= 2 * _NUM_THREADS:
                        yield from self._counted(*in_flight.popleft())
                while in_flight:
                    yield from self._counted(*in_flight.popleft())
            finally:
                for _, future in in_flight:
                    future.cancel()

    def _counted(self, num_bytes: int, future: Future[list[Verdict]]) -> list[Verdict]:
        verdicts = future.result()
        self._scrub.num_bytes += num_bytes
        return verdicts

    def _buffer(self, num_bytes: int) -> memoryview:
        """`num_bytes` of page-aligned memory. Each thread of the pool has its own."""
        memory: memoryview | None = getattr(self._buffers, "memory", None)
        if memory is None or len(memory) < num_bytes:
            memory = self._buffers.memory = memoryview(mmap.mmap(-1, num_bytes))
        return memory[:num_bytes]
