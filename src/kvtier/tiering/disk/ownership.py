"""Refuses slabs, the files of disk tiers, that this process must not use: a slab belongs to one
engine at a time, and no other user may be able to write to it.

Every refusal names the reason and the remedy.
"""

from __future__ import annotations

import errno
import os
import shlex
import socket
import stat
import time
from datetime import UTC, datetime
from pathlib import Path

from kvtier.config.errors import printable
from kvtier.tiering.base import TierRefused
from kvtier.tiering.disk.file import NotAFile, SlabFile, lock_within, read_holder
from kvtier.tiering.disk.layout import Holder

__all__ = [
    "SlabRefused",
    "foreign_refusal",
    "lock_slab",
    "refusal_for",
    "refuse_orphans",
    "this_process",
]

_LOCK_PATIENCE_S = 1.0
_ORPHAN_PAUSE_S = 0.1


class SlabRefused(TierRefused):
    """The slab cannot be used. The message names the reason and the remedy."""


def refusal_for(path: Path, error: OSError) -> SlabRefused:
    """The refusal of a path on which the operating system has reported `error`."""
    remedies = {
        errno.EACCES: f"let the user of this engine (uid {os.geteuid()}) read and write it, and "
        "create files in its directory",
        errno.EPERM: "see whether the file is immutable (lsattr), or forbidden by the container",
        errno.EROFS: "mount its file system for writing, or give another path",
        errno.ENOENT: "make its directory, or mount the disk first",
        errno.EISDIR: "give the path of a file",
        errno.EMFILE: "let this process have more files open (ulimit -n)",
        errno.ENFILE: "let the system have more files open (sysctl fs.file-max)",
        errno.EIO: "look at the disk (dmesg)",
    }
    remedy = remedies.get(error.errno or 0, "fix that, or give another path")
    return SlabRefused(f"{path}: {error.strerror or error}: {remedy}")


def foreign_refusal(file: SlabFile) -> SlabRefused | None:
    """The refusal of a file that another user owns or may write to; None if there is no such user.
    A seal is a digest, not a signature, so it does not protect against blocks of other users."""
    status = os.fstat(file.fd)
    us, path = os.geteuid(), shlex.quote(str(file.path))
    if status.st_uid != us:
        problem = f"belongs to uid {status.st_uid}, and this process runs as uid {us}"
        remedy = f"chown {us} {path}"
    elif status.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
        problem = f"may be written by others (mode {stat.S_IMODE(status.st_mode):o})"
        remedy = f"chmod 600 {path}"
    else:
        return None
    return SlabRefused(
        f"{file.path} {problem}, so others may have written its blocks: remove the file, give "
        f"another path, or, if what is in it can be trusted, {remedy}"
    )


# --- one engine at a time ----------------------------------------------------------------------


def lock_slab(file: SlabFile) -> None:
    """Lock the slab for this process. Waits up to `_LOCK_PATIENCE_S` for an engine that is ending,
    or for `kvtier store`. Then raises `SlabRefused` with the name of the holder."""
    if not lock_within(file.fd, _LOCK_PATIENCE_S):
        raise SlabRefused(_in_use(file.path, read_holder(file)))


def refuse_orphans(path: Path, patience_s: float) -> None:
    """Raise `SlabRefused` if an engine whose parent process has ended holds the slab, and does not
    release it within `patience_s` seconds. Writes nothing.

    The vLLM connector calls this before the model is loaded. Without it, the engine would be
    refused only minutes later, when it opens the slab. A file that cannot be opened, locked or read
    is no error here: `open_slab` refuses it later.
    """
    try:
        file = SlabFile(Path(os.path.realpath(path)), os.O_RDONLY)
    except (NotAFile, OSError):
        return
    try:
        deadline = time.monotonic() + patience_s
        while file.is_locked():
            holder = read_holder(file)
            if holder is None or holder.pid == os.getpid() or not _has_lost_its_parent(holder):
                return
            if time.monotonic() > deadline:
                raise SlabRefused(_in_use(file.path, holder))
            time.sleep(_ORPHAN_PAUSE_S)
    except OSError:
        return
    finally:
        file.close()


def _in_use(path: Path, holder: Holder | None) -> str:
    who, remedy = "another process", "give each engine and each tier a path of its own"
    if holder is not None:
        place = f"process {holder.pid} on {holder.host}"
        if holder.pid == os.getpid() and _is_found_by_pid(holder):
            place = "this very process"
        elif _has_lost_its_parent(holder):
            place += f", whose parent, process {holder.parent_pid}, has ended"
            remedy = (
                f"if that parent was its server, the engine serves nobody: end it with "
                f"`kill {holder.pid}`, and start again. Otherwise {remedy}"
            )
        since = datetime.fromtimestamp(holder.since_ns / 1e9, UTC)
        who = f'the engine "{holder.engine_id}" ({place}, since {since:%Y-%m-%d %H:%M:%S} UTC)'
    return f"{path} is in use by {printable(who)}: {remedy}"


# --- processes ---------------------------------------------------------------------------------


def this_process(engine_id: str) -> Holder:
    """This process as a holder, to be recorded in the slab."""
    return Holder(
        engine_id,
        os.getpid(),
        socket.gethostname(),
        time.time_ns(),
        os.getppid(),
        _pid_namespace(),
        _parent_and_start("self")[1],
    )


def _has_lost_its_parent(holder: Holder) -> bool:
    """True if the holder is running, and its parent is not the one it had when it opened the
    slab. False if that is unknown."""
    if holder.parent_pid == 0 or not _is_found_by_pid(holder):
        return False
    return _parent_and_start(holder.pid)[0] not in (0, holder.parent_pid)


def _is_found_by_pid(holder: Holder) -> bool:
    """True if `holder.pid` names the holder as seen from this process. False if that pid may belong
    to a process of another container, or to a process that was started after the holder ended."""
    return (
        holder.host == socket.gethostname()
        and holder.pid_namespace != 0
        and holder.started_ticks != 0
        and holder.pid_namespace == _pid_namespace()
        and holder.started_ticks == _parent_and_start(holder.pid)[1]
    )


def _pid_namespace() -> int:
    """Inode of this process's pid namespace; 0: unknown."""
    try:
        return os.stat("/proc/self/ns/pid").st_ino
    except OSError:
        return 0


def _parent_and_start(pid: int | str) -> tuple[int, int]:
    """Parent pid of a process, and its start in clock ticks since boot. (0, 0) if unknown."""
    try:
        stat_line = Path(f"/proc/{pid}/stat").read_bytes()  # the process's name may not be UTF-8
    except OSError:
        return 0, 0
    fields = stat_line.rpartition(b")")[2].split()  # begins with the third field
    return int(fields[1]), int(fields[19])
