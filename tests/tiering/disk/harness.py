"""Disk tiers for tests, driven by the harness of the conformance kit."""

from __future__ import annotations

import errno
import os
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Any
from unittest.mock import patch

from kvtier.base import OffloadingSpec
from kvtier.testing import TierHarness
from kvtier.tiering.base import SecondaryTierManager
from kvtier.tiering.disk.file import SlabFile
from kvtier.tiering.disk.layout import Geometry
from kvtier.tiering.disk.manager import DiskSecondaryTierManager
from kvtier.tiering.io.page import PAGE_BYTES
from tests.tiering.patience import PATIENCE_S, silent_queues

ROW_BYTES = 8192


def bytes_for(num_blocks: int, row_bytes: int = ROW_BYTES) -> int:
    """The `max_bytes` for a slab of `num_blocks` blocks."""
    return Geometry(row_bytes, num_blocks).needed_bytes


def disk_harness(
    path: Path,
    num_blocks: int = 32,
    *,
    row_bytes: int = ROW_BYTES,
    num_rows: int = 64,
    namespace: str = "these weights",
    **options: Any,
) -> TierHarness:
    """A harness around a disk tier of `num_blocks` blocks. Raises what the tier's constructor
    raises."""
    options.setdefault("max_bytes", bytes_for(num_blocks, row_bytes))

    def make_tier(spec: OffloadingSpec, view: memoryview) -> SecondaryTierManager:
        return DiskSecondaryTierManager(spec, view, "disk", path=str(path), **options)

    return TierHarness(
        make_tier,
        num_slots=num_rows,
        row_bytes=row_bytes,
        patience_s=PATIENCE_S,
        namespace=namespace,
    )


def disk_of(harness: TierHarness) -> DiskSecondaryTierManager:
    assert isinstance(harness.tier, DiskSecondaryTierManager)
    return harness.tier


def du(path: Path) -> int:
    """Bytes on the disk, as `du -B1` prints them."""
    return os.stat(path).st_blocks * 512


def silent_disk(tier: SecondaryTierManager) -> AbstractContextManager[None]:
    """Reads and writes reach the disk, but none is seen to end until the context is left."""
    assert isinstance(tier, DiskSecondaryTierManager)
    return silent_queues(lane._queue for lane in tier._mover.lanes)


@contextmanager
def bad_sectors(*offsets: int, writing_mends: bool = True) -> Iterator[None]:
    """Make these pages of every slab unreadable until they are written (`writing_mends`), or
    unreadable and unwritable. Applies to synchronous I/O only, not to blocks."""
    bad = set(offsets)
    read, write = SlabFile.read, SlabFile.write_aligned

    def fail_if_bad(offset: int, length: int) -> None:
        if any(offset <= page < offset + length for page in bad):
            raise OSError(errno.EIO, os.strerror(errno.EIO))

    def read_or_fail(file: SlabFile, offset: int, length: int) -> bytes:
        fail_if_bad(offset, length)
        return read(file, offset, length)

    def write_or_fail(file: SlabFile, offset: int, data: memoryview) -> None:
        if writing_mends:
            bad.difference_update(range(offset, offset + len(data), PAGE_BYTES))
        fail_if_bad(offset, len(data))
        write(file, offset, data)

    with (
        patch.object(SlabFile, "read", read_or_fail),
        patch.object(SlabFile, "write_aligned", write_or_fail),
    ):
        yield


def is_mapped(address: int) -> bool:
    """True if a primary tier's memory is mapped at this address."""
    for line in Path("/proc/self/maps").read_text().splitlines():
        start, end = (int(number, 16) for number in line.split()[0].split("-"))
        if start <= address < end:
            return "kvtier" in line
    return False
