"""Where the worker's tests run: in host memory, on a simulated device, on a real one."""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from functools import cache
from typing import Any

import pytest
import torch

from kvtier.base import CanonicalKVCaches, OffloadingWorker
from kvtier.cpu import gpu_worker
from kvtier.cpu.cuda import device_memory, page_kernel, streams, unpinned
from kvtier.cpu.cuda.copies import Copies
from kvtier.cpu.cuda.copy_paths import Path as CopyPath
from kvtier.cpu.cuda.driver import CudaDriver, cuda_driver
from kvtier.cpu.cuda.page_table import Grid
from kvtier.cpu.gpu_worker import GPUOffloadingWorker
from kvtier.cpu.host_worker import HostOffloadingWorker
from kvtier.cpu.lane import Lane
from kvtier.cpu.shared_offload_region import SharedOffloadRegion
from tests.gpu.cache_layout import Bytes
from tests.gpu.memmove_copies import MemmoveCopies
from tests.gpu.simulated_cuda import (
    SimulatedDevice,
    SimulatedDriver,
    SimulatedKernel,
    SimulatedTorch,
)

NO_DEVICE = "no CUDA device: run `make test-gpu` on a machine with one"

_DELAY_CYCLES = 50_000_000
"""Some 25 ms of an H200: long against any copy here that would not wait for it."""


class Place:
    """A device, and a worker for it: host memory, and the worker for caches there.

    What is computed there is done at once.
    """

    device = "cpu"
    choose: Callable[[Grid], CopyPath] | None = None
    """How a worker's streams copy, where it has any and is not to choose itself."""

    def open_worker(
        self, caches: CanonicalKVCaches, region: SharedOffloadRegion, blocks_per_chunk: int
    ) -> OffloadingWorker:
        return HostOffloadingWorker(caches, region, blocks_per_chunk)

    def use(self, *paths: CopyPath) -> None:
        """Have the jobs of workers from now on copied in these ways, in turn."""
        turns = itertools.cycle(paths)
        self.choose = lambda *_: next(turns)

    def _open_copies(self, device: Any, region: SharedOffloadRegion, undo: ExitStack) -> Copies:
        return gpu_worker.open_pinned(device, region, undo, self.choose)

    def upload(self, memory: Bytes) -> Any:
        """A copy on the device, as a flat tensor of bytes."""
        return torch.from_numpy(memory.copy()).to(self.device)

    def download(self, tensor: Any) -> Bytes:
        """What is in it when all that was given to the compute streams is done."""
        self.finish_compute()
        array: Bytes = tensor.cpu().numpy()
        return array.copy()

    def compute(self, work: Callable[[], object]) -> None:
        """Give work to the current stream."""
        work()

    def delay(self) -> None:
        """Make all that the current stream is given from now on begin late."""

    def held(self) -> AbstractContextManager[None]:
        """No delay ends within, where that can be had."""
        return nullcontext()

    def await_waiter(self) -> None:
        """Return when a thread waits for what is held, where that can be had."""

    def mark(self) -> Any:
        """An event in the current stream that knows its time, where there are streams."""
        raise NotImplementedError

    def finish_compute(self) -> None:
        """Return when all compute is done."""

    def other_stream(self) -> AbstractContextManager[Any]:
        """Another compute stream is the current one."""
        return nullcontext()

    def driver(self) -> Any:
        """What a worker asks for pinned memory."""
        return cuda_driver()

    def stream(self, handle: int) -> Any:
        """One of a worker's."""
        return torch.cuda.ExternalStream(handle)


class CPUPlace(Place):
    """The CUDA worker with copies within host memory."""

    def __init__(self) -> None:
        self.copies = MemmoveCopies()

    def open_worker(
        self, caches: CanonicalKVCaches, region: SharedOffloadRegion, blocks_per_chunk: int
    ) -> OffloadingWorker:
        self.copies = MemmoveCopies(is_held=self.copies.is_held)
        return GPUOffloadingWorker(caches, region, blocks_per_chunk, open_copies=self.copies.open)


