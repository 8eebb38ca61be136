"""Why a root directory cannot be used, and what to do about it."""

from __future__ import annotations

import errno
import os
from pathlib import Path

from kvtier.config.redaction import printable
from kvtier.tiering.base import TierRefused
from kvtier.tiering.fs.ownership import NotOurs

__all__ = ["RootRefused", "refusal_for", "remedy_for"]


class RootRefused(TierRefused):
    """The directory cannot be used; says why, and the remedy."""


def remedy_for(path: Path, error: int) -> str:
    """What to do about an error number in a root."""
    remedies = {
        errno.ENOENT: "mount its file system again, or make the directory it is in; if it was "
        f"emptied or removed, run `kvtier store init {path}`",
        errno.EEXIST: "remove it: something that is no block has the name of one",
        errno.ELOOP: "remove it: links are not followed",
        errno.EACCES: f"let the user of this engine (uid {os.geteuid()}) read and write all of it",
        errno.EPERM: "see whether the container or the export forbids it (root_squash)",
        errno.EROFS: "mount its file system for writing, or give another directory",
        errno.ENOTDIR: "give the path of a directory; below it, remove what is in the place of "
        "one, such as a link, which is not followed",
        errno.EMFILE: "let this process have more files open (ulimit -n)",
        errno.ENFILE: "let the system have more files open (sysctl fs.file-max)",
        errno.ENOLCK: "mount it with locks (for NFS: without nolock, and with lockd running)",
        errno.ENOSYS: "use a file system with locks and hard links",
        errno.EOPNOTSUPP: "use a file system with locks and hard links",
        errno.ENOSPC: "make room on its file system",
        errno.EDQUOT: "raise this user's quota on its file system",
        errno.ESTALE: "mount it again",
        errno.ETIMEDOUT: "another engine or command has had its ledger locked for long: see which "
        "with `kvtier store stat`, and whether it hangs",
        errno.EIO: "look at the disk, or the server (dmesg)",
    }
    return remedies.get(error, "mend that, or give another directory")


def refusal_for(path: Path, error: OSError) -> RootRefused:
    if isinstance(error, NotOurs):  # says all of it
        return RootRefused(printable(str(error)))
    where = printable(str(error.filename or path))
    return RootRefused(f"{where}: {error.strerror or error}: {remedy_for(path, error.errno or 0)}")
