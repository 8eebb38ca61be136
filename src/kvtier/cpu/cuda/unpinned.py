"""Copies between the device and host memory that could not be pinned: slow, but right."""

from __future__ import annotations

import threading
import time
from contextlib import suppress
from typing import Any

import torch

from kvtier.cpu.cuda.copies import LOAD_PRIORITY, STORE_PRIORITY, Copies, FindGrids, Ticket
from kvtier.cpu.cuda.device_memory import DeviceMemory
from kvtier.cpu.cuda.driver import CudaDriver, CudaError
from kvtier.cpu.lane import Lane

__all__ = ["UnpinnedCopies"]


class UnpinnedCopies(Copies):
    """A thread and a stream for each direction: with such memory the driver makes its caller wait
    until all is copied, and that must not be the engine's thread."""

    def __init__(self, device: Any, driver: CudaDriver) -> None:
        self._device = device
        self._driver = driver
        with torch.cuda.device(device):
            torch.cuda.set_device(device)  # its context is this thread's now
            self._streams = {
                is_store: torch.cuda.ExternalStream(driver.create_stream(priority))
                for is_store, priority in ((True, STORE_PRIORITY), (False, LOAD_PRIORITY))
            }
        self._lanes = {True: Lane("kvtier-store"), False: Lane("kvtier-load")}
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
        self._lanes[is_store].put(lambda: self._run(ticket, find, computed, is_store))
        return ticket

    def flush(self) -> None:
        for lane in self._lanes.values():
            lane.flush()

    def close(self) -> None:
        for lane in self._lanes.values():
            lane.close()
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
        except BaseException as error:  # for the thread that asks
            ticket.error = error if isinstance(error, Exception) else RuntimeError(repr(error))
            # Some of it may be on its way, and whoever hears of the failure may reuse the memory.
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
