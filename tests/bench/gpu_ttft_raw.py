"""Reference times: the same bytes over the bus and from the disk, without an engine."""

from __future__ import annotations

import mmap
import os
import random
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from itertools import count
from pathlib import Path
from statistics import median
from typing import Any

from tests.bench.gpu_ttft_settings import Settings

_TILE_BYTES = 64 << 20
_TRIALS = 2


class Bus:
    """Copies from pinned host memory to the device."""

    def __init__(self, settings: Settings) -> None:
        import torch

        self._torch: Any = torch
        self._is_cuda = settings.device == "cuda"
        self.device_name = (
            f"{torch.cuda.get_device_name()}, CUDA {torch.version.cuda}" if self._is_cuda else "CPU"
        )
        size = settings.bus_buffer
        self._source = torch.ones(size, dtype=torch.uint8, pin_memory=self._is_cuda)
        self._target = torch.empty(size, dtype=torch.uint8, device=settings.device)
        self.seconds_for(size)

    def seconds_for(self, num_bytes: int) -> float:
        """Copy in pieces of the buffer's size."""
        self._wait()
        began = time.perf_counter()
        for start in range(0, num_bytes, len(self._source)):
            size = min(len(self._source), num_bytes - start)
            self._target[:size].copy_(self._source[:size], non_blocking=True)
        self._wait()
        return time.perf_counter() - began

    def _wait(self) -> None:
        if self._is_cuda:
            self._torch.cuda.synchronize()


class RawDisk:
    """Reads one file with several threads, bypassing the page cache."""

    def __init__(self, settings: Settings, path: Path) -> None:
        """Write the file. Takes a while."""
        self._chunk = settings.raw_chunk
        self._num_chunks = settings.raw_bytes() // self._chunk
        self._path = path
        self.is_direct = _can_be_direct(path, self._chunk)
        """True if the file system allows reads to bypass the page cache."""
        self.num_threads = settings.raw_threads[-1]
        self._buffers = [mmap.mmap(-1, self._chunk) for _ in range(max(settings.raw_threads))]
        for buffer in self._buffers:
            buffer.write(b"\1" * self._chunk)
        self._next_chunk = 0
        self._write()

    def choose_threads(self, settings: Settings) -> dict[int, float]:
        """Choose the fastest number of threads. Returns bytes per second by number of threads."""
        num_bytes = min(settings.raw_trial_bytes, self._num_chunks * self._chunk)
        seconds: dict[int, list[float]] = {threads: [] for threads in settings.raw_threads}
        for _ in range(_TRIALS):
            for threads, taken in seconds.items():
                self.num_threads = threads
                taken.append(self.seconds_for(num_bytes))
        rates = {threads: num_bytes / median(taken) for threads, taken in seconds.items()}
        self.num_threads = max(rates, key=lambda threads: rates[threads])
        return rates

    def seconds_for(self, num_bytes: int) -> float:
        """Read whole chunks. Continues where the last read ended, and starts again at the end of
        the file."""
        first, self._next_chunk = self._next_chunk, self._next_chunk + -(-num_bytes // self._chunk)
        tickets = iter(range(first, self._next_chunk))
        flags = os.O_RDONLY | (os.O_DIRECT if self.is_direct else 0)
        fd = os.open(self._path, flags)
        try:
            with ThreadPoolExecutor(self.num_threads) as pool:
                list(pool.map(lambda _: None, range(self.num_threads)))
                began = time.perf_counter()
                readers = [
                    pool.submit(self._read, fd, tickets, buffer)
                    for buffer in self._buffers[: self.num_threads]
                ]
                for reader in readers:
                    reader.result()
                return time.perf_counter() - began
        finally:
            os.close(fd)

    def _read(self, fd: int, tickets: Iterator[int], buffer: mmap.mmap) -> None:
        for ticket in tickets:
            offset = ticket % self._num_chunks * self._chunk
            if os.preadv(fd, [buffer], offset) != self._chunk:
                raise OSError(f"a short read at {offset} of {self._path}")

    def _write(self) -> None:
        tile = mmap.mmap(-1, min(_TILE_BYTES, self._num_chunks * self._chunk))
        tile.write(random.Random("raw disk").randbytes(len(tile)))
        fd = os.open(self._path, os.O_WRONLY | (os.O_DIRECT if self.is_direct else 0))
        try:
            for start in count(0, len(tile)):
                left = self._num_chunks * self._chunk - start
                if left <= 0:
                    break
                # All pieces differ, since a disk may deduplicate equal ones.
                tile[:8] = start.to_bytes(8, "little")
                with memoryview(tile) as view, view[: min(left, len(tile))] as piece:
                    if os.pwritev(fd, [piece], start) != len(piece):
                        raise OSError(f"a short write at {start} of {self._path}")
            os.fsync(fd)
        finally:
            os.close(fd)
            tile.close()


def _can_be_direct(path: Path, size: int) -> bool:
    """Make the file, and test whether reads can bypass the page cache."""
    path.write_bytes(bytes(size))
    try:
        fd = os.open(path, os.O_RDONLY | os.O_DIRECT)
    except OSError:
        return False
    try:
        with mmap.mmap(-1, size) as buffer:
            return os.preadv(fd, [buffer], 0) == size
    except OSError:
        return False
    finally:
        os.close(fd)


class PageCache:
    """Drops the page cache."""

    def __init__(self) -> None:
        self.trouble: str | None = None
        """The reason why the page cache could not be dropped, or None."""

    def drop(self) -> None:
        """Do `sync; echo 3 > /proc/sys/vm/drop_caches`, where that is permitted."""
        os.sync()
        try:
            Path("/proc/sys/vm/drop_caches").write_text("3\n")
        except OSError as error:
            self.trouble = str(error)
