"""Whether an fs tier can work in its directory on this machine. Nothing is changed there."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

from kvtier.cli.store.amounts import as_size
from kvtier.cli.vllm_config.file_systems import mount_of
from kvtier.cli.vllm_config.findings import Finding, Status
from kvtier.tiering.fs.below import Below
from kvtier.tiering.fs.ledger import LedgerVersion
from kvtier.tiering.fs.options import FsOptions
from kvtier.tiering.fs.ownership import require_own
from kvtier.tiering.fs.reader import read_balance, read_seats
from kvtier.tiering.fs.refusal import RootRefused, refusal_for
from kvtier.tiering.fs.root import require_ours

__all__ = ["check_fs_tier"]


def check_fs_tier(at: str, options: FsOptions) -> Iterator[Finding]:
    """`at`: where the tier's entry stands."""
    name = f"{at}.root_dir"
    try:
        root = options.root_dir.resolve()
        total = _bytes_there(root)
        yield _root(name, root)
        yield _file_system(at, root)
        yield _room(at, options, root if root.exists() else root.parent, total)
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
        yield Finding.of_refusal(name, str(refusal_for(options.root_dir, error)))
    except RuntimeError as error:  # a link that leads to itself
        yield Finding(name, Status.PROBLEM, str(error), "Give another path")


def _bytes_there(root: Path) -> int:
    """What the ledger says. Raises what the start of an engine would."""
    if not root.exists():
        return 0
    require_ours(root)
    require_own(Below(root), root)
    balance = read_balance(root)
    return 0 if balance is None else balance.total


def _root(name: str, root: Path) -> Finding:
    exists = root.exists()
    where = root if exists else root.parent
    if not os.access(where, os.R_OK | os.W_OK | os.X_OK, effective_ids=True):
        return Finding(
            name,
            Status.PROBLEM,
            f"uid {os.geteuid()} cannot write to {where}",
            "Let the user of the engine read and write it; see whether it is mounted for writing",
        )
    if not exists:
        return Finding(name, Status.OK, f"{root} is made at the start")
    num_alive = sum(seat.is_alive for seat in read_seats(root))
    return Finding(name, Status.OK, f"{root} is there, and {num_alive} engines use it now")


def _file_system(at: str, root: Path) -> Finding:
    name = f"{at}.file_system"
    mount = mount_of(root)
    found = f"{mount.kind}, mounted at {mount.point}"
    if mount.is_in_memory:
        return Finding(
            name,
            Status.WARNING,
            f"{found}: that is memory, and its blocks go with a restart of the machine",
            "Give a directory on a disk or a server",
        )
    if mount.is_over_network:
        return Finding(name, Status.OK, f"{found}: engines on other hosts share it")
    if mount.point == Path("/"):
        return Finding(
            name,
            Status.WARNING,
            f"{found}: {root} is on the file system of this system itself, or of this container",
            "If engines on several hosts are to share it, or if it is to outlive the container, "
            "mount the file system first",
        )
    return Finding(name, Status.OK, f"{found}: engines on this host share it")


def _room(at: str, options: FsOptions, directory: Path, total: int) -> Finding:
    """`total`: what the tier has there already."""
    name = f"{at}.room"
    answer = os.statvfs(directory)
    size, free = answer.f_blocks * answer.f_frsize, answer.f_bavail * answer.f_frsize
    found = (
        f"{as_size(total)} of {as_size(options.max_bytes)} are there; its file system has "
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
            f"{found}: it is full before the tier has what it may take",
            "Give a smaller size or make room; min_free_bytes keeps some of it for others",
        )
    return Finding(name, Status.OK, found)
