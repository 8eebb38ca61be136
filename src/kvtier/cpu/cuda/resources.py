"""Events and memory of a CUDA device, and a count of the entries in its queues."""

from __future__ import annotations

import logging
from collections import deque
from contextlib import suppress

import torch

from kvtier.cpu.cuda.driver import CudaDriver, CudaError

__all__ = ["DeviceMemory", "Event", "QueueRoom"]

logger = logging.getLogger(__name__)

_MOST_ENTRIES = 2048
"""Largest number of entries that one direction may have in the device's queues. The queues of an
H200 hold more. If they were full, the driver would block its caller, which may hold the interpreter
lock."""
_OF_EVENTS = 8
"""Estimated number of queue entries that a part of a job takes in addition to its copies and
launches, for events and waits."""


class Event:
    """A CUDA event whose calls keep the interpreter lock, except `synchronize`.

    Torch's events release the lock, and a thread that releases it in the middle of a job may wait
    milliseconds to get it back. An event belongs to the device that is current when it is made. Any
    thread may use it.
    """

    def __init__(self, driver: CudaDriver, *, is_timed: bool = False) -> None:
        self._driver = driver
        self._handle = driver.create_event(is_timed=is_timed)

    def record(self, stream: int) -> None:
        self._driver.record_event(self._handle, stream)

    def hold(self, stream: int) -> None:
        """Make a stream wait for the last record. Without a record it does not wait."""
        self._driver.wait_event(stream, self._handle)

    def is_reached(self) -> bool:
        """True if all work before the last record has ended."""
        return self._driver.is_reached(self._handle)

    def synchronize(self) -> None:
        """Return when the last record is reached."""
        self._driver.synchronize_event(self._handle)

    def seconds_since(self, start: Event) -> float:
        return self._driver.seconds_between(start._handle, self._handle)

    def __del__(self) -> None:
        with suppress(Exception):  # the driver may be gone at the end of the process
            self._driver.destroy_event(self._handle)


class QueueRoom:
    """Counts the entries of one direction in the device's queues. Used by one thread at a time.

    That thread waits here, without the interpreter lock, before the queues are full. Otherwise the
    driver would block it while it holds the lock.
    """

    def __init__(self, driver: CudaDriver) -> None:
        self._driver = driver
        self._spare: list[Event] = []
        self._parts: deque[tuple[Event, int]] = deque()
        """For each part that may still run, the event after it and its number of entries."""
        self._num_entries = 0

    def add(self, num_copies: int, stream: int) -> None:
        """Count a part of `num_copies` copies or launches. Call it right after the part was put on
        `stream`."""
        event = self._spare.pop() if self._spare else Event(self._driver)
        event.record(stream)
        self._parts.append((event, num_copies + _OF_EVENTS))
        self._num_entries += num_copies + _OF_EVENTS

    def is_full(self, num_copies: int) -> bool:
        """True if a part of `num_copies` would have to wait."""
        while self._num_entries + num_copies + _OF_EVENTS > _MOST_ENTRIES and self._parts:
            if not self._parts[0][0].is_reached():
                return True
            self._forget_first()
        return False

    def await_room(self, num_copies: int) -> None:
        """Return when there is room for a part of `num_copies`.

        If there is none, wait until at most `_MOST_ENTRIES // 2` entries are left. The device needs
        longer for that many entries than the thread needs to get the interpreter lock back.
        """
        if not self.is_full(num_copies):
            return
        while self._parts and self._num_entries > _MOST_ENTRIES // 2:
            self._parts[0][0].synchronize()
            self._forget_first()

    def forget(self) -> None:
        """Forget all parts. Called when they have ended."""
        self._spare += [event for event, _ in self._parts]
        self._parts.clear()
        self._num_entries = 0

    def _forget_first(self) -> None:
        event, num_entries = self._parts.popleft()
        self._spare.append(event)
        self._num_entries -= num_entries


class DeviceMemory:
    """Memory of the device that is current when it is made. Any thread may use it.

    It is allocated by the driver, not by torch. While an engine makes its KV caches, it may treat
    everything that torch allocates as part of the caches, and the contents of the caches are lost
    when the engine sleeps (vLLM's sleep mode).
    """

    def __init__(self, driver: CudaDriver, num_bytes: int) -> None:
        """Allocate memory with undefined contents. Raises `CudaError`, with a remedy, if there is
        too little."""
        self._driver = driver
        try:
            self.address = driver.allocate(num_bytes)
        except CudaError:
            torch.cuda.empty_cache()  # torch may keep unused memory
            self.address = self._allocate_again(num_bytes)
        self._is_free = False

    @classmethod
    def of(cls, driver: CudaDriver, content: memoryview) -> DeviceMemory:
        """Memory with these contents, visible to all streams. Raises `CudaError`."""
        memory = cls(driver, content.nbytes)
        try:
            driver.upload(content, memory.address)
        except CudaError:
            memory.free()
            raise
        return memory

    @classmethod
    def zeros(cls, driver: CudaDriver, device: torch.device, num_bytes: int) -> DeviceMemory:
        """`num_bytes` zero bytes on `device`. Raises `CudaError`."""
        with torch.cuda.device(device):
            return cls.of(driver, memoryview(bytes(num_bytes)))

    def _allocate_again(self, num_bytes: int) -> int:
        try:
            return self._driver.allocate(num_bytes)
        except CudaError as error:
            raise CudaError(
                f"{num_bytes} bytes of device memory cannot be allocated ({error}). Lower the "
                "engine's share of it (vLLM: --gpu-memory-utilization)"
            ) from error

    def free(self) -> None:
        """Free the memory, which must no longer be in use. The calling thread must have a context
        of the device. Idempotent."""
        if self._is_free:
            return
        self._is_free = True
        try:
            self._driver.free(self.address)
        except CudaError as error:  # a failed device has no memory to free
            logger.warning(
                "Device memory could not be freed: %s. It is lost until the process ends", error
            )
