"""How much memory the I/O threads take for themselves."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from kvtier.tiering.disk.manager import DiskSecondaryTierManager
from tests.tiering.disk.rig import disk_harness

MIB = 1 << 20


@pytest.mark.parametrize(
    ("row_bytes", "io_threads", "has_buffers"),
    [
        (64 << 10, None, True),
        (2 * MIB, None, True),
        (8 * MIB, None, True),
        (12 * MIB, None, False),
        (2 * MIB, 8, True),
        (2 * MIB, 64, False),
        (4096, 1, True),
    ],
)
def test_all_threads_have_buffers_or_none(
    tmp_path: Path, row_bytes: int, io_threads: int | None, has_buffers: bool
) -> None:
    """And all of them together take a quarter of a GiB at most."""
    options: dict[str, Any] = {} if io_threads is None else {"io_threads": io_threads}
    path = tmp_path / "kv.slab"
    with disk_harness(path, 2, row_bytes=row_bytes, num_rows=2, **options) as harness:
        assert isinstance(harness.tier, DiskSecondaryTierManager)
        lanes = harness.tier._io.lanes
        taken = sum(len(lane._pages) * lane._stride for lane in lanes)
        assert {lane._has_buffers for lane in lanes} == {has_buffers}
        keys = harness.keys(2)
        for job in (harness.store(keys), harness.load(keys)):
            [report] = harness.wait_for(job)
            assert report.result.success
    assert taken <= (256 * MIB if has_buffers else 4 * MIB)
