"""The example tier's I/O thread, and the transfers that it carries out."""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from kvtier.base import OffloadKey
from kvtier.tiering.base import TransferJob

__all__ = ["ExampleTransfer", "IOThread", "SealedBlock"]


class SealedBlock(NamedTuple):
    """A block as the tier keeps it."""

    header: bytes
    """Its seal."""
    payload: NDArray[np.uint8]


@dataclass(slots=True, eq=False)
class ExampleTransfer:
    """A job in progress. One thread uses it at a time: the scheduler thread makes it, the I/O
    thread moves its blocks, and the scheduler thread gets it back."""

    job: TransferJob
    todo: deque[tuple[OffloadKey, int]]
    """Blocks that have not been moved, with their slots in host memory, in prompt order."""
    blocks: dict[OffloadKey, SealedBlock] = field(default_factory=dict)
    """A load: the blocks to copy into the slots. A store: the copies made so far."""
    done: list[OffloadKey] = field(default_factory=list)
    """Blocks that were moved, or that the tier had already."""
    failed: list[OffloadKey] = field(default_factory=list)
    """Blocks that could not be moved, or failed verification."""
    num_reserved: int = 0
    """A store: number of blocks for which room was reserved."""
    evicted: list[SealedBlock] = field(default_factory=list)
    """A store: the blocks evicted for it. The I/O thread frees them, because that takes time."""
    seconds: float | None = None
    """Seconds spent on moving blocks so far. None: no block was tried."""


class IOThread:
    """Carries out transfers on its own thread, loads before stores. A load that is submitted during
    a store waits for one block of the store, not for all of it.

    The lock protects the queues. It is not held while a block is moved, so `submit` never waits for
    a copy.
    """

    def __init__(
        self, name: str, move_block: Callable[[ExampleTransfer], None], delay_s: float
    ) -> None:
        """`move_block` moves the first block of a transfer's `todo`; it must not raise. Each
        transfer begins `delay_s` seconds after it was submitted, so delays overlap."""
        self._move_block = move_block
        self._delay_s = delay_s
        self._changed = threading.Condition()
        # Transfers that have not ended, each with the monotonic time at which it may begin.
        self._loads: deque[tuple[float, ExampleTransfer]] = deque()
        self._stores: deque[tuple[float, ExampleTransfer]] = deque()
        self._ended: list[ExampleTransfer] = []
        self._stopping = False
        # A daemon, so that an engine that exits without a shutdown does not wait for it.
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    def submit(self, transfer: ExampleTransfer) -> None:
        """Queue a transfer. After `stop`, the transfer ends without being carried out."""
        with self._changed:
            if self._stopping:
                self._ended.append(transfer)
                return
            queue = self._loads if transfer.job.is_promotion else self._stores
            queue.append((time.monotonic() + self._delay_s, transfer))
            self._changed.notify_all()

    def take_ended(self) -> list[ExampleTransfer]:
        """The transfers that have ended since the last call; each is returned once."""
        if not self._ended:
            return []
        with self._changed:
            ended, self._ended = self._ended, []
        return ended

    def wait_until_idle(self) -> bool:
        """Wait until all transfers have ended. Returns False if `stop` ended them early."""
        with self._changed:
            self._changed.wait_for(lambda: self._stopping or not (self._loads or self._stores))
            return not self._stopping

    def stop(self) -> None:
        """End the thread after the block it is moving. Transfers end with the blocks moved so
        far."""
        with self._changed:
            self._stopping = True
            self._changed.notify_all()
        self._thread.join()
        with self._changed:
            self._ended += [transfer for _, transfer in (*self._loads, *self._stores)]
            self._loads.clear()
            self._stores.clear()

    # --- I/O thread ----------------------------------------------------------------------------

    def _run(self) -> None:
        while (queue := self._next_queue()) is not None:
            self._move_one(queue)

    def _move_one(self, queue: deque[tuple[float, ExampleTransfer]]) -> None:
        """Move one block of the queue's first transfer. This is a separate method so that the idle
        thread keeps no reference to a transfer's blocks."""
        _, transfer = queue[0]
        self._move_block(transfer)
        if not transfer.todo:
            with self._changed:
                queue.popleft()
                self._ended.append(transfer)
                self._changed.notify_all()

    def _next_queue(self) -> deque[tuple[float, ExampleTransfer]] | None:
        """Wait until a transfer may begin, and return its queue. None: the thread must end."""
        with self._changed:
            while not self._stopping:
                now = time.monotonic()
                waiting = [queue for queue in (self._loads, self._stores) if queue]
                for queue in waiting:
                    if queue[0][0] <= now:
                        return queue
                self._changed.wait(min(q[0][0] for q in waiting) - now if waiting else None)
        return None