class SimulatedPlace(Place):
    """The CUDA worker with its streams, events and lists, on a simulated device."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self._seeds = itertools.count()
        self._patch = patch
        self._new_device()

    def open_worker(
        self, caches: CanonicalKVCaches, region: SharedOffloadRegion, blocks_per_chunk: int
    ) -> OffloadingWorker:
        self._new_device()
        return GPUOffloadingWorker(caches, region, blocks_per_chunk, open_copies=self._open_copies)

    def driver(self) -> Any:
        return self._driver

    def stream(self, handle: int) -> Any:
        return self.simulated.streams[handle]

    def compute(self, work: Callable[[], object]) -> None:
        self.simulated.current_stream.add(work)

    def delay(self) -> None:
        self.simulated.current_stream.add(None)

    def held(self) -> AbstractContextManager[None]:
        return self.simulated.held()

    def await_waiter(self) -> None:
        self.simulated.await_waiter()

    def mark(self) -> Any:
        return self.simulated.current_stream.record_event()

    def finish_compute(self) -> None:
        # Others are current for a while only, and those that are not the worker's are few.
        for stream in [self.simulated.default_stream, *self._others]:
            stream.synchronize()

    @contextmanager
    def other_stream(self) -> Iterator[Any]:
        self._others.append(self.simulated.new_stream())
        with self._torch.cuda.stream(self._others[-1]):
            yield

    def _new_device(self) -> None:
        """A worker each: what one left undone is none of the next one's business."""
        self.simulated = SimulatedDevice(next(self._seeds))
        self._others: list[Any] = []
        self._torch = SimulatedTorch(self.simulated)
        self._driver = driver = SimulatedDriver(self.simulated)
        for module in (device_memory, gpu_worker, streams, unpinned):
            self._patch.setattr(module, "torch", self._torch)
        self._patch.setattr(gpu_worker, "cuda_driver", lambda: driver)
        self._patch.setattr(gpu_worker, "PageKernel", SimulatedKernel)


class CudaPlace(Place):
    """The real thing."""

    device = "cuda:0"

    def __init__(self) -> None:
        self._others: list[Any] = []
        _warm_up()

    def open_worker(
        self, caches: CanonicalKVCaches, region: SharedOffloadRegion, blocks_per_chunk: int
    ) -> OffloadingWorker:
        return GPUOffloadingWorker(caches, region, blocks_per_chunk, open_copies=self._open_copies)

    def upload(self, memory: Bytes) -> Any:
        tensor = super().upload(memory)
        torch.cuda.synchronize()
        return tensor

    def delay(self) -> None:
        torch.cuda._sleep(_DELAY_CYCLES)

    def mark(self) -> Any:
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def finish_compute(self) -> None:
        # Not the whole device: the worker's streams are to be waited for by the worker alone.
        for stream in (torch.cuda.current_stream(), *self._others):
            stream.synchronize()

    @contextmanager
    def other_stream(self) -> Iterator[Any]:
        self._others.append(torch.cuda.Stream())
        with torch.cuda.stream(self._others[-1]):
            yield


@cache
def _warm_up() -> None:
    """Have all kernels of the tests loaded: the first launch of one can wait for the device."""
    memory = torch.zeros(2, 1 << 16, dtype=torch.uint8, device=CudaPlace.device)
    memory[0].fill_(1)
    memory[1].copy_(memory[0])
    torch.cuda._sleep(1000)
    torch.cuda.synchronize()


def put_off_lanes(patch: pytest.MonkeyPatch, seconds: float) -> None:
    """Have the threads that copy, or hand jobs over, take a while: jobs queue up."""
    put = Lane.put

    def put_off(lane: Lane, work: Callable[[], None]) -> None:
        def work_late() -> None:
            time.sleep(seconds)
            work()

        put(lane, work_late)

    patch.setattr(Lane, "put", put_off)


