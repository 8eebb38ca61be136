"""The memory that an engine's scheduler and ranks share."""

from __future__ import annotations

import ctypes
import errno
import gc
import logging
import mmap
import os
import weakref
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, closing, suppress

import numpy as np
from numpy.typing import NDArray

from kvtier.cpu.buffer_holders import describe_holders
from kvtier.cpu.notice_board import NoticeBoard
from kvtier.cpu.region_file import RegionFile, RegionShape

__all__ = ["SharedOffloadRegion"]

logger = logging.getLogger(__name__)

_MADV_POPULATE_WRITE = 23  # since Linux 5.14; Python's mmap module does not define it
_PIECE_BYTES = 1 << 26
_MAX_THREADS = 8

# Not mmap.madvise, which keeps the GIL, so that threads would run one after the other.
_libc = ctypes.CDLL(None, use_errno=True)
_libc.madvise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)


class SharedOffloadRegion:
    """The slots of the primary tier, in one mapping that every process of the engine shares.

    A slot is a row of `kv_bytes_per_block` bytes. Rank r owns one cell of every row: the
    `cpu_page_size` bytes from byte `r * cpu_page_size` on. Bytes that no rank owns are zero. A new
    region is all zero, so it never shows bytes of an earlier engine, even with the same id.

    All processes of the engine construct it, in any order and at the same time; the first one
    makes the file. `rank=None` is the scheduler, which has no cell. Each process calls the methods
    from one thread; any thread may use the memory.

    When the constructor returns, all memory is reserved and this process's part of it is mapped, so
    no later access fails or waits for a page fault. The constructor raises `ValueError` for
    impossible arguments and `NotEnoughMemory` if there is no room, and then leaves nothing behind.
    """

    def __init__(
        self,
        engine_id: str,
        num_blocks: int,
        rank: int | None,
        kv_bytes_per_block: int,
        cpu_page_size: int,
        *,
        directory: str = "/dev/shm",
    ) -> None:
        shape = RegionShape(num_blocks, kv_bytes_per_block, cpu_page_size)
        _require_possible(shape, rank)
        self.engine_id = engine_id
        self.num_blocks = num_blocks
        self.rank = rank
        self.row_bytes = kv_bytes_per_block
        self.cpu_page_size = cpu_page_size
        self._cell_bytes_used = 0
        self._views: list[memoryview] = []
        with ExitStack() as undo:
            file = RegionFile.make_or_join(directory, engine_id, shape)
            undo.callback(file.leave)
            mapping = undo.enter_context(closing(file.map_rows()))
            self.address = ctypes.addressof(ctypes.c_char.from_buffer(mapping))
            prefault(self.address, self._own_ranges())
            self.board = NoticeBoard(file.map_board(), shape)
            undo.callback(self.board.close)
            if rank is not None and not self.board.sign_in(rank):
                raise ValueError(
                    f"rank {rank} of engine {engine_id!r} is already in use: give each engine an "
                    "engine_id of its own, or leave it out if the engine generates one"
                )
            undo.pop_all()
        self.path = file.path
        self._mapping: mmap.mmap | None = mapping
        self._leave = weakref.finalize(self, file.leave)

    @property
    def size_bytes(self) -> int:
        """Bytes of all rows."""
        return self.num_blocks * self.row_bytes

    def create_next_worker_view(self, page_bytes: int) -> NDArray[np.uint8]:
        """The next `page_bytes` bytes of this rank's cell, as an array (num_blocks, page_bytes).

        Called once for each canonical tensor, in their order. Rows of the array are `row_bytes`
        bytes apart.
        """
        if self.rank is None:
            raise RuntimeError(
                "this region was opened with rank=None, for the scheduler, which has no cell: "
                "open it with the worker's rank, or use create_kv_memoryview()"
            )
        left = self.cpu_page_size - self._cell_bytes_used
        if not 0 < page_bytes <= left:
            raise ValueError(
                f"page_bytes={page_bytes}: rank {self.rank} has {left} bytes left in its cell of "
                f"cpu_page_size={self.cpu_page_size}, {self._cell_bytes_used} are taken. Make "
                "cpu_page_size the sum of all tensors' page bytes times the blocks per slot"
            )
        start = self.rank * self.cpu_page_size + self._cell_bytes_used
        view = self._rows()[:, start : start + page_bytes]
        self._cell_bytes_used += page_bytes
        return view

    def require_cell_fits(self, page_bytes: Sequence[int], blocks_per_chunk: int) -> None:
        """Raise `ValueError` if a rank's caches do not fit into its cell.

        `page_bytes`: the page size of each canonical tensor, in bytes.
        """
        if blocks_per_chunk < 1:
            raise ValueError(f"blocks_per_chunk={blocks_per_chunk}: a slot holds at least 1 block")
        cell_bytes = sum(page_bytes) * blocks_per_chunk
        if cell_bytes > self.cpu_page_size:
            raise ValueError(
                f"the caches need {cell_bytes} bytes per slot (blocks_per_chunk="
                f"{blocks_per_chunk} pages of each of {len(page_bytes)} tensors), but the region "
                f"was made with cpu_page_size={self.cpu_page_size}. Give the true "
                "worker_kv_bytes_per_block, the sum of all tensors' page_size_bytes"
            )

    def create_kv_memoryview(self) -> memoryview:
        """All rows without a copy: a writable memoryview of shape (num_blocks, row_bytes).

        `cleanup` releases it: using it afterwards raises `ValueError`.
        """
        view = self._rows().data
        address = np.asarray(view).ctypes.data
        if address != self.address or view.nbytes != self.size_bytes:
            raise AssertionError(
                f"the memoryview is at {address:#x} with {view.nbytes} bytes, the mapping at "
                f"{self.address:#x} with {self.size_bytes}: a copy instead of the shared memory"
            )
        self._views.append(view)
        return view

    def cleanup(self) -> None:
        """End this process's use of the region. The last process removes the file. Idempotent.

        Views from `create_kv_memoryview` raise from now on. The memory stays mapped while slices or
        arrays of it exist; a warning names the objects that hold them.
        """
        if self._mapping is None:
            return
        mapping, self._mapping = self._mapping, None
        if self.rank is not None:
            self.board.sign_out(self.rank)
        self.board.close()
        while self._views:
            with suppress(BufferError):  # an array of it exists; the warning below names it
                self._views.pop().release()
        try:
            _close(mapping)
        except BufferError:
            logger.warning(
                "The shared region %s of engine %r was cleaned up while parts of it are still "
                "held by: %s. The memory (%d bytes) stays mapped until they are dropped. Drop them "
                "before cleanup().",
                self.path,
                self.engine_id,
                "; ".join(describe_holders(self.address, self.size_bytes)) or "unknown holders",
                self.size_bytes,
            )
        finally:
            self._leave()

    def _rows(self) -> NDArray[np.uint8]:
        if self._mapping is None:
            raise RuntimeError(f"the region of engine {self.engine_id!r} has been cleaned up")
        flat = np.frombuffer(self._mapping, dtype=np.uint8)
        return flat.reshape(self.num_blocks, self.row_bytes)

    def _own_ranges(self) -> Iterator[tuple[int, int]]:
        """The bytes that this process will touch: a rank's cells; for the scheduler, all bytes."""
        if self.rank is None:
            yield 0, self.size_bytes
            return
        first = self.rank * self.cpu_page_size
        for row in range(0, self.size_bytes, self.row_bytes):
            yield row + first, row + first + self.cpu_page_size


