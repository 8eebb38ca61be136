"""What a worker asks of whatever copies its pages."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence

from kvtier.cpu.cuda.page_table import Columns, Grid

__all__ = ["LOAD_PRIORITY", "STORE_PRIORITY", "Copies", "FindGrids", "Ticket"]

FindGrids = Callable[[], Sequence[Grid]]
"""Says what is to be copied."""
LOAD_PRIORITY, STORE_PRIORITY = -1, 0
"""Of streams. A request waits for a load, nobody for a store: the first is high, the second the
lowest that there is."""


class Ticket(ABC):
    """One job on its way. The thread that submitted it."""

    @abstractmethod
    def is_done(self) -> bool:
        """Whether nothing of it is copied any more. Does not wait. Raises if the copy failed, or
        if it cannot be known."""

    @abstractmethod
    def wait(self) -> None:
        """Return when it is done. Raises as `is_done` does."""

    @abstractmethod
    def seconds(self) -> float:
        """How long the copy itself took, without what it waited for. Only when it is done."""


class Copies(ABC):
    """Copies pages between the device and pinned host memory. One thread.

    Jobs of one direction are done in the order in which they were started; the directions do not
    wait for each other. A job begins when all has ended that the device was given before it on the
    stream that is torch's current one: a store finds what was computed before it, and a load
    overwrites nothing that is still being read.
    """

    @abstractmethod
    def make_zeros(self, num_bytes: int) -> int:
        """Address of so many bytes on the device that are zero, until `close`. Once."""

    def expect(self, columns: Sequence[Columns]) -> None:
        """Be ready for grids of these. Before the first job."""
        return

    @abstractmethod
    def start(self, find: FindGrids, num_pages: int, *, is_store: bool) -> Ticket:
        """Have pages copied: from the device if it is a store, to it otherwise.

        `find`: called once, by any thread. `num_pages`: about so many. Raises if it cannot even be
        tried. What the driver refuses, the ticket tells, and also what `find` raises, unless this
        does.
        """

    @abstractmethod
    def flush(self) -> None:
        """Return when the device has been given all jobs: who synchronises it then, waits for them
        as well."""

    @abstractmethod
    def close(self) -> None:
        """End all jobs and release everything, on a thread whose device is the one. Idempotent."""
