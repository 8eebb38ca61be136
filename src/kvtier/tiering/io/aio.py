"""Linux native asynchronous I/O: one thread keeps many reads and writes in flight.

The four system calls are made through libc's `syscall`; no library is needed. Docker's default
seccomp profile allows them, but not io_uring. With O_DIRECT on a preallocated file they are as
fast as io_uring. Without O_DIRECT, `submit` waits until the I/O has ended, which is slower.
"""

from __future__ import annotations

import ctypes
import errno
import mmap
import os
import platform
import struct
from collections.abc import Sequence

from kvtier.tiering.base import TierRefused

__all__ = ["AioQueue", "AioUnavailable", "address_of"]

_NUMBERS = {  # io_setup, io_destroy, io_getevents, io_submit
    "x86_64": (206, 207, 208, 209),
    "aarch64": (0, 1, 4, 2),
    "riscv64": (0, 1, 4, 2),
}

_READV, _WRITEV = 7, 8
# data, key, flags, operation, priority, fd, vectors, their number, offset; the rest is not used
_IOCB = struct.Struct("<QIiHhIQQqQII")
_VECTOR_BYTES = 16
_POINTER_BYTES = 8
_EVENT = struct.Struct("<QQqq")

_libc = ctypes.CDLL(None, use_errno=True)


class AioUnavailable(TierRefused):
    """There is no asynchronous I/O on this machine, or the kernel refused to create a queue. The
    message names the reason and the remedy."""


def _syscall(*argtypes: type) -> ctypes._NamedFuncPointer:
    function = _libc["syscall"]  # a new object each time, with a signature of its own
    function.restype = ctypes.c_long
    function.argtypes = (ctypes.c_long, *argtypes)
    return function


_setup = _syscall(ctypes.c_uint, ctypes.c_void_p)
_destroy = _syscall(ctypes.c_ulong)
_getevents = _syscall(
    ctypes.c_ulong, ctypes.c_long, ctypes.c_long, ctypes.c_void_p, ctypes.c_void_p
)
_submit = _syscall(ctypes.c_ulong, ctypes.c_long, ctypes.c_void_p)


def address_of(memory: mmap.mmap | memoryview) -> int:
    """Address of writable memory. It is valid as long as the caller keeps the memory alive."""
    return ctypes.addressof(ctypes.c_char.from_buffer(memory))


class AioQueue:
    """A kernel queue of reads and writes. Used by one thread at a time.

    The caller identifies each read or write by a tag, a number below `depth`. Until `reap` returns
    the tag, the caller must not use it again, and must keep the memory in place.
    """

    def __init__(self, depth: int, max_segments: int) -> None:
        """`depth`: limit on reads and writes in flight. `max_segments`: limit on pieces of memory
        in one read or write. Raises `AioUnavailable`."""
        try:
            self._numbers = _NUMBERS[platform.machine()]
        except KeyError:
            raise AioUnavailable(
                f"asynchronous I/O is not supported on {platform.machine()}: use another tier there"
            ) from None
        self._depth = depth
        self._max_segments = max_segments
        self.num_in_flight = 0
        # Memory shared with the kernel, in this order: control blocks, their vectors, pointers to
        # the control blocks being submitted, and space for events.
        self._vectors_at = depth * _IOCB.size
        self._pointers_at = self._vectors_at + depth * max_segments * _VECTOR_BYTES
        self._events_at = self._pointers_at + depth * _POINTER_BYTES
        self._memory = mmap.mmap(-1, self._events_at + depth * _EVENT.size)
        self._base = address_of(self._memory)
        context = ctypes.c_ulong(0)
        if _setup(self._numbers[0], depth, ctypes.addressof(context)) != 0:
            raise _unavailable(ctypes.get_errno(), depth)
        self._context: int | None = context.value

    def prepare(
        self, tag: int, fd: int, is_write: bool, offset: int, segments: Sequence[int]
    ) -> None:
        """Describe one read or write at `offset`. `segments`: address, length, address, length, ...
        of the pieces of memory, in file order."""
        memory, base = self._memory, self._base
        vectors_at = self._vectors_at + tag * self._max_segments * _VECTOR_BYTES
        struct.pack_into(f"<{len(segments)}Q", memory, vectors_at, *segments)
        _IOCB.pack_into(
            memory, tag * _IOCB.size, tag, 0, 0, _WRITEV if is_write else _READV, 0, fd,
            base + vectors_at, len(segments) // 2, offset, 0, 0, 0,
        )  # fmt: skip

    def submit(self, tags: Sequence[int]) -> tuple[int, int]:
        """Start the prepared reads and writes with these tags, in order. Returns how many were
        started, and an error number: 0 unless the kernel refused the first one, so that none was
        started. If fewer were started than given, submit the others again."""
        base = self._base
        pointers = [base + tag * _IOCB.size for tag in tags]
        struct.pack_into(f"<{len(tags)}Q", self._memory, self._pointers_at, *pointers)
        while True:
            count: int = _submit(
                self._numbers[3], self._context, len(tags), base + self._pointers_at
            )
            if count >= 0:
                self.num_in_flight += count
                return count, 0
            error = ctypes.get_errno()
            if error != errno.EINTR:
                return 0, error

    def reap(self, at_least: int = 1) -> list[tuple[int, int]]:
        """Wait until `at_least` reads and writes have ended, or all that are in flight if there are
        fewer. Returns (tag, bytes moved or negative error number) for each that has ended. A signal
        may end the wait early, with fewer."""
        memory, base = self._memory, self._base
        at_least = min(at_least, self.num_in_flight)
        if not at_least:
            return []
        while True:
            count: int = _getevents(
                self._numbers[2], self._context, at_least, self._depth, base + self._events_at, None
            )
            if count >= at_least:
                break
            error = ctypes.get_errno()
            if count < 0 and error != errno.EINTR:
                raise OSError(error, os.strerror(error))
            if count > 0:  # a signal ended the wait
                break
        self.num_in_flight -= count
        events = memory[self._events_at : self._events_at + count * _EVENT.size]
        return [(tag, result) for tag, _, result, _ in _EVENT.iter_unpack(events)]

    def close(self) -> None:
        """Wait until everything in flight has ended, and free the queue. Further calls do
        nothing."""
        if self._context is not None:
            _destroy(self._numbers[1], self._context)
            self._context = None


def _unavailable(error: int, depth: int) -> AioUnavailable:
    reason = os.strerror(error)
    if error == errno.EAGAIN:
        return AioUnavailable(
            f"the kernel has no room for {depth} more asynchronous reads and writes ({reason}): "
            "raise fs.aio-max-nr (sysctl), or configure fewer I/O threads"
        )
    return AioUnavailable(
        f"the kernel refuses asynchronous I/O ({reason}): allow io_setup, io_submit, "
        "io_getevents and io_destroy in the container's seccomp profile"
    )
