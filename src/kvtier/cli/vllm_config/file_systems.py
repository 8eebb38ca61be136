"""What kind of file system a path is on."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

__all__ = ["Mount", "mount_of"]

_OCTAL = re.compile(r"\\([0-7]{3})")
_IN_MEMORY = frozenset(("tmpfs", "ramfs"))
_OF_CONTAINERS = frozenset(("overlay", "aufs"))
_OVER_NETWORK = re.compile(
    "9p|afs|beegfs|ceph|cifs|fuse.*|glusterfs|gpfs|lustre|nfs4?|orangefs|pvfs2|smb3|smbfs|virtiofs|"
    "wekafs"
)


@dataclass(frozen=True, slots=True)
class Mount:
    """A line of the kernel's table."""

    point: Path
    kind: str

    @property
    def is_in_memory(self) -> bool:
        return self.kind in _IN_MEMORY

    @property
    def is_of_container(self) -> bool:
        """What is written there goes when the container is removed."""
        return self.kind in _OF_CONTAINERS

    @property
    def is_over_network(self) -> bool:
        """Or through a process, of which nobody knows where it leads."""
        return _OVER_NETWORK.fullmatch(self.kind) is not None


def mount_of(path: Path, table: Path = Path("/proc/self/mountinfo")) -> Mount:
    """Of an absolute path without links. A later mount hides an earlier one."""
    found = Mount(Path("/"), "unknown")
    # Not `splitlines`: of what ends a line, the kernel escapes only the one that it uses itself.
    for line in table.read_text("utf-8", "surrogateescape").rstrip("\n").split("\n"):
        left, _, right = line.partition(" - ")
        mount = Mount(Path(_unescaped(left.split(" ")[4])), right.split(" ")[0])
        is_around = path == mount.point or mount.point in path.parents
        if is_around and len(mount.point.parts) >= len(found.point.parts):
            found = mount
    return found


def _unescaped(text: str) -> str:
    """The kernel writes blanks, tabs, line ends and backslashes as octal numbers."""
    return _OCTAL.sub(lambda match: chr(int(match[1], 8)), text)
