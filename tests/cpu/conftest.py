"""Regions, directories for them, and processes to share them with."""

from __future__ import annotations

import fcntl
import mmap
import os
import shutil
import subprocess
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest

from kvtier.cpu.shared_offload_region import SharedOffloadRegion
from tests.cpu.region_process import Lend, RegionMaker, RegionProcessPool


@pytest.fixture(scope="package")
def lend() -> Iterator[Lend]:
    """Lends real processes."""
    pool = RegionProcessPool()
    yield pool.lend
    pool.close()


SHARED_MEMORY = Path("/dev/shm")


@pytest.fixture(scope="session")
def _no_directories_of_killed_runs() -> None:
    """Remove directories of test runs that were killed: no process locks them any more. Those of
    the last minute may be about to be locked by another run."""
    for directory in SHARED_MEMORY.glob("test-region-*"):
        with suppress(OSError), _locked(directory, fcntl.LOCK_EX | fcntl.LOCK_NB):
            if time.time() - directory.stat().st_mtime > 60:
                shutil.rmtree(directory)


@contextmanager
def _locked(directory: Path, how: int) -> Iterator[None]:
    fd = os.open(directory, os.O_RDONLY)
    try:
        fcntl.flock(fd, how)
        yield
    finally:
        os.close(fd)


@pytest.fixture
def shm(_no_directories_of_killed_runs: None) -> Iterator[Path]:
    """A directory in shared memory that must be empty again after the test."""
    directory = Path(tempfile.mkdtemp(dir=SHARED_MEMORY, prefix="test-region-"))
    try:
        with _locked(directory, fcntl.LOCK_SH):
            yield directory
            assert list(directory.iterdir()) == []
    finally:
        shutil.rmtree(directory)


@pytest.fixture
def make(shm: Path) -> Iterator[RegionMaker]:
    """Makes regions in `shm` that are cleaned up after the test."""
    made = []

    def make_region(
        engine_id: str = "engine",
        num_blocks: int = 2,
        rank: int | None = None,
        kv_bytes_per_block: int = 2 * mmap.PAGESIZE,
        cpu_page_size: int = mmap.PAGESIZE // 2,
    ) -> SharedOffloadRegion:
        region = SharedOffloadRegion(
            engine_id, num_blocks, rank, kv_bytes_per_block, cpu_page_size, directory=str(shm)
        )
        made.append(region)
        return region

    yield make_region
    for region in made:
        region.cleanup()


@pytest.fixture
def small_tmpfs() -> Iterator[str]:
    """A filesystem of 1 MiB."""
    with _mounted_tmpfs("size=1m") as directory:
        yield directory


@pytest.fixture
def endless_tmpfs() -> Iterator[str]:
    """A filesystem with more space than any machine has."""
    with _mounted_tmpfs("size=1000t") as directory:
        yield directory


@pytest.fixture
def tmpfs_without_inodes() -> Iterator[str]:
    """A filesystem with space, but without an inode for a file."""
    with _mounted_tmpfs("size=1m,nr_inodes=1") as directory:
        yield directory


@contextmanager
def _mounted_tmpfs(options: str) -> Iterator[str]:
    if os.geteuid() != 0:
        pytest.skip("only root can mount a tmpfs")
    directory = tempfile.mkdtemp(prefix="test-region-")
    mount = ["mount", "-t", "tmpfs", "-o", options, "tmpfs", directory]
    if subprocess.run(mount, check=False, capture_output=True).returncode:
        os.rmdir(directory)
        pytest.skip("no permission to mount a tmpfs, though root")
    try:
        yield directory
    finally:
        subprocess.run(["umount", directory], check=True)
        os.rmdir(directory)
