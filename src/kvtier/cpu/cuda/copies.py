"""The interface of objects that copy pages, the choice of the fastest path, and the slow path.

A page is the part of one device block that is in one device cache. It can be copied by the GPU's
copy engines or by a kernel. The copy engines disturb no kernel, but need some time for every page.
A kernel copies small pages as fast as large ones, but takes some SMs from the model and reaches at
most 92 to 94 % of the bus, because it uses smaller packets. The table gives GB/s for scattered
pages on an H200 (PCIe 5), host to device / device to host. One copy of contiguous memory reaches
55.2 / 55.1.

| page    | copy engines, 1 stream | 2 streams   | 4 streams   | kernel      |
|---------|------------------------|-------------|-------------|-------------|
| 16 KiB  | 4.6 / 16.8             | 5.0 / 17.1  | 3.8 / 25.5  | 50.9 / 51.5 |
| 64 KiB  | 41.7 / 38.7            | 45.4 / 41.5 | 49.7 / 44.5 | 51.0 / 51.7 |
| 256 KiB | 49.5 / 47.0            | 52.3 / 50.0 | 53.6 / 51.7 | 50 / 50     |
| 1 MiB   | 53.4 / 52.4            | 54.3 / 53.7 | 54.8 / 54.3 | 50 / 51     |
| 2 MiB   | 54.7 / 54.1            | 54.7 / 54.7 | 55.0 / 54.7 | 50 / 51     |

A small job ends before a kernel reaches full speed: 16 pages of 64 KiB take as long with a
kernel as with the copy engines.

A kernel that reads or writes host memory occupies its SMs while the copy lasts, and matrix products
that run at the same time take 2 to 17 % longer, even if the kernel uses few SMs. So, in a
large job in which the pages of a block are adjacent in its slot, as with an engine that has a
tensor for each layer, the kernel does not access host memory. It copies between the pages and a
buffer on the device, which takes about 20 microseconds. The copy engines copy whole slots between
the buffer and host memory.
"""

from __future__ import annotations

import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from contextlib import suppress
from enum import Enum, auto
from typing import Any

import torch

from kvtier.cpu.cuda.driver import CudaDriver, CudaError
from kvtier.cpu.cuda.page_table import Columns, Grid
from kvtier.cpu.cuda.resources import DeviceMemory
from kvtier.cpu.job_thread import JobThread

__all__ = [
    "LOAD_PRIORITY",
    "STORE_PRIORITY",
    "Copies",
    "FindGrids",
    "CopyPath",
    "Ticket",
    "UnpinnedCopies",
    "choose_path",
]

FindGrids = Callable[[], Sequence[Grid]]
"""Returns the pages of a job."""
LOAD_PRIORITY, STORE_PRIORITY = -1, 0
"""Priorities of streams: high for loads, because requests wait for them; the lowest for stores."""

_ENGINES_FROM_BYTES = 128 << 10
"""Smallest page size for which the copy engines are faster than a kernel."""
_ONE_STREAM_FROM_BYTES = 512 << 10
"""Smallest page size for which the copy engines need no second stream."""
_SMALL_PAGE_BYTES = 32 << 10
"""Below this page size a kernel is faster even for a few pages."""
_FEW_PAGES = 16
"""Up to this number of pages, a job ends before a kernel or a second stream pays off."""
_STAGED_RUN_BYTES = range(256 << 10, (16 << 20) + 1)
"""Values of `run_bytes` for which a buffer on the device pays off."""
_STAGED_FROM_BYTES = 2 << 20
"""Smallest job, in bytes, that is copied through a buffer."""


class CopyPath(Enum):
    """How the pages of a job are copied."""

    ENGINES = auto()
    """By the copy engines, in one stream."""
    ENGINES_TWICE = auto()
    """By the copy engines, half of the pages in a second stream: the start of one copy overlaps
    with the end of another."""
    KERNEL = auto()
    """By a kernel that reads or writes host memory."""
    STAGED = auto()
    """A kernel copies between the pages and a buffer on the device, the copy engines between the
    buffer and whole slots."""

    @property
    def words(self) -> str:
        """Its name in logs and output."""
        return self.name.lower().replace("_", " ")


def choose_path(page_bytes: float, num_pages: int, run_bytes: int) -> CopyPath:
    """The fastest path for a job.

    `page_bytes`: mean page size. `run_bytes`: `Grid.run_bytes`, the bytes of this rank in one slot
    if they can be copied as a whole; otherwise 0.
    """
    if page_bytes >= _ONE_STREAM_FROM_BYTES:
        return CopyPath.ENGINES
    if page_bytes >= _ENGINES_FROM_BYTES:
        return CopyPath.ENGINES_TWICE if num_pages > _FEW_PAGES else CopyPath.ENGINES
    if page_bytes >= _SMALL_PAGE_BYTES and num_pages <= _FEW_PAGES:
        return CopyPath.ENGINES
    if run_bytes in _STAGED_RUN_BYTES and page_bytes * num_pages >= _STAGED_FROM_BYTES:
        return CopyPath.STAGED
    return CopyPath.KERNEL


