"""Why `kvtier store` did not do what it was asked."""

from __future__ import annotations

import errno
import os
from pathlib import Path

__all__ = ["NotCleared", "StoreRefused", "explain_os_error"]


class StoreRefused(Exception):
    """It cannot be done; says why, and the remedy."""


class NotCleared(Exception):
    """The engine has not obeyed in time; says what happens next."""


def explain_os_error(path: Path, error: OSError) -> str:
    """What the system said about the store at `path`, and what to do."""
    if error.errno == errno.ENOENT:
        return f"there is no {path}: give the path of a slab file, the `path` of a disk tier"
    if error.errno in (errno.EACCES, errno.EPERM):
        return f"no permission for {path}: run this as {_owner(path)}, or as root"
    if error.errno == errno.ENXIO:
        return f"{path} is not a regular file: give the path of a slab file"
    return f"{path}: {error.strerror or error}"


def _owner(path: Path) -> str:
    try:
        return f"the user it belongs to (uid {os.stat(path).st_uid})"
    except OSError:
        return "the user the engine runs as"
