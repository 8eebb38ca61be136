"""Whether a disk tier can work at its path on this machine. Nothing is changed there."""

from __future__ import annotations

import os
from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path

from kvtier.cli.store.amounts import as_size
from kvtier.cli.vllm_config.file_systems import Mount, mount_of
from kvtier.cli.vllm_config.findings import Finding, Status
from kvtier.cli.vllm_config.o_direct import allows_o_direct
from kvtier.tiering.disk.layout import Geometry
from kvtier.tiering.disk.options import DiskOptions
from kvtier.tiering.disk.reader import SlabReader, SlabUnreadable
from kvtier.tiering.disk.refusal import foreign_refusal, refusal_for

__all__ = ["DiskChecks"]


class DiskChecks:
    """Of all disk tiers of one engine, in their order: those on one file system share its room."""

    def __init__(self) -> None:
        self._claimed: dict[int, int] = {}
        """By device, what the tiers so far will take there besides what they have."""

    def findings(self, at: str, options: DiskOptions) -> Iterator[Finding]:
        """`at`: where the tier's entry stands."""
        try:
            yield from self._findings(at, options)
        except OSError as error:
            yield Finding.of_refusal(f"{at}.path", str(refusal_for(options.path, error)))
        except RuntimeError as error:  # a link that leads to itself
            yield Finding(f"{at}.path", Status.PROBLEM, str(error), "Give another path")

    def _findings(self, at: str, options: DiskOptions) -> Iterator[Finding]:
        path = options.path.resolve()  # as the tier does it
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
        yield _file_system(at, mount_of(directory))
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


# --- the slab ----------------------------------------------------------------------------------


def _new_slab(at: str, path: Path, options: DiskOptions) -> Finding:
    name, directory = f"{at}.path", path.parent
    if options.max_bytes is None:
        return Finding(
            name, Status.PROBLEM, f"there is no slab at {path} yet", "Give a size, and it is made"
        )
    if not os.access(directory, os.W_OK | os.X_OK, effective_ids=True):
        return _not_writable(name, directory)
    return Finding(name, Status.OK, f"there is no slab at {path} yet: it is made at the start")


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
        return Finding.of_refusal(name, str(refusal_for(path, error)))
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
    found = f"{path} is a slab of {as_size(size)}, which nobody has open"
    if max_bytes is not None and max_bytes < size:
        found += f": it is made smaller, {as_size(max_bytes)}"
    return Finding(name, Status.OK, found)


def _bytes_needed(path: Path, max_bytes: int) -> int:
    """What the slab will take besides what it has, with blocks as large as those in it."""
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
        "Let the user of the engine read and write it; see whether it is mounted for writing",
    )


# --- where it lies -----------------------------------------------------------------------------


def _file_system(at: str, mount: Mount) -> Finding:
    name, found = f"{at}.file_system", f"{mount.kind}, mounted at {mount.point}"
    if mount.is_in_memory:
        return Finding(
            name,
            Status.WARNING,
            f"{found}: that is memory, and its blocks go with a restart of the machine",
            "Give a path on a disk, or more --cpu",
        )
    if mount.is_over_network:
        return Finding(
            name,
            Status.WARNING,
            f"{found}: a slab is made for a local disk",
            "Use --fs there, which is made for directories over a network",
        )
    if mount.is_of_container:
        return Finding(
            name,
            Status.WARNING,
            f"{found}: that is the container's own layer, which goes with the container",
            "Mount a volume, and give a path there",
        )
    return Finding(name, Status.OK, found)


def _o_direct(at: str, path: Path, wanted: bool | None) -> Finding:
    name = f"{at}.o_direct"
    if wanted is False:
        return Finding(name, Status.OK, "not asked for: blocks pass through the page cache")
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
