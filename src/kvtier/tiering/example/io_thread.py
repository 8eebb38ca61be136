"""The example tier's I/O thread."""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable

from kvtier.tiering.example.transfer import Transfer

__all__ = ["IOThread"]


class IOThread:
    """Carries out transfers on a thread of its own. Loads go before stores, and a load that arrives
    during a store waits for one block of it, not for all of it.

    The lock is held to look into the queues, never while a block is moved: whoever submits does not
    wait for a copy.
    """

    def __init__(self, name: str, move_block: Callable[[Transfer], None], delay_s: float) -> None:
        """`move_block` moves the first block of `todo`, and does not raise. A transfer is begun
        `delay_s` seconds after it was submitted; any number of them wait side by side."""
        self._move_block = move_block
        self._delay_s = delay_s
        self._changed = threading.Condition()
        # A transfer stays in its queue until it has ended, each with the time it may begin.
        self._loads: deque[tuple[float, Transfer]] = deque()
        self._stores: deque[tuple[float, Transfer]] = deque()
        self._ended: list[Transfer] = []
        self._stopping = False
        # A daemon: an engine that ends without a shutdown must not wait for it.
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    def submit(self, transfer: Transfer) -> None:
        """Carry out a transfer. After `stop` it ends as it is."""
        with self._changed:
            if self._stopping:
                self._ended.append(transfer)
                return
            queue = self._loads if transfer.job.is_promotion else self._stores
            queue.append((time.monotonic() + self._delay_s, transfer))
            self._changed.notify_all()

    def take_ended(self) -> list[Transfer]:
        """The transfers that have ended since the last call; each is handed out once."""
        if not self._ended:
            return []
        with self._changed:
            ended, self._ended = self._ended, []
        return ended

    def wait_until_idle(self) -> bool:
        """Wait for all transfers. False: `stop` has ended them before their time."""
        with self._changed:
            self._changed.wait_for(lambda: self._stopping or not (self._loads or self._stores))
            return not self._stopping

    def stop(self) -> None:
        """End the thread, at the latest after the block being moved, and all transfers with it."""
        with self._changed:
            self._stopping = True
            self._changed.notify_all()
        self._thread.join()
        with self._changed:
            self._ended += [transfer for _, transfer in (*self._loads, *self._stores)]
            self._loads.clear()
            self._stores.clear()

    # --- on the thread -------------------------------------------------------------------------

    def _run(self) -> None:
        while (queue := self._next_queue()) is not None:
            self._go_on(queue)

    def _go_on(self, queue: deque[tuple[float, Transfer]]) -> None:
        """Move one block of the queue's first transfer. When this returns, the thread holds on to
        nothing of it: an idle thread must not keep blocks in memory."""
        _, transfer = queue[0]
        self._move_block(transfer)
        if not transfer.todo:
            with self._changed:
                queue.popleft()
                self._ended.append(transfer)
                self._changed.notify_all()

    def _next_queue(self) -> deque[tuple[float, Transfer]] | None:
        """The queue whose first transfer is to go on. Waits for one; None when there is none to
        wait for any more."""
        with self._changed:
            while not self._stopping:
                now = time.monotonic()
                waiting = [queue for queue in (self._loads, self._stores) if queue]
                for queue in waiting:
                    if queue[0][0] <= now:
                        return queue
                self._changed.wait(min(q[0][0] for q in waiting) - now if waiting else None)
        return None
