"""Why a slab cannot be used, and what to do about it."""

from __future__ import annotations

import errno
import os
import shlex
import stat
from pathlib import Path

from kvtier.tiering.base import TierRefused
from kvtier.tiering.disk.file import SlabFile

__all__ = ["SlabRefused", "foreign_refusal", "refusal_for"]


class SlabRefused(TierRefused):
    """The slab cannot be used; says why, and the remedy."""


def refusal_for(path: Path, error: OSError) -> SlabRefused:
    remedies = {
        errno.EACCES: f"let the user of this engine (uid {os.geteuid()}) read and write it, and "
        "make files beside it",
        errno.EPERM: "see whether the file is immutable (lsattr), or forbidden by the container",
        errno.EROFS: "mount its file system for writing, or give another path",
        errno.ENOENT: "make its directory, or mount the disk first",
        errno.EISDIR: "give the path of a file",
        errno.EMFILE: "let this process have more files open (ulimit -n)",
        errno.ENFILE: "let the system have more files open (sysctl fs.file-max)",
        errno.EIO: "look at the disk (dmesg)",
    }
    remedy = remedies.get(error.errno or 0, "mend that, or give another path")
    return SlabRefused(f"{path}: {error.strerror or error}: {remedy}")


def foreign_refusal(file: SlabFile) -> SlabRefused | None:
    """Why this process should not load blocks from the file: other users may have written them. A
    seal is a digest, not a signature."""
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
        f"{file.path} {problem}, so its blocks may be anyone's: remove the file, give another "
        f"path, or, if what is in it can be trusted, {remedy}"
    )
