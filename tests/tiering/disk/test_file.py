"""The slab's file: whole pages in and out, real allocation, and a lock that ends with its owner."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from kvtier.tiering.disk.file import NotAFile, SlabFile, lock_within
from kvtier.tiering.io.page import PAGE_BYTES
from tests.tiering.disk.small_disk import small_tmpfs

MAKE = os.O_RDWR | os.O_CREAT


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "file"


@pytest.mark.parametrize("is_direct", [False, True])
def test_pages_come_back(path: Path, is_direct: bool) -> None:
    file = SlabFile(path, MAKE)
    file.allocate(6 << 20)
    if is_direct and not file.use_o_direct():
        pytest.skip("no O_DIRECT on this file system")
    assert file.is_direct == is_direct
    data = os.urandom(5 << 20)  # more than one read moves
    file.write(PAGE_BYTES, data)
    assert file.read(PAGE_BYTES, len(data)) == data
    assert file.read(0, PAGE_BYTES) == bytes(PAGE_BYTES)
    file.sync()
    file.close()
    assert path.read_bytes()[PAGE_BYTES : PAGE_BYTES + len(data)] == data


def test_reading_beyond_the_end_gives_what_there_is(path: Path) -> None:
    file = SlabFile(path, MAKE)
    file.write(0, b"x" * 3 * PAGE_BYTES)
    assert file.read(2 * PAGE_BYTES, 4 * PAGE_BYTES) == b"x" * PAGE_BYTES
    assert file.read(9 * PAGE_BYTES, PAGE_BYTES) == b""
    file.close()


def test_what_is_allocated_is_there(path: Path) -> None:
    file = SlabFile(path, MAKE)
    file.allocate(1 << 20)
    assert file.size == 1 << 20
    assert file.allocated_bytes >= 1 << 20
    file.allocate(1 << 19)  # less than the file has
    assert file.size == 1 << 20
    file.truncate(1 << 19)
    assert file.size == 1 << 19
    file.close()


def test_holes_are_filled(path: Path) -> None:
    path.write_bytes(b"")
    os.truncate(path, 1 << 20)
    file = SlabFile(path, os.O_RDWR)
    assert file.allocated_bytes == 0
    file.allocate(1 << 20)
    assert file.allocated_bytes >= 1 << 20
    file.close()


def test_what_cannot_be_allocated_leaves_the_file_as_it_was(tmp_path: Path) -> None:
    with small_tmpfs(tmp_path, 1 << 20) as root:
        file = SlabFile(root / "file", MAKE)
        file.write(0, b"x" * PAGE_BYTES)
        free = file.free_bytes
        with pytest.raises(OSError, match="No space left"):
            file.allocate(2 << 20)
        assert file.size == PAGE_BYTES
        assert file.free_bytes == free
        assert file.read(0, PAGE_BYTES) == b"x" * PAGE_BYTES
        file.close()


def test_one_at_a_time_has_the_lock(path: Path) -> None:
    first, second = SlabFile(path, MAKE), SlabFile(path, MAKE)
    assert lock_within(first.fd, 0)
    assert lock_within(first.fd, 0)
    assert not lock_within(second.fd, 0)
    first.close()
    assert lock_within(second.fd, 0)
    second.close()
    second.close()  # a second call does nothing


def test_what_is_no_file_is_refused_without_waiting(tmp_path: Path) -> None:
    num_open = len(os.listdir("/proc/self/fd"))
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(NotAFile):
        SlabFile(tmp_path / "pipe", os.O_RDWR)
    with pytest.raises(NotAFile):
        SlabFile(Path("/dev/null"), os.O_RDWR)
    with pytest.raises(OSError, match="Is a directory"):
        SlabFile(tmp_path, os.O_RDWR)
    assert len(os.listdir("/proc/self/fd")) == num_open


def test_a_child_does_not_inherit_it(path: Path) -> None:
    file = SlabFile(path, MAKE)
    assert not os.get_inheritable(file.fd)
    file.close()
