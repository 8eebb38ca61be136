"""A device that runs the work of its streams in any order that they allow.

It replaces torch's streams and events, the driver and the kernel, so that the rest of the worker
runs without a device. Memory is host memory. Work is done when a thread queries or waits, in random
order, and in a way that reveals missing waits: work that is waited for goes first, delayed work
goes last.
"""

from __future__ import annotations

import ctypes
import random
import struct
import threading
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from kvtier.cpu.cuda import resources
from kvtier.cpu.cuda.driver import CudaError
from kvtier.cpu.cuda.page_kernel import Order, Threads
from kvtier.cpu.cuda.page_table import ALIGNMENT

Addresses = NDArray[np.uint64]
Work = Callable[[], object]

_FEW_COPIES = 64
"""The driver takes a microsecond for each page, and keeps the interpreter meanwhile."""
_ANOTHER_DEVICE = 1
_EVENTS_OF_A_JOB = 8
"""Entries for the first wait and event of a job, and for those of a part besides its copies. They
are queued before or after the check for room."""


class Mark:
    """One record of an event in a stream."""

    def __init__(self, stream: SimulatedStream) -> None:
        self.stream = stream
        self.time_ms: float | None = None

    @property
    def is_reached(self) -> bool:
        return self.time_ms is not None


class SimulatedDevice:
    """Streams of work. Any thread."""

    def __init__(self, seed: int) -> None:
        self.lock = threading.RLock()
        self.streams: list[SimulatedStream] = []
        self.events: list[SimulatedEvent] = []
        self.default_stream = SimulatedStream(self, handle=0)
        self.current_stream = self.default_stream
        self.elsewhere = SimulatedStream(self, handle=1)
        """The current stream of a thread whose current device is another one."""
        self.failure: Exception | None = None
        """Raised by every call once it is set: by a test, or by work that fails."""
        self.allocated: dict[int, Any] = {}
        """Address to memory."""
        self.pinned: dict[int, int] = {}
        """Address to size."""
        self.num_steps = 0
        self.destroyed: list[SimulatedStream] = []
        self.created_events: list[int] = []
        """Events that the driver made; torch's are not counted."""
        self.destroyed_events: list[int] = []
        self._holder: int | None = None
        self._waiters = 0
        self._changed = threading.Condition(self.lock)
        self._random = random.Random(seed)
        self._of_thread = threading.local()

    @property
    def is_current(self) -> bool:
        """True if it is the current device of the calling thread. A new thread has another one."""
        return getattr(self._of_thread, "is_current", False)

    @is_current.setter
    def is_current(self, value: bool) -> None:
        self._of_thread.is_current = value

    def new_stream(self, priority: int = 0) -> SimulatedStream:
        return SimulatedStream(self, handle=len(self.streams), priority=priority)

    @property
    def is_held(self) -> bool:
        """True while delays do not end."""
        return self._holder is not None

    @contextmanager
    def held(self) -> Iterator[None]:
        """Within it, no delay ends. A thread that waits for delayed work waits until this ends; the
        calling thread must not, because it would wait forever."""
        self._holder = threading.get_ident()
        try:
            yield
        finally:
            with self.lock:
                self._holder = None
                self._changed.notify_all()

    def await_waiter(self, patience_s: float = 60.0) -> None:
        """Return when a thread waits for the end of `held`."""
        with self.lock:
            assert self._changed.wait_for(lambda: self._waiters > 0, patience_s), "no thread waits"

    def go_on(self, preferred: SimulatedStream) -> None:
        """Do one piece of work for a thread that waits for that stream."""
        with self.lock:
            if self.step(preferred):
                return
            assert threading.get_ident() != self._holder, "the engine's thread waits for the device"
            self._waiters += 1
            self._changed.notify_all()
            self._changed.wait_for(lambda: not self.is_held)
            self._waiters -= 1

    def step(self, preferred: SimulatedStream | None = None) -> bool:
        """Do one piece of work of any stream that can go on. False if all wait for the end of
        `held`."""
        with self.lock:
            ready = [stream for stream in self.streams if stream.is_ready]
            prompt = [stream for stream in ready if not stream.is_delayed]
            if preferred in ready and (preferred in prompt or not prompt):
                preferred.do_next()
            elif ready:
                self._random.choice(prompt or ready).do_next()
            elif self.is_held:
                return False
            else:
                assert all(not stream.work for stream in self.streams), "a wait without an end"
            return True

    def wander(self) -> None:
        """Do some work, as if time passed."""
        with self.lock:
            for _ in range(self._random.randrange(4)):
                self.step()

    def check(self) -> None:
        if self.failure is not None:
            # Another one each time, as torch does: one that is raised again while it is handled
            # has itself for its context, and `ExitStack` never gets to the end of that.
            raise RuntimeError(f"the device has failed: {self.failure!r}")

    def is_pinned(self, address: int) -> bool:
        return any(start <= address < start + size for start, size in self.pinned.items())


