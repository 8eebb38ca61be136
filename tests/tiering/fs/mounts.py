"""File systems of several kinds, for tests that fill them or share them."""

from __future__ import annotations

import os
import shutil
import subprocess
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest

from tests.tiering.disk.small_disk import LoopDisk, loop_disk

__all__ = ["DISKS", "bind_mounted_by_fuse", "mounted_by_nfs", "small_disk"]

_MAKERS = {
    # The smallest disk that each of them accepts, including its own metadata.
    "xfs": ("mkfs.xfs", "-q", "--unsupported", "-d", "agcount=1"),
    "btrfs": ("mkfs.btrfs", "-q", "--mixed"),
}
DISKS = ("ext4", *_MAKERS)
_KNOWN = Path("/proc/filesystems")


def _skip_without(kinds: Sequence[str], *tools: str) -> None:
    missing = [kind for kind in kinds if kind not in _KNOWN.read_text().split()]
    if missing:
        pytest.skip(f"this kernel has no {' and no '.join(missing)}: see {_KNOWN}")
    if os.geteuid() != 0:
        pytest.skip("mounting a file system needs root")
    for tool in tools:
        if shutil.which(tool) is None:
            pytest.skip(f"there is no {tool}")


def _run(*command: str) -> None:
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise OSError(f"{' '.join(command)}: {done.stderr.strip()}")


@contextmanager
def small_disk(directory: Path, kind: str, num_bytes: int) -> Iterator[LoopDisk]:
    """Always unmounted and detached. Skips the test if the file system is not available."""
    if kind == "ext4":
        with loop_disk(directory, num_bytes) as disk:
            yield disk
        return
    maker = _MAKERS[kind]
    _skip_without([kind], maker[0], "mount", "umount", "losetup")
    image, root = directory / "image", directory / "mounted"
    root.mkdir()
    with image.open("wb") as file:
        file.truncate(num_bytes)
    try:
        _run(*maker, str(image))
        _run("mount", "-o", "loop", str(image), str(root))
    except OSError as error:
        pytest.skip(f"no {kind} here: {error}")
    try:
        yield LoopDisk(image, root)
    finally:
        _run("umount", str(root))


@contextmanager
def bind_mounted_by_fuse(directory: Path) -> Iterator[Path]:
    """A directory mounted through FUSE by bindfs."""
    _skip_without(["fuse"], "bindfs", "umount")
    behind, root = directory / "behind", directory / "fuse"
    behind.mkdir()
    root.mkdir()
    with subprocess.Popen(["bindfs", "-f", str(behind), str(root)]) as process:
        try:
            deadline = time.monotonic() + 10
            while not os.path.ismount(root):
                if process.poll() is not None or time.monotonic() > deadline:
                    pytest.skip(f"bindfs does not mount here (status {process.returncode})")
                time.sleep(0.01)
            yield root
        finally:
            with suppress(OSError):
                _run("umount", str(root))
            process.terminate()


@contextmanager
def mounted_by_nfs(directory: Path) -> Iterator[Path]:
    """A directory exported to this machine and mounted from it. Needs Debian's nfs-kernel-server,
    and a kernel with both sides of NFS."""
    _skip_without(("nfs4", "nfsd"), "exportfs", "rpc.nfsd", "mount.nfs4")
    exported, root = directory / "exported", directory / "nfs"
    exported.mkdir()
    root.mkdir()
    what = f"127.0.0.1:{exported}"
    options = "rw,sync,no_root_squash,no_subtree_check,fsid=77,insecure"
    server = Path("/proc/fs/nfsd/threads")
    try:
        if not server.exists():
            _run("mount", "-t", "nfsd", "nfsd", "/proc/fs/nfsd")
        was_running = server.read_text().strip() != "0"
        if not was_running:
            _run("rpc.nfsd", "2")
        _run("exportfs", "-o", options, what)
        _run("mount", "-t", "nfs4", "-o", "soft,timeo=50", what, str(root))
    except OSError as error:
        pytest.skip(f"NFS cannot be had here: {error}")
    try:
        yield root
    finally:
        _run("umount", "--force", str(root))
        _run("exportfs", "-u", what)
        if not was_running:
            _run("rpc.nfsd", "0")
