"""Linux native asynchronous I/O: many reads and writes under way at once from one thread.

Spoken to directly, through libc's `syscall`: five calls need no library. Unlike io_uring it is
allowed inside containers with Docker's default seccomp profile, and with O_DIRECT on a
preallocated file it reaches the same speed. Without O_DIRECT a call to `submit` waits for the I/O,
which is right, only slower.
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
# data, key, flags, operation, priority, fd, vectors, their number, offset, and nothing
_IOCB = struct.Struct("<QIiHhIQQqQII")
_VECTOR_BYTES = 16
_POINTER_BYTES = 8
_EVENT = struct.Struct("<QQqq")

_libc = ctypes.CDLL(None, use_errno=True)


class AioUnavailable(TierRefused):
    """The kernel does not give us a queue; says why, and the remedy."""


def _syscall(*argtypes: type) -> ctypes._NamedFuncPointer:
    function = _libc["syscall"]  # a function of its own for each signature
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
    """Where writable memory lies. It must be kept alive by whoever uses the address."""
    return ctypes.addressof(ctypes.c_char.from_buffer(memory))


class AioQueue:
    """A queue of reads and writes. One thread at a time.

    The caller numbers what it submits by tags below `depth`, and does not use a tag again before
    it has come back. Memory handed over must stay where it is until then.
    """

    def __init__(self, depth: int, max_segments: int) -> None:
        """`max_segments`: pieces of memory that one read or write is scattered over, at most."""
        try:
            self._numbers = _NUMBERS[platform.machine()]
        except KeyError:
            raise AioUnavailable(
                f"asynchronous I/O is not known on {platform.machine()}: use another tier there"
            ) from None
        self._depth = depth
        self._max_segments = max_segments
        self.num_in_flight = 0
        # The kernel is given addresses inside this: control blocks, their vectors, pointers to
        # those being submitted, and room for events.
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
        """Describe one read or write at `offset`, into or out of several pieces of memory in turn:
        address and length of the first, of the second, and so on."""
        memory, base = self._memory, self._base
        vectors_at = self._vectors_at + tag * self._max_segments * _VECTOR_BYTES
        struct.pack_into(f"<{len(segments)}Q", memory, vectors_at, *segments)
        _IOCB.pack_into(
            memory, tag * _IOCB.size, tag, 0, 0, _WRITEV if is_write else _READV, 0, fd,
            base + vectors_at, len(segments) // 2, offset, 0, 0, 0,
        )  # fmt: skip

    def submit(self, tags: Sequence[int]) -> tuple[int, int]:
        """Start what was prepared under these tags. Returns how many of the first were started,
        and the error number for which the next one was refused, or 0."""
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
        """What has ended: (tag, bytes moved or the negative error number). Waits until there are
        so many; if nothing is in flight, there is nothing to wait for."""
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
            if count > 0:  # a signal came
                break
        self.num_in_flight -= count
        events = memory[self._events_at : self._events_at + count * _EVENT.size]
        return [(tag, result) for tag, _, result, _ in _EVENT.iter_unpack(events)]

    def close(self) -> None:
        """Waits for what is in flight. Once more changes nothing."""
        if self._context is not None:
            _destroy(self._numbers[1], self._context)
            self._context = None


def _unavailable(error: int, depth: int) -> AioUnavailable:
    reason = os.strerror(error)
    if error == errno.EAGAIN:
        return AioUnavailable(
            f"the kernel has no room for {depth} more asynchronous reads and writes ({reason}): "
            "raise fs.aio-max-nr (sysctl), or give fewer threads"
        )
    return AioUnavailable(
        f"the kernel refuses asynchronous I/O ({reason}): allow io_setup, io_submit, "
        "io_getevents and io_destroy in the container's seccomp profile"
    )