def _close(mapping: mmap.mmap) -> None:
    try:
        mapping.close()
    except BufferError:
        gc.collect()  # the holders may be garbage in a cycle
        mapping.close()


def _require_possible(shape: RegionShape, rank: int | None) -> None:
    page = mmap.PAGESIZE
    row, cell = shape.kv_bytes_per_block, shape.cpu_page_size
    if shape.num_blocks <= 0:
        raise ValueError(
            f"num_blocks={shape.num_blocks}: a region needs at least one block. Raise "
            f"cpu_bytes_to_use to at least one row, {row} bytes"
        )
    if row <= 0 or row % page:
        raise ValueError(
            f"kv_bytes_per_block={row} is not a positive multiple of the page size {page}: round "
            f"it up to {max(1, -(-row // page)) * page}"
        )
    if not 0 < cell <= row:
        raise ValueError(
            f"cpu_page_size={cell}: a rank's cell has at least one byte and fits into the row of "
            f"kv_bytes_per_block={row} bytes"
        )
    if rank is not None and not 0 <= rank < row // cell:
        raise ValueError(
            f"rank={rank}: a row of kv_bytes_per_block={row} bytes holds {row // cell} cells of "
            f"cpu_page_size={cell}, so ranks are 0 to {row // cell - 1}. Make kv_bytes_per_block "
            "at least world_size * cpu_page_size"
        )


def prefault(address: int, ranges: Iterable[tuple[int, int]]) -> None:
    """Map the pages of all (start, end) byte ranges, counted from the page-aligned `address`.

    Later copies then do not wait for page faults. This changes no bytes, even if other processes
    write them at the same time. Uses up to 8 threads, which have ended when it returns. Raises
    `OSError` if a page cannot be mapped.
    """
    pieces = list(_page_aligned_pieces(ranges))
    num_threads = min(_MAX_THREADS, len(os.sched_getaffinity(0)), len(pieces))
    # Each thread gets one share of the list, because one task per piece would cost more.
    shares = [pieces[first::num_threads] for first in range(num_threads)]
    with ThreadPoolExecutor(num_threads, thread_name_prefix="kvtier-prefault") as pool:
        for done in [pool.submit(_populate_all, address, share) for share in shares]:
            done.result()


def _populate_all(address: int, pieces: list[tuple[int, int]]) -> None:
    for start, end in pieces:
        _populate(address + start, end - start)


def _page_aligned_pieces(ranges: Iterable[tuple[int, int]]) -> Iterator[tuple[int, int]]:
    """Round the ranges to pages, join adjacent ones, and cut them into pieces of bounded size."""
    joined: list[tuple[int, int]] = []
    for first_byte, end_byte in ranges:
        start = first_byte // mmap.PAGESIZE * mmap.PAGESIZE
        end = -(-end_byte // mmap.PAGESIZE) * mmap.PAGESIZE
        if joined and start <= joined[-1][1]:
            joined[-1] = (joined[-1][0], end)
        else:
            joined.append((start, end))
    for start, end in joined:
        for piece in range(start, end, _PIECE_BYTES):
            yield piece, min(piece + _PIECE_BYTES, end)


def _populate(address: int, length: int) -> None:
    while _libc.madvise(address, length, _MADV_POPULATE_WRITE):
        code = ctypes.get_errno()
        if code == errno.EINVAL:
            _read_every_page(address, length)
            return
        if code not in (errno.EAGAIN, errno.EINTR):
            raise OSError(code, f"cannot prefault {length} bytes: {os.strerror(code)}")


def _read_every_page(address: int, length: int) -> None:
    """Prefault on kernels before 5.14. Reads each page: that maps it, and cannot undo a write of
    another process."""
    memory = (ctypes.c_ubyte * length).from_address(address)
    np.asarray(memory)[:: mmap.PAGESIZE].max()
