"""The functions of NVIDIA's driver that torch does not offer.

They are called through ctypes, which passes arrays of addresses without conversion. NVIDIA's own
Python bindings take lists, with one object per page.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from typing import Any

import numpy as np
from numpy.typing import NDArray

__all__ = ["CudaDriver", "CudaError", "CudaUnavailable", "cuda_driver"]

Addresses = NDArray[np.uint64]

_BATCH_SINCE = 12_080
"""CUDA version whose signature of `cuMemcpyBatchAsync` is used. Later drivers have it, too."""
_STREAM_ORDER = 1
"""The driver reads sources in stream order, not earlier."""
_PORTABLE_AND_MAPPED = 0x01 | 0x02
_RELAXED = 2
"""Capture mode of a thread that ignores the captures of other threads."""
_SLEEP, _NO_TIMES = 0x01, 0x02
_NOT_READY = 600
_LEGACY_STREAM = 0
_NON_BLOCKING = 0x01
"""Flag of a stream that does not wait for the legacy default stream, nor the other way round."""


class CudaUnavailable(RuntimeError):
    """There is no driver, or it is too old."""


class CudaError(RuntimeError):
    """A call of the driver failed."""


class _CopyAttributes(ctypes.Structure):
    _fields_ = (
        ("source_access_order", ctypes.c_int),
        ("source_hint", ctypes.c_int * 2),
        ("target_hint", ctypes.c_int * 2),
        ("flags", ctypes.c_uint),
    )


class CudaDriver:
    """The driver. Any thread whose current context is torch's may call it.

    Every method raises `CudaError` if the driver's call fails. Calls through `_quick` keep the
    interpreter lock, because getting it back from a busy thread can take milliseconds, longer than
    the call itself.
    """

    def __init__(self) -> None:
        """Raises `CudaUnavailable`."""
        try:
            self._library = ctypes.CDLL("libcuda.so.1")
            self._quick = ctypes.PyDLL("libcuda.so.1")
        except OSError as error:
            raise CudaUnavailable(
                f"no NVIDIA driver on this machine (a container needs --gpus all): {error}"
            ) from error
        self._copy_batch, self._quick_copy_batch = self._find_copy_batch()
        self._attributes = _CopyAttributes(source_access_order=_STREAM_ORDER)
        self._first_index = ctypes.c_size_t(0)

    def copy_batch(
        self,
        sources: Addresses,
        targets: Addresses,
        sizes: Addresses,
        stream: int,
        *,
        is_quick: bool = False,
    ) -> None:
        """Copy pages with the copy engines, in stream order.

        The arrays must be contiguous; the caller may reuse them after the call. With memory that is
        not pinned, the call returns when almost everything is copied. `stream` must not be the
        legacy default stream. `is_quick`: keep the interpreter lock. Use it only for a few pages in
        pinned memory, when the stream has room for them, so that the driver does not block.
        """
        if len(sources) == 0:
            return
        failed_at = ctypes.c_size_t()
        copy_batch = self._quick_copy_batch if is_quick else self._copy_batch
        self._check(
            copy_batch(
                targets.ctypes.data,
                sources.ctypes.data,
                sizes.ctypes.data,
                len(sources),
                ctypes.byref(self._attributes),
                ctypes.byref(self._first_index),
                1,
                ctypes.byref(failed_at),
                stream,
            ),
            "cuMemcpyBatchAsync",
        )

    def register_host(self, address: int, size: int) -> None:
        """Pin host memory, and map it for the device at the same address."""
        self._check(
            self._library.cuMemHostRegister_v2(
                ctypes.c_void_p(address), ctypes.c_size_t(size), _PORTABLE_AND_MAPPED
            ),
            "cuMemHostRegister",
        )
        try:
            self._require_same_address(address)
        except CudaError:
            self.unregister_host(address)
            raise

    def _require_same_address(self, address: int) -> None:
        mapped = ctypes.c_uint64()
        self._check(
            self._library.cuMemHostGetDevicePointer_v2(
                ctypes.byref(mapped), ctypes.c_void_p(address), 0
            ),
            "cuMemHostGetDevicePointer",
        )
        if mapped.value != address:
            raise CudaError("this device maps host memory at other addresses than the host does")

    def unregister_host(self, address: int) -> None:
        self._check(
            self._library.cuMemHostUnregister(ctypes.c_void_p(address)), "cuMemHostUnregister"
        )

    def allocate(self, num_bytes: int) -> int:
        """Allocate memory of the current device. Returns its address."""
        address = ctypes.c_uint64()
        self._check(
            self._library.cuMemAlloc_v2(ctypes.byref(address), ctypes.c_size_t(num_bytes)),
            "cuMemAlloc",
        )
        return address.value

    def free(self, address: int) -> None:
        """Free memory. May wait for the device."""
        self._check(self._library.cuMemFree_v2(ctypes.c_uint64(address)), "cuMemFree")

    def upload(self, content: memoryview, address: int) -> None:
        """Write to the device's memory. Returns when all streams see it."""
        held = (ctypes.c_char * content.nbytes).from_buffer_copy(content)
        self._check(
            self._library.cuMemcpyHtoD_v2(
                ctypes.c_uint64(address), held, ctypes.c_size_t(content.nbytes)
            ),
            "cuMemcpyHtoD",
        )
        self.synchronize_stream(_LEGACY_STREAM)

    def create_stream(self, priority: int) -> int:
        """Create a stream on the current device; priority -1 is higher than 0. Torch's own streams
        are not used, because they come from a pool and may have a second user."""
        stream = ctypes.c_void_p()
        self._check(
            self._library.cuStreamCreateWithPriority(
                ctypes.byref(stream), _NON_BLOCKING, ctypes.c_int(priority)
            ),
            "cuStreamCreateWithPriority",
        )
        assert stream.value is not None
        return stream.value

    def destroy_stream(self, stream: int) -> None:
        """Destroy a stream. Work that is already on it still runs to its end."""
        self._check(self._library.cuStreamDestroy_v2(ctypes.c_void_p(stream)), "cuStreamDestroy")

    def wait_event(self, stream: int, event: int) -> None:
        """Make a stream wait for the last record of an event."""
        self._check(
            self._quick.cuStreamWaitEvent(ctypes.c_void_p(stream), ctypes.c_void_p(event), 0),
            "cuStreamWaitEvent",
        )

    def synchronize_stream(self, stream: int) -> None:
        """Return when all work on the stream has ended."""
        with self.beside_captures():
            self._check(
                self._library.cuStreamSynchronize(ctypes.c_void_p(stream)), "cuStreamSynchronize"
            )

    @contextmanager
    def beside_captures(self) -> Iterator[None]:
        """Let the calling thread query events, and wait for events and streams, while it or another
        thread of this process captures a CUDA graph. Outside this context,
        such a query or wait fails, and so does the capture.

        Events and streams that are used in this context must not belong to the graph.
        """
        mode = ctypes.c_int(_RELAXED)
        self._exchange_capture_mode(mode)
        try:
            yield
        finally:
            self._exchange_capture_mode(mode)

    def _exchange_capture_mode(self, mode: ctypes.c_int) -> None:
        """Set the thread's mode, and write its former mode to `mode`."""
        self._check(
            self._quick.cuThreadExchangeStreamCaptureMode(ctypes.byref(mode)),
            "cuThreadExchangeStreamCaptureMode",
        )

    def require_no_capture(self, stream: int) -> None:
        """Raise `CudaError` if the stream is being captured into a graph."""
        status = ctypes.c_int()
        self._check(
            self._quick.cuStreamIsCapturing(ctypes.c_void_p(stream), ctypes.byref(status)),
            "cuStreamIsCapturing",
        )
        if status.value != 0:
            raise CudaError(
                "the current stream is being captured into a CUDA graph: a copy cannot wait for "
                "work that does not run yet. Submit jobs before the capture or after it"
            )

    def create_event(self, *, is_timed: bool) -> int:
        """Create an event of the current device. Threads that wait for it sleep."""
        event = ctypes.c_void_p()
        flags = _SLEEP if is_timed else _SLEEP | _NO_TIMES
        self._check(self._library.cuEventCreate(ctypes.byref(event), flags), "cuEventCreate")
        assert event.value is not None
        return event.value

    def destroy_event(self, event: int) -> None:
        """Destroy an event. Streams that wait for it still wait until it is reached."""
        self._check(self._quick.cuEventDestroy_v2(ctypes.c_void_p(event)), "cuEventDestroy")

    def record_event(self, event: int, stream: int) -> None:
        """Record an event after the work that is on a stream."""
        self._check(
            self._quick.cuEventRecord(ctypes.c_void_p(event), ctypes.c_void_p(stream)),
            "cuEventRecord",
        )

    def is_reached(self, event: int) -> bool:
        """True if the last record of an event is reached, or if it was never recorded."""
        with self.beside_captures():
            code = self._quick.cuEventQuery(ctypes.c_void_p(event))
        if code == _NOT_READY:
            return False
        self._check(code, "cuEventQuery")
        return True

    def synchronize_event(self, event: int) -> None:
        """Return when the last record of an event is reached."""
        with self.beside_captures():
            self._check(
                self._library.cuEventSynchronize(ctypes.c_void_p(event)), "cuEventSynchronize"
            )

    def seconds_between(self, start: int, end: int) -> float:
        """Seconds between two events that were created with `is_timed` and are reached."""
        milliseconds = ctypes.c_float()
        with self.beside_captures():
            self._check(
                self._quick.cuEventElapsedTime(
                    ctypes.byref(milliseconds), ctypes.c_void_p(start), ctypes.c_void_p(end)
                ),
                "cuEventElapsedTime",
            )
        return milliseconds.value / 1e3

    def load_module(self, image: bytes) -> ctypes.c_void_p:
        """Load machine code for this device. It stays loaded."""
        module = ctypes.c_void_p()
        self._check(self._library.cuModuleLoadData(ctypes.byref(module), image), "cuModuleLoadData")
        return module

    def find_function(self, module: ctypes.c_void_p, name: str) -> ctypes.c_void_p:
        """Find a kernel in a module."""
        function = ctypes.c_void_p()
        self._check(
            self._library.cuModuleGetFunction(ctypes.byref(function), module, name.encode()),
            "cuModuleGetFunction",
        )
        return function

    def launch(
        self,
        function: ctypes.c_void_p,
        blocks: int,
        threads: int,
        stream: int,
        arguments: Any,
    ) -> None:
        """Launch a kernel. `arguments`: a ctypes array of pointers to the kernel's arguments. The
        stream must have room for the launch, so that the driver does not block."""
        self._check(
            self._quick.cuLaunchKernel(
                function,
                *(blocks, 1, 1),
                *(threads, 1, 1),
                0,
                ctypes.c_void_p(stream),
                arguments,
                None,
            ),
            "cuLaunchKernel",
        )

    def _find_copy_batch(self) -> tuple[Callable[..., int], Callable[..., int]]:
        """`cuMemcpyBatchAsync` twice: one releases the interpreter lock, one keeps it."""
        address, found = ctypes.c_void_p(), ctypes.c_int()
        name, flags = b"cuMemcpyBatchAsync", ctypes.c_uint64(0)
        find = getattr(self._library, "cuGetProcAddress_v2", None)
        if (
            find is None
            or find(name, ctypes.byref(address), _BATCH_SINCE, flags, ctypes.byref(found))
            or not address.value
        ):
            raise CudaUnavailable(
                "the NVIDIA driver has no cuMemcpyBatchAsync: it came with CUDA 12.8. Install a "
                "driver of release 570 or later"
            )
        pointer, size = ctypes.c_void_p, ctypes.c_size_t
        types = (pointer, pointer, pointer, size, pointer, pointer, size, pointer, pointer)
        return (
            ctypes.CFUNCTYPE(ctypes.c_int, *types)(address.value),
            ctypes.PYFUNCTYPE(ctypes.c_int, *types)(address.value),
        )

    def _check(self, code: int, call: str) -> None:
        if code == 0:
            return
        name, text = ctypes.c_char_p(), ctypes.c_char_p()
        self._library.cuGetErrorName(code, ctypes.byref(name))
        self._library.cuGetErrorString(code, ctypes.byref(text))
        raise CudaError(
            f"{call}: {(name.value or b'unknown error').decode()} ({code}), "
            f"{(text.value or b'').decode()}"
        )


@cache
def cuda_driver() -> CudaDriver:
    """The driver of this process. Raises `CudaUnavailable`."""
    return CudaDriver()
