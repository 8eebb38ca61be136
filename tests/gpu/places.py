"""The places where the worker's tests run: host memory, a simulated device, a real one."""

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
from kvtier.cpu.cuda import copies, page_kernel, resources, streams
from kvtier.cpu.cuda.copies import Copies, CopyPath
from kvtier.cpu.cuda.driver import CudaDriver, cuda_driver
from kvtier.cpu.cuda.page_table import Grid
from kvtier.cpu.gpu_worker import GPUOffloadingWorker
from kvtier.cpu.host_worker import HostOffloadingWorker
from kvtier.cpu.job_thread import JobThread
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
"""Some 25 ms on an H200: much longer than a copy here that does not wait for it."""


class Place:
    """A device and a worker for it. This class: host memory, and the worker for caches there.
    Compute is done at once."""

    device = "cpu"
    choose: Callable[[Grid], CopyPath] | None = None
    """The paths of a worker's streams; None: the worker chooses."""

    def open_worker(
        self, caches: CanonicalKVCaches, region: SharedOffloadRegion, blocks_per_chunk: int
    ) -> OffloadingWorker:
        return HostOffloadingWorker(caches, region, blocks_per_chunk)

    def use(self, *paths: CopyPath) -> None:
        """Make workers copy jobs by these paths, in turn, from now on."""
        turns = itertools.cycle(paths)
        self.choose = lambda *_: next(turns)

    def _open_copies(self, device: Any, region: SharedOffloadRegion, undo: ExitStack) -> Copies:
        return gpu_worker.open_pinned(device, region, undo, self.choose)

    def upload(self, memory: Bytes) -> Any:
        """Copy bytes to the device, as a flat byte tensor."""
        return torch.from_numpy(memory.copy()).to(self.device)

    def download(self, tensor: Any) -> Bytes:
        """Its contents after all work on the compute streams."""
        self.finish_compute()
        array: Bytes = tensor.cpu().numpy()
        return array.copy()

    def compute(self, work: Callable[[], object]) -> None:
        """Put work on the current stream."""
        work()

    def delay(self) -> None:
        """Delay all work that the current stream gets from now on."""

    def held(self) -> AbstractContextManager[None]:
        """Within it, no delay ends, where the place supports that."""
        return nullcontext()

    def await_waiter(self) -> None:
        """Return when a thread waits for held work, where the place supports that."""

    def num_queued(self) -> int:
        """Pieces of work in the streams' queues; 0 where the place cannot tell."""
        return 0

    def mark(self) -> Any:
        """A timed event on the current stream, if there are streams."""
        raise NotImplementedError

    def finish_compute(self) -> None:
        """Return when all compute has ended."""

    def other_stream(self) -> AbstractContextManager[Any]:
        """Within it, another compute stream is the current one."""
        return nullcontext()

    def driver(self) -> Any:
        """The driver of a worker with pinned memory."""
        return cuda_driver()

    def stream(self, handle: int) -> Any:
        """A stream of a worker."""
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

    def num_queued(self) -> int:
        return sum(len(stream.work) for stream in self.simulated.streams)

    def mark(self) -> Any:
        return self.simulated.current_stream.record_event()

    def finish_compute(self) -> None:
        # Other streams are current for a short time only, and few are not the worker's.
        for stream in [self.simulated.default_stream, *self._others]:
            stream.synchronize()

    @contextmanager
    def other_stream(self) -> Iterator[Any]:
        self._others.append(self.simulated.new_stream())
        with self._torch.cuda.stream(self._others[-1]):
            yield

    def _new_device(self) -> None:
        """One worker at a time: the device of the former one is replaced."""
        self.simulated = SimulatedDevice(next(self._seeds))
        self._others: list[Any] = []
        self._torch = SimulatedTorch(self.simulated)
        self._driver = driver = SimulatedDriver(self.simulated)
        for module in (copies, gpu_worker, resources, streams):
            self._patch.setattr(module, "torch", self._torch)
        self._patch.setattr(gpu_worker, "cuda_driver", lambda: driver)
        self._patch.setattr(gpu_worker, "PageKernel", SimulatedKernel)


class CudaPlace(Place):
    """A real CUDA device."""

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
        # Not the whole device: only the worker may wait for its streams.
        for stream in (torch.cuda.current_stream(), *self._others):
            stream.synchronize()

    @contextmanager
    def other_stream(self) -> Iterator[Any]:
        self._others.append(torch.cuda.Stream())
        with torch.cuda.stream(self._others[-1]):
            yield


@cache
def _warm_up() -> None:
    """Load all kernels of the tests: the first launch of a kernel may wait for the device."""
    memory = torch.zeros(2, 1 << 16, dtype=torch.uint8, device=CudaPlace.device)
    memory[0].fill_(1)
    memory[1].copy_(memory[0])
    torch.cuda._sleep(1000)
    torch.cuda.synchronize()


def put_off_threads(patch: pytest.MonkeyPatch, seconds: float) -> None:
    """Delay every job of job threads, so that jobs queue up."""
    put = JobThread.put

    def put_off(thread: JobThread, work: Callable[[], None]) -> None:
        def work_late() -> None:
            time.sleep(seconds)
            work()

        put(thread, work_late)

    patch.setattr(JobThread, "put", put_off)


def begin_at_once(patch: pytest.MonkeyPatch) -> None:
    """Make the submitting thread begin all jobs, as it does large ones."""
    patch.setattr(streams, "_SMALL_JOB_PAGES", 0)


def has_cuda() -> bool:
    return bool(torch.cuda.is_available())


def finish_everything(place: Place) -> None:
    """Return when the device has done all its work, the worker's included."""
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
    """Make a call of the driver or the kernel raise, at once or after some calls; real and
    simulated ones."""
    calls = itertools.count()

    def refuse(call: Callable[..., Any], *arguments: Any, **options: Any) -> Any:
        if next(calls) >= after:
            raise error
        return call(*arguments, **options)

    for owner in _DEVICE_CALLS[name]:
        call = getattr(owner, name)
        patch.setattr(owner, name, lambda *args, call=call, **kw: refuse(call, *args, **kw))


class LaunchCount:
    """The launches of the kernel since this was made."""

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
            if order.num_columns > 0:  # a launch without blocks loads the code
                self.count += 1
                self.threads.add(threads)
                self.streams.add(stream)
            launch(kernel, order, entries, first_place, stream, threads)

        patch.setattr(kernel, "launch", counted)


class Allocations(set[int]):
    """Addresses that the driver has allocated since this was made."""

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
    """The streams on which copy engines were used since this was made."""

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