class SimulatedStream:
    def __init__(self, device: SimulatedDevice, handle: int, priority: int = 0) -> None:
        self.cuda_stream = handle
        self.priority = priority
        self.work: deque[Work | Mark | tuple[Mark] | None] = deque()
        """Work, an event to record, an event to wait for, or a delay."""
        self._device = device
        device.streams.append(self)

    @property
    def is_ready(self) -> bool:
        if not self.work or (self.is_delayed and self._device.is_held):
            return False
        return not (isinstance(self.work[0], tuple) and not self.work[0][0].is_reached)

    @property
    def is_delayed(self) -> bool:
        return bool(self.work) and self.work[0] is None

    def do_next(self) -> None:
        work = self.work.popleft()
        self._device.num_steps += 1
        if isinstance(work, Mark):
            work.time_ms = self._device.num_steps * 1e-3
        elif work is not None and not isinstance(work, tuple):
            try:
                work()
            except Exception as fault:
                self._device.failure = fault

    def add(self, *work: Work | Mark | tuple[Mark] | None) -> None:
        with self._device.lock:
            self.work.extend(work)

    def wait_event(self, event: SimulatedEvent) -> None:
        if event.mark is not None:
            self.add((event.mark,))

    def wait_stream(self, stream: SimulatedStream) -> None:
        self.wait_event(stream.record_event())

    def record_event(self) -> SimulatedEvent:
        event = SimulatedEvent(self._device)
        event.record(self)
        return event

    def require_room(self, count: int = 1) -> None:
        """Check that a call that keeps the interpreter has room: without it the driver would block,
        and no other thread could go on."""
        num_entries, most = len(self.work) + count, resources._MOST_ENTRIES + _EVENTS_OF_A_JOB
        assert num_entries <= most, f"{num_entries} entries in a stream that has room for {most}"

    def synchronize(self) -> None:
        with self._device.lock:
            while self.work:
                self._device.check()
                self._device.go_on(preferred=self)
            self._device.check()


class SimulatedEvent:
    def __init__(self, device: SimulatedDevice) -> None:
        self.mark: Mark | None = None
        self.cuda_event = len(device.events)
        self._device = device
        device.events.append(self)

    def record(self, stream: SimulatedStream | None = None) -> None:
        stream = stream or self._current_stream()
        self.mark = Mark(stream)
        stream.add(self.mark)

    def query(self) -> bool:
        self._device.check()
        self._device.wander()
        self._device.check()
        return self.mark is None or self.mark.is_reached

    def synchronize(self) -> None:
        with self._device.lock:
            while self.mark is not None and not self.mark.is_reached:
                self._device.check()
                self._device.go_on(preferred=self.mark.stream)
            self._device.check()

    def elapsed_time(self, other: SimulatedEvent) -> float:
        assert self.mark is not None
        assert other.mark is not None
        assert self.mark.time_ms is not None
        assert other.mark.time_ms is not None
        return other.mark.time_ms - self.mark.time_ms

    def _current_stream(self) -> SimulatedStream:
        device = self._device
        return device.current_stream if device.is_current else device.elsewhere


