"""The mount of a path, from the kernel's table."""

from __future__ import annotations

from pathlib import Path

import pytest

from kvtier.cli.checks.tiers import Mount, mount_of
from tests.tiering.disk.small_disk import small_tmpfs

TABLE = """\
21 1 253:0 / / rw,relatime - overlay overlay rw,lowerdir=/a - b
22 21 0:5 / /dev rw - devtmpfs udev rw
31 21 0:40 / /mnt/shared rw shared:5 master:1 - nfs4 server:/export rw,vers=4.2
32 21 259:1 /sub /mnt/nvme rw - ext4 /dev/nvme0n1 rw
33 32 0:41 / /mnt/nvme rw - xfs /dev/nvme1n1 rw
34 21 0:42 / /mnt/with\\040blank\\134 rw - fuse.bindfs bindfs rw
"""
KINDS = {
    "/": "overlay",
    "/mnt": "overlay",
    "/mnt/shared": "nfs4",
    "/mnt/shared/kv": "nfs4",
    "/mnt/sharedkv": "overlay",
    "/mnt/nvme/kv": "xfs",
    "/mnt/with blank\\/kv": "fuse.bindfs",
}


@pytest.mark.parametrize("path", KINDS)
def test_the_last_and_innermost_mount_counts(path: str, tmp_path: Path) -> None:
    table = tmp_path / "mountinfo"
    table.write_text(TABLE)
    assert mount_of(Path(path), table).kind == KINDS[path]


def test_a_real_mount(tmp_path: Path) -> None:
    directory = tmp_path / "a b\\c\u2028d"
    directory.mkdir()
    with small_tmpfs(directory, 2**20) as root:
        assert mount_of(root / "x") == Mount(root, "tmpfs")
    assert mount_of(directory / "tmpfs" / "x").kind != "tmpfs" or mount_of(tmp_path).is_in_memory


NATURES = {
    "tmpfs": (True, False, False),
    "overlay": (False, True, False),
    "nfs": (False, False, True),
    "nfs4": (False, False, True),
    "ceph": (False, False, True),
    "fuse.sshfs": (False, False, True),
    "ext4": (False, False, False),
    "xfs": (False, False, False),
    "nfsd": (False, False, False),
}


@pytest.mark.parametrize("kind", NATURES)
def test_kinds(kind: str) -> None:
    mount = Mount(Path("/"), kind)
    nature = (mount.is_in_memory, mount.is_of_container, mount.is_over_network)
    assert nature == NATURES[kind]
