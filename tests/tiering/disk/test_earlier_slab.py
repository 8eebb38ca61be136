"""A slab that an earlier release wrote is found warm: its blocks are found, loaded and verified."""

from __future__ import annotations

import tarfile
from pathlib import Path

import pytest

from kvtier.base import LookupResult, OffloadKey, ReqContext
from kvtier.tiering.disk.manager import EVICTED, RESIDENT
from kvtier.tiering.disk.reader import SlabReader
from kvtier.tiering.io.page import PAGE_BYTES
from tests.tiering.disk.earlier_slab import (
    FOREIGN,
    KEYS,
    MAX_BYTES,
    NOTE,
    USED_LAST,
    Engine,
    config_of,
    engine,
    payload_of,
)

ARCHIVE = Path(__file__).parents[2] / "data" / "earlier_slab.tar.xz"
FINGERPRINT = "e44c84590a309c7d6433784ca41a0658"
"""Of "our weights". Another one means that `OffloadingConfig.fingerprint` has changed, and that no
tier of a running system would be warm after an upgrade."""


@pytest.fixture(params=["clean", "killed"])
def path(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    """The slab after a shutdown, and after a kill."""
    with tarfile.open(ARCHIVE) as archive:
        archive.extractall(tmp_path, filter="data")
    slab: Path = tmp_path / f"{request.param}.slab"
    slab.chmod(0o600)
    return slab


def assert_warm(running: Engine, keys: list[OffloadKey]) -> None:
    request = ReqContext("")
    assert {running.tier.lookup(key, request) for key in keys} == {LookupResult.HIT}
    result, rows = running.load(keys)
    assert result.success
    assert rows == [payload_of(key) for key in keys]
    assert not running.tier.take_seal_failures()


def test_the_fingerprint_is_that_of_the_earlier_release() -> None:
    assert config_of("our weights").fingerprint().hex() == FINGERPRINT


@pytest.mark.parametrize("max_bytes", [MAX_BYTES, None])
def test_all_blocks_are_found_loaded_and_verified(path: Path, max_bytes: int | None) -> None:
    size = path.stat().st_size
    with engine(path, "our weights", max_bytes) as ours:
        assert_warm(ours, KEYS)
        assert ours.tier.get_stats().gauges[RESIDENT] == len(KEYS)
        assert ours.tier.lookup(FOREIGN[0], ReqContext("")) is LookupResult.MISS
        if path.name.startswith("clean"):
            assert ours.tier.kept_note() == NOTE
    assert path.stat().st_size == size


def test_the_blocks_of_another_namespace_are_found_by_its_own_engine(path: Path) -> None:
    with engine(path, "other weights") as other:
        assert_warm(other, FOREIGN)


def test_without_an_index_all_blocks_are_found_in_the_slots(path: Path) -> None:
    with SlabReader(path) as reader:
        geometry = reader.superblock.geometry
    with path.open("r+b") as file:
        file.seek(geometry.index_offset)
        file.write(bytes(geometry.num_index_pages * PAGE_BYTES))
    with engine(path, "our weights") as ours:
        assert_warm(ours, KEYS)


@pytest.mark.parametrize("path", ["clean"], indirect=True)
def test_blocks_used_last_are_evicted_last(path: Path) -> None:
    """A killed engine has not written its last uses: it does so every two seconds."""
    with engine(path, "our weights") as ours:
        num_slots = ours.tier.capacity_blocks
        assert num_slots is not None
        new = [OffloadKey(b"new %d" % number) for number in range(num_slots - len(USED_LAST))]
        for start in range(0, len(new), 8):
            assert ours.store(new[start : start + 8]).success
        assert ours.tier.get_stats().counters[EVICTED] == len(KEYS) - len(USED_LAST)
        assert_warm(ours, USED_LAST)


def test_the_reader_lists_its_blocks(path: Path) -> None:
    with SlabReader(path) as reader:
        snapshot = reader.snapshot()
        assert len(snapshot.live_slots()) == len(KEYS) + len(FOREIGN)
        assert not snapshot.damaged_pages
