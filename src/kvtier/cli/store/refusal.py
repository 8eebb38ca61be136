"""Why `kvtier store` did not do what it was asked."""

from __future__ import annotations

import errno
import os
from collections.abc import Sequence
from pathlib import Path

__all__ = ["NotDone", "StoreRefused", "explain_os_error", "no_such_namespace", "not_a_root"]

_WHAT_TO_GIVE = (
    "give the path of a slab file, the `path` of a disk tier, or the `root_dir` of an fs tier"
)


class StoreRefused(Exception):
    """It cannot be done; says why, and the remedy."""


class NotDone(Exception):
    """Someone has not made way in time; says what happens next."""


def no_such_namespace(wanted: str, there: Sequence[str]) -> StoreRefused:
    return StoreRefused(
        f"no block is in a namespace that begins with {wanted}. There are: "
        f"{', '.join(there) or 'none'}"
    )


def not_a_root(path: Path, root_around: Path | None) -> StoreRefused:
    if root_around is not None:
        return StoreRefused(f"{path} is inside of the root of an fs tier: give {root_around}")
    return StoreRefused(f"{path} is a directory, and no root of an fs tier: {_WHAT_TO_GIVE}")


def explain_os_error(path: Path, error: OSError) -> str:
    """What the system said about the store at `path`, and what to do."""
    if error.errno == errno.ENOENT:
        return f"there is no {path}: {_WHAT_TO_GIVE}"
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
