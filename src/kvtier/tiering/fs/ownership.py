"""Whose files are: a command that root runs must not lock out the engines that own a directory."""

from __future__ import annotations

import os
from pathlib import Path

__all__ = ["give_to_owner_of"]


def give_to_owner_of(directory: Path, thing: int | Path) -> None:
    """Give a new file or directory to whom that directory belongs, if we may: as root."""
    if os.geteuid() == 0:
        owner = os.stat(directory)
        if owner.st_uid:
            os.chown(thing, owner.st_uid, owner.st_gid)