class Ticket(ABC):
    """A job that was started. Used only by the thread that submitted it."""

    @abstractmethod
    def is_done(self) -> bool:
        """True if the job has ended. Does not wait. Raises if the copy failed, or if the device
        cannot tell."""

    @abstractmethod
    def wait(self) -> None:
        """Return when the job has ended. Raises as `is_done` does."""

    @abstractmethod
    def seconds(self) -> float:
        """The duration of the copy, without the time that it waited. Only for an ended job."""


class Copies(ABC):
    """Copies pages between the device and host memory. Called by one thread.

    Jobs of one direction run in the order in which they were started; the directions do not wait
    for each other. A job begins after all work that was on torch's current stream before it. So a
    store copies what was computed, and a load overwrites nothing that is still being read.
    """

    @abstractmethod
    def make_zeros(self, num_bytes: int) -> int:
        """The address of `num_bytes` zero bytes on the device. Valid until `close`; called once."""

    def expect(self, columns: Sequence[Columns]) -> None:
        """Prepare for jobs with these columns. Called before the first job."""
        return

    @abstractmethod
    def start(self, find: FindGrids, num_pages: int, *, is_store: bool) -> Ticket:
        """Start a job: a copy from the device if it is a store, to it otherwise.

        `find`: called once, by any thread. `num_pages`: an estimate. Raises if the job cannot be
        started. Later errors, of the driver or of `find`, are raised by the ticket.
        """

    @abstractmethod
    def flush(self) -> None:
        """Return when all jobs are on the device's streams, so that synchronizing the device
        covers them."""

    @abstractmethod
    def close(self) -> None:
        """End all jobs and release everything. The calling thread must have this device as its
        current one. Idempotent."""


class UnpinnedCopies(Copies):
    """Copies for host memory that could not be pinned: slow, but correct.

    With such memory, the driver blocks its caller until the copy has ended. So that it does not
    block the engine's thread, each direction has a thread and a stream of its own.
    """

    def __init__(self, device: Any, driver: CudaDriver) -> None:
        self._device = device
        self._driver = driver
        with torch.cuda.device(device):
            torch.cuda.set_device(device)  # makes the device's context current
            self._streams = {
                is_store: torch.cuda.ExternalStream(driver.create_stream(priority))
                for is_store, priority in ((True, STORE_PRIORITY), (False, LOAD_PRIORITY))
            }
        self._threads = {True: JobThread("kvtier-store"), False: JobThread("kvtier-load")}
        self._zeros: DeviceMemory | None = None

    def make_zeros(self, num_bytes: int) -> int:
        self._zeros = DeviceMemory.zeros(self._driver, self._device, num_bytes)
        return self._zeros.address

    def start(self, find: FindGrids, num_pages: int, *, is_store: bool) -> Ticket:
        with torch.cuda.device(self._device):
            current = torch.cuda.current_stream()
            self._driver.require_no_capture(current.cuda_stream)
            computed = current.record_event()
        ticket = _ThreadTicket()
        self._threads[is_store].put(lambda: self._run(ticket, find, computed, is_store))
        return ticket

    def flush(self) -> None:
        for thread in self._threads.values():
            thread.flush()

    def close(self) -> None:
        for thread in self._threads.values():
            thread.close()
        for stream in self._streams.values():
            with suppress(CudaError):
                self._driver.destroy_stream(stream.cuda_stream)
        self._streams.clear()
        if self._zeros is not None:
            self._zeros.free()

    def _run(self, ticket: _ThreadTicket, find: FindGrids, computed: Any, is_store: bool) -> None:
        stream = self._streams[is_store]
        began = time.perf_counter()
        try:
            torch.cuda.set_device(self._device)
            with self._driver.beside_captures():
                computed.synchronize()
                began = time.perf_counter()
                for grid in find():
                    device, host, sizes = grid.pages(0, len(grid.blocks))
                    sources, targets = (device, host) if is_store else (host, device)
                    self._driver.copy_batch(sources, targets, sizes, stream.cuda_stream)
                stream.synchronize()
        except BaseException as error:  # the ticket raises it in the submitting thread
            ticket.error = error if isinstance(error, Exception) else RuntimeError(repr(error))
            # Wait for copies under way, because the caller may reuse the memory after a failure.
            with suppress(BaseException), self._driver.beside_captures():
                stream.synchronize()
        finally:
            ticket.elapsed_s = time.perf_counter() - began
            ticket.ended.set()


class _ThreadTicket(Ticket):
    def __init__(self) -> None:
        self.ended = threading.Event()
        self.error: Exception | None = None
        self.elapsed_s = 0.0

    def is_done(self) -> bool:
        if not self.ended.is_set():
            return False
        if self.error is not None:
            raise self.error
        return True

    def wait(self) -> None:
        self.ended.wait()
        self.is_done()

    def seconds(self) -> float:
        return self.elapsed_s
