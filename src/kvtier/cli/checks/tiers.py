"""Checks of disk and fs tiers: whether each can work at its path on this machine.

The checks leave no file behind."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path

from kvtier.cli.checks.finding import Finding, Status
from kvtier.config.sizes import as_size
from kvtier.tiering.disk.layout import Geometry
from kvtier.tiering.disk.options import DiskOptions
from kvtier.tiering.disk.ownership import foreign_refusal
from kvtier.tiering.disk.ownership import refusal_for as slab_refusal
from kvtier.tiering.disk.reader import SlabReader, SlabUnreadable
from kvtier.tiering.fs.access import NoFollowTree, RootRefused, require_ours, require_own
from kvtier.tiering.fs.access import refusal_for as root_refusal
from kvtier.tiering.fs.ledger import LedgerVersion
from kvtier.tiering.fs.options import FsOptions
from kvtier.tiering.fs.survey import read_balance, read_engines
from kvtier.tiering.io.page import allows_o_direct

__all__ = [
    "DiskChecks",
    "Mount",
    "check_answers",
    "check_fs_tier",
    "directory_of",
    "mount_of",
]

_OCTAL = re.compile(r"\\([0-7]{3})")
_WRITE_A_PAGE = """
import os, sys, tempfile
with tempfile.TemporaryFile(prefix=".kvtier-answers-", dir=sys.argv[1]) as file:
    file.write(bytes(4096))
    file.flush()
    os.fdatasync(file.fileno())