class SimulatedTorchCuda:
    """The part of `torch.cuda` that the worker uses."""

    def __init__(self, device: SimulatedDevice) -> None:
        self._device = device

    @contextmanager
    def device(self, device: Any) -> Iterator[None]:
        before, self._device.is_current = self._device.is_current, True
        try:
            yield
        finally:
            self._device.is_current = before

    def current_device(self) -> int | None:
        """None is the index of host memory."""
        return None if self._device.is_current else _ANOTHER_DEVICE

    def set_device(self, device: Any) -> None:
        self._device.is_current = device != _ANOTHER_DEVICE

    def empty_cache(self) -> None:
        """There is none."""

    def get_device_properties(self, device: Any) -> Any:
        return SimpleNamespace(major=9, minor=0, multi_processor_count=132)

    def current_stream(self, device: Any = None) -> SimulatedStream:
        is_ours = self._device.is_current or device is not None
        return self._device.current_stream if is_ours else self._device.elsewhere

    def ExternalStream(self, handle: int) -> SimulatedStream:  # noqa: N802  (torch's name)
        assert self._device.is_current, "a stream of another device"
        return self._device.streams[handle]

    def Event(self, enable_timing: bool = False) -> SimulatedEvent:  # noqa: N802
        return SimulatedEvent(self._device)

    @contextmanager
    def stream(self, stream: SimulatedStream) -> Iterator[None]:
        before, self._device.current_stream = self._device.current_stream, stream
        try:
            yield
        finally:
            self._device.current_stream = before


class SimulatedTorchC:
    """The part of `torch._C` that the worker uses."""

    def __init__(self, device: SimulatedDevice) -> None:
        self._device = device

    def _cuda_getDevice(self) -> int | None:  # noqa: N802
        """None is the index of host memory."""
        return None if self._device.is_current else _ANOTHER_DEVICE

    def _cuda_getCurrentRawStream(self, index: int | None) -> int:  # noqa: N802
        assert index is None
        return self._device.current_stream.cuda_stream


class SimulatedTorch:
    """torch with another `cuda`."""

    def __init__(self, device: SimulatedDevice) -> None:
        self.cuda = SimulatedTorchCuda(device)
        self._C = SimulatedTorchC(device)

    def __getattr__(self, name: str) -> Any:
        return getattr(torch, name)


def _numbers_at(address: int, count: int) -> list[int]:
    """The bytes at an address."""
    return list((ctypes.c_uint64 * count).from_address(address))


