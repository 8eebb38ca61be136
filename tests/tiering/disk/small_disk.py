"""Small file systems, for tests that fill, freeze and break them."""

from __future__ import annotations

import ctypes
import fcntl
import os
import shutil
import struct
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest

__all__ = ["LoopDisk", "loop_disk", "small_tmpfs"]

_FREEZE, _THAW = 0xC0045877, 0xC0045878
_SET_LOOP_STATUS, _GET_LOOP_STATUS = 0x4C04, 0x4C05
_LOOP_STATUS_BYTES, _SIZE_LIMIT_AT = 232, 32
_FALLOC_KEEP_SIZE, _FALLOC_PUNCH_HOLE = 1, 2
_BLOCK_BYTES = 4096
_libc = ctypes.CDLL(None, use_errno=True)
_KEPT_BYTES = 4 << 20
"""Start of the device, where ext4 keeps its tables."""


def _run(*command: str) -> None:
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise OSError(f"{' '.join(command)}: {done.stderr.strip()}")


def _skip_without(*tools: str) -> None:
    if os.geteuid() != 0:
        pytest.skip("mounting a file system needs root")
    for tool in tools:
        if shutil.which(tool) is None:
            pytest.skip(f"there is no {tool}")


class LoopDisk:
    """An ext4 file system on a loop device over an ordinary file."""

    def __init__(self, image: Path, root: Path) -> None:
        self.image = image
        self.root = root

    @property
    def free_bytes(self) -> int:
        answer = os.statvfs(self.root)
        return answer.f_bavail * answer.f_frsize

    @contextmanager
    def frozen(self) -> Iterator[None]:
        """Block writes inside the context. Reads still work."""
        fd = os.open(self.root, os.O_RDONLY)
        try:
            fcntl.ioctl(fd, _FREEZE, 0)
            try:
                yield
            finally:
                fcntl.ioctl(fd, _THAW, 0)
        finally:
            os.close(fd)

    @contextmanager
    def broken(self) -> Iterator[None]:
        """Fail reads and writes with EIO inside the context, by making the device end after its
        first few MiB."""
        self._let_device_end_at(_KEPT_BYTES)
        try:
            yield
        finally:
            self._let_device_end_at(0)

    def _let_device_end_at(self, num_bytes: int) -> None:
        """0: where its file ends."""
        mounts = map(str.split, Path("/proc/mounts").read_text().splitlines())
        (device,) = [source for source, target, *_ in mounts if target == str(self.root)]
        fd = os.open(device, os.O_RDONLY)
        try:
            status = bytearray(_LOOP_STATUS_BYTES)
            fcntl.ioctl(fd, _GET_LOOP_STATUS, status)
            struct.pack_into("<Q", status, _SIZE_LIMIT_AT, num_bytes)
            fcntl.ioctl(fd, _SET_LOOP_STATUS, status)
        finally:
            os.close(fd)

    def become_read_only(self) -> None:
        """Make the file system read-only, as ext4 does when its journal is damaged. It stays so."""
        _run("mount", "-o", "remount,abort", str(self.root))

    def fill(self) -> None:
        """Fill the file system to the last block."""
        _take_all_room(self.root / "of-others")

    def fragment(self) -> None:
        """Fill the file system, then free every other block, so that no two free blocks are
        adjacent."""
        self.fill()
        with (self.root / "of-others").open("r+b") as file:
            os.fsync(file.fileno())
            for offset in range(0, file.seek(0, os.SEEK_END), 2 * _BLOCK_BYTES):
                _punch_hole(file.fileno(), offset, _BLOCK_BYTES)
            os.fsync(file.fileno())  # makes the freed blocks available


def _punch_hole(fd: int, offset: int, length: int) -> None:
    mode = _FALLOC_KEEP_SIZE | _FALLOC_PUNCH_HOLE
    if _libc.fallocate64(fd, mode, ctypes.c_int64(offset), ctypes.c_int64(length)):
        error = ctypes.get_errno()
        raise OSError(error, os.strerror(error))


def _take_all_room(path: Path) -> None:
    with path.open("ab", buffering=0) as file:
        for size in (1 << 20, 4096):
            with suppress(OSError):
                while True:
                    file.write(bytes(size))


def _unmount(root: Path) -> None:
    try:
        _run("umount", str(root))
    except OSError:  # a failed test may leave a file open; the device goes when it is closed
        _run("umount", "--lazy", str(root))
        raise


@contextmanager
def loop_disk(
    directory: Path, num_bytes: int, *, read_only: bool = False, content: bytes | None = None
) -> Iterator[LoopDisk]:
    """`content`: of an earlier disk. Always unmounted and detached. Skips the test if loop devices
    are not available."""
    _skip_without("mkfs.ext4", "mount", "umount", "losetup")
    image, root = directory / "image", directory / "mounted"
    root.mkdir()
    if content is None:
        with image.open("wb") as file:
            file.truncate(num_bytes)
        _run("mkfs.ext4", "-q", "-b", str(_BLOCK_BYTES), "-m", "0", str(image))
    else:
        image.write_bytes(content)
    try:
        # "loop" also detaches the device when it is unmounted.
        _run("mount", "-o", "loop,ro" if read_only else "loop", str(image), str(root))
    except OSError as error:
        pytest.skip(f"loop devices cannot be mounted here: {error}")
    try:
        yield LoopDisk(image, root)
    finally:
        _unmount(root)


@contextmanager
def small_tmpfs(directory: Path, num_bytes: int) -> Iterator[Path]:
    """A file system in memory, always unmounted. Skips the test if it cannot be mounted."""
    _skip_without("mount", "umount")
    root = directory / "tmpfs"
    root.mkdir()
    try:
        _run("mount", "-t", "tmpfs", "-o", f"size={num_bytes}", "tmpfs", str(root))
    except OSError as error:
        pytest.skip(f"a tmpfs cannot be mounted here: {error}")
    try:
        yield root
    finally:
        _unmount(root)