def begin_at_once(patch: pytest.MonkeyPatch) -> None:
    """Have all jobs begun by the thread that submits them, as large ones are."""
    patch.setattr(streams, "_SMALL_JOB_PAGES", 0)


def has_cuda() -> bool:
    return bool(torch.cuda.is_available())


def finish_everything(place: Place) -> None:
    """Have all done that the device has been given by anyone, the worker included."""
    if isinstance(place, CudaPlace):
        torch.cuda.synchronize()
    elif isinstance(place, SimulatedPlace):
        for stream in place.simulated.streams:
            stream.synchronize()


_DEVICE_CALLS = {
    "copy_batch": (CudaDriver, SimulatedDriver),
    "register_host": (CudaDriver, SimulatedDriver),
    "allocate": (CudaDriver, SimulatedDriver),
    "upload": (CudaDriver, SimulatedDriver),
    "create_stream": (CudaDriver, SimulatedDriver),
    "create_event": (CudaDriver, SimulatedDriver),
    "launch": (page_kernel.Launcher, SimulatedKernel),
}


def refuse_device_call(
    patch: pytest.MonkeyPatch, name: str, error: BaseException, *, after: int = 0
) -> None:
    """Have a call of the driver or the kernel raise, at once or after so many more.

    Of the real ones, and of those simulated.
    """
    calls = itertools.count()

    def refuse(call: Callable[..., Any], *arguments: Any, **options: Any) -> Any:
        if next(calls) >= after:
            raise error
        return call(*arguments, **options)

    for owner in _DEVICE_CALLS[name]:
        call = getattr(owner, name)
        patch.setattr(owner, name, lambda *args, call=call, **kw: refuse(call, *args, **kw))


class LaunchCount:
    """How often the kernel was launched since this was made, and how."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self.count = 0
        self.threads: set[page_kernel.Threads] = set()
        self.streams: set[int] = set()
        for kernel in (page_kernel.Launcher, SimulatedKernel):
            self._watch(patch, kernel)

    def _watch(self, patch: pytest.MonkeyPatch, kernel: Any) -> None:
        launch = kernel.launch

        def counted(
            kernel: Any, order: Any, entries: Any, first_place: int, stream: int, threads: Any
        ) -> None:
            if order.num_columns > 0:  # one of none is how it is loaded
                self.count += 1
                self.threads.add(threads)
                self.streams.add(stream)
            launch(kernel, order, entries, first_place, stream, threads)

        patch.setattr(kernel, "launch", counted)


class Allocations(set[int]):
    """Addresses of the memory that the driver has given out since this was made."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        super().__init__()
        for driver in (CudaDriver, SimulatedDriver):
            self._watch(patch, driver)

    def _watch(self, patch: pytest.MonkeyPatch, driver: Any) -> None:
        allocate, free = driver.allocate, driver.free

        def noted(driver: Any, num_bytes: int) -> int:
            address: int = allocate(driver, num_bytes)
            self.add(address)
            return address

        def forgotten(driver: Any, address: int) -> None:
            free(driver, address)
            self.remove(address)

        patch.setattr(driver, "allocate", noted)
        patch.setattr(driver, "free", forgotten)


class BatchStreams(set[int]):
    """The streams that the copy engines were given pages in since this was made."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        super().__init__()
        for driver in (CudaDriver, SimulatedDriver):
            self._watch(patch, driver)

    def _watch(self, patch: pytest.MonkeyPatch, driver: Any) -> None:
        copy_batch = driver.copy_batch

        def noted(
            driver: Any, sources: Any, targets: Any, sizes: Any, stream: int, **options: bool
        ) -> None:
            self.add(stream)
            copy_batch(driver, sources, targets, sizes, stream, **options)

        patch.setattr(driver, "copy_batch", noted)
