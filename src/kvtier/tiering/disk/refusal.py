"""Why a slab cannot be used, and what to do about it."""

from __future__ import annotations

import errno
import os
from pathlib import Path

from kvtier.tiering.base import TierRefused

__all__ = ["SlabRefused", "refusal_for"]


class SlabRefused(TierRefused):
    """The slab cannot be used; says why, and the remedy."""


def refusal_for(path: Path, error: OSError) -> SlabRefused:
    remedies = {
        errno.EACCES: f"let the user of this engine (uid {os.geteuid()}) read and write it, and "
        "make files beside it",
        errno.EPERM: "see whether the file is immutable (lsattr), or forbidden by the container",
        errno.EROFS: "mount its file system for writing, or give another path",
        errno.EISDIR: "give the path of a file",
        errno.EMFILE: "let this process have more files open (ulimit -n)",
        errno.ENFILE: "let the system have more files open (sysctl fs.file-max)",
        errno.EIO: "look at the disk (dmesg)",
    }
    remedy = remedies.get(error.errno or 0, "mend that, or give another path")
    return SlabRefused(f"{path}: {error.strerror or error}: {remedy}")
