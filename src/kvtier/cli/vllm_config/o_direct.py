"""Whether files in a directory can bypass the page cache, tried without leaving one behind."""

from __future__ import annotations

import os
from pathlib import Path

from kvtier.tiering.disk.file import SlabFile
from kvtier.tiering.io.page import PAGE_BYTES

__all__ = ["allows_o_direct"]


def allows_o_direct(directory: Path) -> bool | None:
    """None: it could not be tried, for want of room, of rights, or of files without a name."""
    try:
        file = SlabFile(directory, os.O_TMPFILE | os.O_RDWR)
    except OSError:
        return None
    try:
        file.write(0, bytes(PAGE_BYTES))
        return file.use_o_direct()
    except OSError:
        return None
    finally:
        file.close()
