"""Trials of the disk tier: in a small slab of their own beside the configured one.

A slab has one owner, and an engine may hold it. Its place, its directory and its file system are
tried; the configured slab itself is neither opened nor changed.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from kvtier.config.sizes import as_size
from kvtier.tiering.disk.layout import Geometry
from kvtier.tiering.disk.options import DiskOptions
from kvtier.tiering.trial import TrialBlocks, TrialProblem

__all__ = ["trial_slab"]


@contextmanager
def trial_slab(keys: Mapping[str, Any], blocks: TrialBlocks) -> Iterator[Mapping[str, Any]]:
    """Yield the keys for a slab beside the configured one, and remove it at the end. If this
    process is killed, the next engine that makes the configured slab or finds leftovers beside it
    removes it: its name is that of an unfinished slab."""
    options = DiskOptions.parse(keys)
    options.require_place()
    path = options.path.resolve()
    beside = path.with_name(f".{path.name}.trial-{os.getpid()}.new")
    needed = Geometry(blocks.payload_bytes, blocks.count).needed_bytes
    answer = os.statvfs(path.parent)
    free = answer.f_bavail * answer.f_frsize
    if free < needed:
        raise TrialProblem(
            f"the disk is full: the file system of {path.parent} has {as_size(free)} free, and the "
            f"trial takes {as_size(needed)}",
            "Make room there, or give the path of another disk",
            is_full=True,
        )
    try:
        yield {**keys, "path": str(beside), "max_bytes": needed}
    finally:
        beside.unlink(missing_ok=True)
