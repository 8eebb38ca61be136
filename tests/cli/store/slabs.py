"""Real slabs with real blocks, and functions that damage them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from kvtier.base import OffloadingSpec, OffloadKey
from kvtier.cli import main
from kvtier.testing import TierHarness
from kvtier.tiering.disk.layout import Geometry
from kvtier.tiering.disk.manager import DiskSecondaryTierManager
from kvtier.tiering.io.page import PAGE_BYTES

ROW_BYTES = 8192
NUM_SLOTS = 100
"""Needs more than one page of the index."""
GEOMETRY = Geometry(ROW_BYTES, NUM_SLOTS)
SLOT_BYTES = GEOMETRY.slot_bytes
NAMESPACE = "a model"


def engine_on(path: Path, namespace: str = NAMESPACE, geometry: Geometry = GEOMETRY) -> TierHarness:
    """A disk tier on the slab in this process. A context manager."""

    def make_tier(spec: OffloadingSpec, view: memoryview) -> DiskSecondaryTierManager:
        return DiskSecondaryTierManager(
            spec, view, "disk", path=str(path), max_bytes=geometry.needed_bytes
        )

    return TierHarness(make_tier, row_bytes=geometry.payload_bytes, namespace=namespace)


def fill(
    path: Path,
    keys: list[OffloadKey],
    namespace: str = NAMESPACE,
    geometry: Geometry = GEOMETRY,
) -> bytes:
    """Store these blocks, as those of one prompt. Returns the fingerprint."""
    with engine_on(path, namespace, geometry) as harness:
        if keys:
            assert harness.wait_for(harness.store(keys))[0].result.success
        return harness.fingerprint


def slot_of(path: Path, key: OffloadKey, geometry: Geometry = GEOMETRY) -> int:
    """The slot of a block, found by its key in the headers."""
    data = path.read_bytes()
    starts = [geometry.slot_offset(slot) for slot in range(geometry.num_slots)]
    found = [slot for slot, at in enumerate(starts) if data.find(key, at, at + PAGE_BYTES) >= 0]
    assert len(found) == 1
    return found[0]


def flip(path: Path, offset: int, mask: int = 1) -> None:
    with path.open("r+b") as file:
        file.seek(offset)
        byte = file.read(1)[0]
        file.seek(offset)
        file.write(bytes([byte ^ mask]))


def overwrite(path: Path, offset: int, data: bytes) -> None:
    with path.open("r+b") as file:
        file.seek(offset)
        file.write(data)


def read(path: Path, offset: int, length: int) -> bytes:
    with path.open("rb") as file:
        file.seek(offset)
        return file.read(length)


def run_store(
    capsys: pytest.CaptureFixture[str], command: str, path: Path | str, *options: str
) -> tuple[int, dict[str, Any]]:
    """The exit code and the JSON document of a `kvtier store` command."""
    code = main(["store", command, str(path), "--json", *options])
    document: dict[str, Any] = json.loads(capsys.readouterr().out)
    return code, document