"""
_IN_MEMORY = frozenset(("tmpfs", "ramfs"))
_OF_CONTAINERS = frozenset(("overlay", "aufs"))
_OVER_NETWORK = re.compile(
    "9p|afs|beegfs|ceph|cifs|fuse.*|glusterfs|gpfs|lustre|nfs4?|orangefs|pvfs2|smb3|smbfs|virtiofs|"
    "wekafs"
)


# --- file systems ------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Mount:
    """One mount of this process."""

    point: Path
    kind: str

    @property
    def is_in_memory(self) -> bool:
        return self.kind in _IN_MEMORY

    @property
    def is_of_container(self) -> bool:
        """True if files there are lost when the container is removed."""
        return self.kind in _OF_CONTAINERS

    @property
    def is_over_network(self) -> bool:
        """True for network file systems, and for FUSE, behind which there may be one."""
        return _OVER_NETWORK.fullmatch(self.kind) is not None


def mount_of(path: Path, table: Path = Path("/proc/self/mountinfo")) -> Mount:
    """Return the mount that holds `path`, which is absolute and without links. Of two mounts at one
    point, the later one hides the earlier."""
    found = Mount(Path("/"), "unknown")
    # Not `splitlines`: the kernel escapes "\n" in names, but no other line separator.
    for line in table.read_text("utf-8", "surrogateescape").rstrip("\n").split("\n"):
        left, _, right = line.partition(" - ")
        mount = Mount(Path(_unescaped(left.split(" ")[4])), right.split(" ")[0])
        is_around = path == mount.point or mount.point in path.parents
        if is_around and len(mount.point.parts) >= len(found.point.parts):
            found = mount
    return found


def _unescaped(text: str) -> str:
    """Replace octal escapes by characters. The kernel's table has them for blanks, tabs, line ends
    and backslashes."""
    return _OCTAL.sub(lambda match: chr(int(match[1], 8)), text)


def directory_of(options: object) -> Path | None:
    """An existing directory on the disk of a tier with these options. None if the tier has no disk,
    or only a server has one."""
    if isinstance(options, DiskOptions):
        return options.path.resolve().parent
    if isinstance(options, FsOptions):
        root = options.root_dir.resolve()
        return root if root.is_dir() else root.parent
    return None


def check_answers(at: str, directory: Path, patience_s: float) -> Finding | None:
    """Write a page to a new file in `directory` and remove it, in a process of its own: one that
    waits for a disk or a server that does not answer cannot be ended. Returns what is wrong if it
    takes longer than `patience_s`; None otherwise, also if the file could not be written."""
    command = [sys.executable, "-I", "-S", "-c", _WRITE_A_PAGE, str(directory)]
    try:
        writer = subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
        )
    except OSError:
        return None
    try:
        writer.wait(patience_s)
    except subprocess.TimeoutExpired:
        writer.kill()
        writer.returncode = -signal.SIGKILL  # it ends when the disk answers; nobody waits for that
        return Finding(
            f"{at}.disk",
            Status.PROBLEM,
            f"it does not answer: a file of one page in {directory} was not written within "
            f"{patience_s:g} s",
            "See whether the disk, or the server of a mount, hangs (dmesg; mount). Everything that "
            "touches it waits, engines included",
        )
    except BaseException:  # Ctrl-C
        writer.kill()
        raise
    return None


# --- disk tiers --------------------------------------------------------------------------------


class DiskChecks:
    """Checks the disk tiers of one engine, in order. Tiers on one file system share its free
    space."""

    def __init__(self) -> None:
        self._claimed: dict[int, int] = {}
        """For each device, the bytes that the tiers checked so far will still allocate there."""

    def findings(self, at: str, options: DiskOptions) -> Iterator[Finding]:
        """Check one tier. `at`: the position of its entry, such as `secondary_tiers[0]`."""
        try:
            yield from self._findings(at, options)
        except OSError as error:
            yield Finding.of_refusal(f"{at}.path", str(slab_refusal(options.path, error)))
        except RuntimeError as error:  # a link that leads to itself
            yield Finding(f"{at}.path", Status.PROBLEM, str(error), "Give another path")

    def _findings(self, at: str, options: DiskOptions) -> Iterator[Finding]:
        path = options.path.resolve()  # the tier resolves it, too
        directory = path.parent
        if not directory.is_dir():  # the path is a link that leads nowhere
            yield Finding(
                f"{at}.path",
                Status.PROBLEM,
                f"{options.path} leads to {path}, and there is no directory {directory}",
                "Make it, or mount the disk first",
            )
            return
        exists = path.exists()
        yield _slab(at, path, options.max_bytes) if exists else _new_slab(at, path, options)
        yield _disk_file_system(at, mount_of(directory))
        if options.max_bytes is not None:
            yield self._room(at, path, options.max_bytes)
        yield _o_direct(at, path, options.use_o_direct)

    def _room(self, at: str, path: Path, max_bytes: int) -> Finding:
        needed = _bytes_needed(path, max_bytes)
        answer = os.statvfs(path.parent)
        device = path.parent.stat().st_dev
        before = self._claimed.get(device, 0)
        self._claimed[device] = before + needed
        free = answer.f_bavail * answer.f_frsize
        found = f"{path} takes {as_size(needed)} more"
        if before:
            found += f", besides {as_size(before)} for the tiers before it"
        found += f"; its file system has {as_size(free)} free"
        if before + needed <= free:
            return Finding(f"{at}.room", Status.OK, found)
        return Finding(
            f"{at}.room",
            Status.PROBLEM,
            found,
            f"Make room, or give at most {as_size(max(0, max_bytes - needed + free - before))}",
        )


def _new_slab(at: str, path: Path, options: DiskOptions) -> Finding:
    name, directory = f"{at}.path", path.parent
    if options.max_bytes is None:
        return Finding(
            name,
            Status.PROBLEM,
            f"there is no slab at {path} yet",
            "Give a size: the engine makes the file when it starts",
        )
    if not os.access(directory, os.W_OK | os.X_OK, effective_ids=True):
        return _not_writable(name, directory)
    return Finding(
        name, Status.OK, f"there is no slab at {path} yet: the engine makes it when it starts"
    )


def _slab(at: str, path: Path, max_bytes: int | None) -> Finding:
    name = f"{at}.path"
    try:
        with SlabReader(path) as reader:
            is_held, holder = reader.is_held(), reader.holder()
            size = reader.file.allocated_bytes
            refusal = foreign_refusal(reader.file)
    except SlabUnreadable as problem:
        return Finding.of_refusal(name, str(problem))
    except OSError as error:
        return Finding.of_refusal(name, str(slab_refusal(path, error)))
    if is_held:
        who = "another process"
        if holder is not None:
            since = datetime.fromtimestamp(holder.since_ns / 1e9, UTC)
            who = (
                f'the engine "{holder.engine_id}" (process {holder.pid} on {holder.host}, since '
                f"{since:%Y-%m-%d %H:%M:%S} UTC)"
            )
        return Finding(
            name,
            Status.PROBLEM,
            f"{path} is in use by {who}",
            "End it before this one is started, or give each engine a path of its own",
        )
    if not os.access(path, os.R_OK | os.W_OK, effective_ids=True):
        return _not_writable(name, path)
    if refusal is not None:
        return Finding.of_refusal(name, str(refusal))
    found = f"{path} is a slab of {as_size(size)}, which no engine has open"
    if max_bytes is not None and max_bytes < size:
        found += f": the engine shrinks it to {as_size(max_bytes)}"
    return Finding(name, Status.OK, found)


def _bytes_needed(path: Path, max_bytes: int) -> int:
    """Return how many more bytes the slab, the file of a disk tier, will allocate. Assumes that the
    size of its blocks stays the same."""
    try:
        with SlabReader(path) as reader:
            stored, has = reader.superblock, reader.file.allocated_bytes
    except (OSError, SlabUnreadable):
        return max_bytes
    geometry = stored.geometry
    if max_bytes != stored.max_bytes:
        geometry = Geometry.within(max_bytes, geometry.payload_bytes)
    return max(0, geometry.file_bytes - has)


def _not_writable(name: str, path: Path) -> Finding:
    return Finding(
        name,
        Status.PROBLEM,
        f"uid {os.geteuid()} cannot write to {path}",
        "Let the user of the engine read and write it; check that it is mounted for writing",
    )


def _disk_file_system(at: str, mount: Mount) -> Finding:
    name, found = f"{at}.file_system", f"{mount.kind}, mounted at {mount.point}"
    if mount.is_in_memory:
        return Finding(
            name,
            Status.WARNING,
            f"{found}: that is memory, and a restart of the machine loses its blocks",
            "Give a path on a disk, or more cpu_bytes_to_use (--cpu)",
        )
    if mount.is_over_network:
        return Finding(
            name,
            Status.WARNING,
            f"{found}: a slab is made for a local disk",
            "Use an fs tier (--fs) there, which is made for directories over a network",
        )
    if mount.is_of_container:
        return Finding(
            name,
            Status.WARNING,
            f"{found}: that is the container's own layer, which is removed with the container",
            "Mount a volume, and give a path there",
        )
    return Finding(name, Status.OK, found)


def _o_direct(at: str, path: Path, wanted: bool | None) -> Finding:
    name = f"{at}.o_direct"
    if wanted is False:
        return Finding(name, Status.OK, "turned off: blocks pass through the page cache")
    can = allows_o_direct(path.parent)
    if can is None:
        return Finding(name, Status.OK, f"not tried: no file could be made in {path.parent}")
    if can:
        return Finding(name, Status.OK, "reads and writes bypass the page cache")
    return Finding(
        name,
        Status.PROBLEM if wanted else Status.WARNING,
        "the file system does not allow it: blocks would pass through the page cache, which costs "
        "memory and processor time",
        "Put the file on a disk of its own (ext4, XFS)"
        + (', or leave use_o_direct at "auto"' if wanted else ""),
    )


# --- fs tiers ----------------------------------------------------------------------------------


def check_fs_tier(at: str, options: FsOptions) -> Iterator[Finding]:
    """Check one tier. `at`: the position of its entry, such as `secondary_tiers[0]`."""
    name = f"{at}.root_dir"
    try:
        root = options.root_dir.resolve()
        total = _bytes_there(root)
        yield _root(name, root)
        yield _root_file_system(at, root)
        yield _root_room(at, options, root if root.exists() else root.parent, total)
    except RootRefused as refused:
        yield Finding.of_refusal(name, str(refused))
    except LedgerVersion as problem:
        yield Finding(
            name,
            Status.PROBLEM,
            f"{options.root_dir}: {problem}",
            "Use that version, or another directory",
        )
    except OSError as error:
        yield Finding.of_refusal(name, str(root_refusal(options.root_dir, error)))
    except RuntimeError as error:  # a link that leads to itself
        yield Finding(name, Status.PROBLEM, str(error), "Give another path")


def _bytes_there(root: Path) -> int:
    """Return the bytes of blocks in the directory, as counted in its ledger. Raises what an engine
    would raise at start."""
    if not root.exists():
        return 0
    require_ours(root)
    require_own(NoFollowTree(root), root)
    balance = read_balance(root)
    return 0 if balance is None else balance.total


def _root(name: str, root: Path) -> Finding:
    exists = root.exists()
    where = root if exists else root.parent
    if not os.access(where, os.R_OK | os.W_OK | os.X_OK, effective_ids=True):
        return _not_writable(name, where)
    if not exists:
        return Finding(name, Status.OK, f"the engine makes {root} when it starts")
    num_alive = sum(engine.is_alive for engine in read_engines(root))
    return Finding(name, Status.OK, f"{root} is there, and {num_alive} engines use it now")


def _root_file_system(at: str, root: Path) -> Finding:
    name = f"{at}.file_system"
    mount = mount_of(root)
    found = f"{mount.kind}, mounted at {mount.point}"
    if mount.is_in_memory:
        return Finding(
            name,
            Status.WARNING,
            f"{found}: that is memory, and a restart of the machine loses its blocks",
            "Give a directory on a disk or a server",
        )
    if mount.is_over_network:
        return Finding(name, Status.OK, f"{found}: engines on other hosts share it")
    if mount.point == Path("/"):
        return Finding(
            name,
            Status.WARNING,
            f"{found}: {root} is on the root file system of this machine or container",
            "If engines on several hosts are to share it, or if it is to outlive the container, "
            "mount the file system first",
        )
    return Finding(name, Status.OK, f"{found}: engines on this host share it")


def _root_room(at: str, options: FsOptions, directory: Path, total: int) -> Finding:
    """Check the free space. `total`: bytes that the tier has there already."""
    name = f"{at}.room"
    answer = os.statvfs(directory)
    size, free = answer.f_blocks * answer.f_frsize, answer.f_bavail * answer.f_frsize
    found = (
        f"{as_size(total)} of {as_size(options.max_bytes)} are used; the file system has "
        f"{as_size(size)}, {as_size(free)} of it free"
    )
    if options.min_free_bytes > free + total:
        return Finding(
            name,
            Status.PROBLEM,
            f"{found}, and {as_size(options.min_free_bytes)} are to stay free: nothing can be "
            "stored",
            "Make room, or give a smaller min_free_bytes",
        )
    if options.max_bytes - total > free - options.min_free_bytes:
        return Finding(
            name,
            Status.WARNING,
            f"{found}: it fills up before the tier reaches max_bytes",
            "Give a smaller size or make room; min_free_bytes keeps some of it for others",
        )
    return Finding(name, Status.OK, found)