class SimulatedDriver:
    """A driver that asserts the rules of the real one."""

    def __init__(self, device: SimulatedDevice) -> None:
        self._device = device
        self._own_streams: set[int] = set()

    def allocate(self, num_bytes: int) -> int:
        assert self._device.is_current, "memory of another device"
        assert num_bytes > 0, "the driver does not give that"
        memory = np.full(num_bytes + ALIGNMENT, 0xA5, np.uint8)  # left over from an earlier use
        address = -(-memory.ctypes.data // ALIGNMENT) * ALIGNMENT
        self._device.allocated[address] = memory
        return address

    def free(self, address: int) -> None:
        assert self._device.is_current, "no context to free memory in"
        self._device.allocated.pop(address).fill(0x5A)  # a later use will show

    def upload(self, content: memoryview, address: int) -> None:
        ctypes.memmove(address, bytes(content), content.nbytes)

    def create_stream(self, priority: int) -> int:
        stream = self._device.new_stream(priority).cuda_stream
        self._own_streams.add(stream)
        return stream

    def destroy_stream(self, stream: int) -> None:
        queue = self._device.streams[stream]
        assert not queue.work or self._device.failure, "still in use"
        self._device.destroyed.append(queue)

    def beside_captures(self) -> AbstractContextManager[None]:
        return nullcontext()

    def require_no_capture(self, stream: int) -> None:
        """Nothing is captured here."""

    def synchronize_stream(self, stream: int) -> None:
        self._device.streams[stream].synchronize()

    def create_event(self, *, is_timed: bool) -> int:
        assert self._device.is_current, "an event of another device"
        event = SimulatedEvent(self._device).cuda_event
        self._device.created_events.append(event)
        return event

    def destroy_event(self, event: int) -> None:
        self._device.destroyed_events.append(event)

    def record_event(self, event: int, stream: int) -> None:
        self._require_room(stream)
        self._device.events[event].record(self._device.streams[stream])

    def wait_event(self, stream: int, event: int) -> None:
        self._require_room(stream)
        self._device.streams[stream].wait_event(self._device.events[event])

    def is_reached(self, event: int) -> bool:
        return self._device.events[event].query()

    def synchronize_event(self, event: int) -> None:
        self._device.events[event].synchronize()

    def seconds_between(self, start: int, end: int) -> float:
        events = self._device.events
        return events[start].elapsed_time(events[end]) / 1e3

    def copy_batch(
        self,
        sources: Addresses,
        targets: Addresses,
        sizes: Addresses,
        stream: int,
        *,
        is_quick: bool = False,
    ) -> None:
        if stream == 0:
            raise CudaError("cuMemcpyBatchAsync: the legacy default stream")
        if not self._device.is_current:
            raise CudaError("cuMemcpyBatchAsync: a stream of another device")
        if len(sources) == 0:
            return
        lists = [
            _numbers_at(column.ctypes.data, len(column)) for column in (sources, targets, sizes)
        ]
        assert all(size > 0 for size in lists[2])
        queue = self._device.streams[stream]
        if is_quick:
            assert len(sources) <= _FEW_COPIES, "the driver would keep the interpreter for long"
            self._require_room(stream, len(sources))
        for source, target, size in zip(*lists, strict=True):
            queue.add(partial(ctypes.memmove, target, source, size))
        if not any(map(self._device.is_pinned, (*lists[0], *lists[1]))):
            # Almost all of it, says the driver's manual: the last bytes may still be in flight.
            with self._device.lock:
                while len(queue.work) > 1:
                    self._device.go_on(preferred=queue)

    def _require_room(self, stream: int, count: int = 1) -> None:
        if stream in self._own_streams:  # only the worker's streams have a limit
            self._device.streams[stream].require_room(count)

    def register_host(self, address: int, size: int) -> None:
        if address in self._device.pinned:
            raise CudaError("cuMemHostRegister: already registered")
        self._device.pinned[address] = size

    def unregister_host(self, address: int) -> None:
        if self._device.pinned.pop(address, None) is None:
            raise CudaError("cuMemHostUnregister: not registered")


class SimulatedKernel:
    """Runs its launches in stream order, as a kernel does. It is its own launcher."""

    device: SimulatedDevice
    all_threads = Threads(132, 512)

    def __init__(self, driver: SimulatedDriver, *_: object) -> None:
        self.device = driver._device

    def launcher(self) -> SimulatedKernel:
        return self

    def launch(
        self, order: Order, entries: memoryview, first_place: int, stream: int, threads: Threads
    ) -> None:
        if not self.device.is_current:
            raise CudaError("cuLaunchKernel: a stream of another device")
        pairs = list(struct.iter_unpack("=II", bytes(entries)))
        assert 0 < len(pairs) <= order.max_entries

        def copy() -> None:
            numbers = _numbers_at(order.columns, 5 * order.num_columns)
            columns = [numbers[column :: order.num_columns] for column in range(order.num_columns)]
            for index, (block, slot) in enumerate(pairs):
                order_in_slots, place = divmod(first_place + index, order.chunk)
                row = order_in_slots if order.is_packed else slot
                for base, step, offset, place_step, size in columns:
                    device = base + block * step
                    other = order.base + row * order.row_bytes + offset + place * place_step
                    assert not (device | other | size) % ALIGNMENT, "the kernel would fault"
                    assert size <= order.largest, "the kernel would leave out the end"
                    source, target = (device, other) if order.is_store else (other, device)
                    ctypes.memmove(target, source, size)

        self.device.streams[stream].require_room()
        self.device.streams[stream].add(copy)
