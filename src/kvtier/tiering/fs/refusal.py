"""Why a root directory cannot be used, and what to do about it."""

from __future__ import annotations

import errno
import os
from pathlib import Path

from kvtier.tiering.base import TierRefused

__all__ = ["RootRefused", "refusal_for"]


class RootRefused(TierRefused):
    """The directory cannot be used; says why, and the remedy."""


def refusal_for(path: Path, error: OSError) -> RootRefused:
    remedies = {
        errno.EACCES: f"let the user of this engine (uid {os.geteuid()}) read and write all of it",
        errno.EPERM: "see whether the container or the export forbids it (root_squash)",
        errno.EROFS: "mount its file system for writing, or give another directory",
        errno.ENOTDIR: "give the path of a directory",
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
    remedy = remedies.get(error.errno or 0, "mend that, or give another directory")
    return RootRefused(f"{path}: {error.strerror or error}: {remedy}")
