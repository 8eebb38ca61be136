"""The keys of the disk tier: accepted values and refusals."""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from kvtier.base import Locality, Medium
from kvtier.config import ConfigError, OffloadingParallelConfig
from kvtier.testing import TierHarness
from kvtier.testing.harness import sample_spec
from kvtier.tiering.disk.manager import DiskSecondaryTierManager
from kvtier.tiering.disk.options import DiskOptions
from kvtier.tiering.disk.ownership import SlabRefused
from kvtier.tiering.factory import SecondaryTierFactory
from tests.config.sample import make_config
from tests.tiering.disk.harness import ROW_BYTES, bytes_for, disk_harness
from tests.tiering.driven_manager import PlainSpec

ONE = OffloadingParallelConfig()


def parsed(tmp_path: Path, parallel: OffloadingParallelConfig = ONE, **given: Any) -> DiskOptions:
    options = DiskOptions.parse({"path": str(tmp_path / "kv.slab")} | given).for_replica(parallel)
    options.require_place()
    return options


def test_a_path_is_enough(tmp_path: Path) -> None:
    assert parsed(tmp_path) == DiskOptions(tmp_path / "kv.slab", None, "lru", None, None)


def test_everything_can_be_set(tmp_path: Path) -> None:
    options = parsed(
        tmp_path, max_bytes="1.5GiB", eviction_policy="arc", io_threads=4, use_o_direct=False
    )
    assert options == DiskOptions(tmp_path / "kv.slab", 3 << 29, "arc", 4, False)
    assert parsed(tmp_path, use_o_direct="auto").use_o_direct is None
    assert parsed(tmp_path, use_o_direct=True).use_o_direct is True
    assert parsed(tmp_path, io_threads=None, max_bytes=None) == parsed(tmp_path)


@pytest.mark.parametrize(
    ("name", "size", "index", "expected"),
    [
        ("kv.slab", 1, 0, "kv.slab"),
        ("kv.slab", 2, 0, "kv-dp0.slab"),
        ("kv.slab", 2, 1, "kv-dp1.slab"),
        ("kv", 4, 3, "kv-dp3"),
        ("kv.v2.slab", 2, 1, "kv.v2-dp1.slab"),
        (".kv", 2, 1, ".kv-dp1"),
        ("kv.slab", 1, 2, "kv-dp2.slab"),
    ],
)
def test_every_replica_has_a_path_of_its_own(
    tmp_path: Path, name: str, size: int, index: int, expected: str
) -> None:
    parallel = OffloadingParallelConfig(data_parallel_index=index, data_parallel_size=size)
    options = parsed(tmp_path, parallel, path=str(tmp_path / name))
    assert options.path == tmp_path / expected


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("path", "kv.slab"),
        ("path", ""),
        ("path", "  "),
        ("path", "/tmp/"),
        ("path", "/"),
        ("path", "/tmp/a\0b"),
        ("path", 7),
        ("path", None),
        ("path", "/there/is/no/such/directory/kv.slab"),
        ("max_bytes", 0),
        ("max_bytes", -1),
        ("max_bytes", "much"),
        ("max_bytes", True),
        ("max_bytes", "64G"),
        ("eviction_policy", ""),
        ("eviction_policy", 3),
        ("io_threads", 0),
        ("io_threads", 65),
        ("io_threads", 2.5),
        ("io_threads", "two"),
        ("io_threads", True),
        ("use_o_direct", "yes"),
        ("use_o_direct", 1),
    ],
)
def test_what_cannot_work_is_refused_by_key(tmp_path: Path, key: str, value: Any) -> None:
    with pytest.raises(ConfigError) as refused:
        parsed(tmp_path, **{key: value})
    (problem,) = refused.value.problems
    assert problem.key == key
    assert problem.allowed
    assert problem.remedy


def test_all_that_is_wrong_is_said_at_once(tmp_path: Path) -> None:
    with pytest.raises(ConfigError) as refused:
        parsed(tmp_path, max_bytes=-1, io_threads=0, use_o_direct="no")
    keys = {problem.key for problem in refused.value.problems}
    assert keys == {"max_bytes", "io_threads", "use_o_direct"}


# --- the tier itself ---------------------------------------------------------------------------


def test_too_little_is_refused_with_what_is_enough(tmp_path: Path) -> None:
    path = tmp_path / "kv.slab"
    with pytest.raises(SlabRefused, match=f"give {bytes_for(1)} or more"):
        disk_harness(path, max_bytes=bytes_for(1) - 1)
    assert not path.exists()
    with disk_harness(path, max_bytes=bytes_for(1)) as harness:
        (report,) = harness.wait_for(harness.store(harness.keys(1)))
        assert report.result.success


def test_a_new_slab_needs_a_size_and_an_old_one_does_not(tmp_path: Path) -> None:
    path = tmp_path / "kv.slab"
    with pytest.raises(SlabRefused, match="max_bytes"):
        disk_harness(path, max_bytes=None)
    with disk_harness(path, 9):
        pass
    size = path.stat().st_size
    with disk_harness(path, max_bytes=None) as harness:
        assert harness.call("get_stats").gauges["kvtier_disk_capacity_blocks"] == 9
    assert path.stat().st_size == size


@pytest.mark.parametrize("content", [b"", b"some notes", bytes(100_000)])
def test_a_file_that_is_no_slab_is_not_touched(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "kv.slab"
    path.write_bytes(content)
    with pytest.raises(SlabRefused, match="is not a slab"):
        disk_harness(path)
    assert path.read_bytes() == content


def test_a_directory_is_refused(tmp_path: Path) -> None:
    (tmp_path / "kv.slab").mkdir()
    with pytest.raises(SlabRefused, match="file"):
        disk_harness(tmp_path / "kv.slab")


def test_a_link_to_nowhere_is_followed_or_refused(tmp_path: Path) -> None:
    """The slab must not be made beside the link, which may be on another disk."""
    link, target = tmp_path / "kv.slab", tmp_path / "elsewhere.slab"
    link.symlink_to(target)
    with suppress(SlabRefused), disk_harness(link):
        assert target.is_file()
    assert link.is_symlink()


def test_weights_that_nobody_names_are_refused(tmp_path: Path) -> None:
    """After a restart, blocks of other weights with the same name would be taken for this
    model's."""

    def make_tier(_: object, view: memoryview) -> DiskSecondaryTierManager:
        return DiskSecondaryTierManager(
            PlainSpec(make_config()),
            view,
            "disk",
            path=str(tmp_path / "kv.slab"),
            max_bytes=bytes_for(4),
        )

    with pytest.raises(ConfigError, match="cache_namespace"):
        TierHarness(make_tier)
    assert not list(tmp_path.iterdir())


def test_an_unknown_policy_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="eviction_policy"):
        disk_harness(tmp_path / "kv.slab", eviction_policy="fifo-of-mine")
    assert not list(tmp_path.iterdir())


def test_rows_that_are_not_aligned_are_refused(tmp_path: Path) -> None:
    rows = memoryview(bytearray(5 * ROW_BYTES))[1 : 4 * ROW_BYTES + 1].cast("B", (4, ROW_BYTES))
    with pytest.raises(ValueError, match="aligned"):
        DiskSecondaryTierManager(
            sample_spec(ROW_BYTES, 4, "weights", "engine"),
            rows,
            "disk",
            path=str(tmp_path / "kv.slab"),
            max_bytes=bytes_for(4),
        )
    assert not list(tmp_path.iterdir())


def test_it_is_found_by_its_type() -> None:
    tier_cls = SecondaryTierFactory.get_secondary_tier_cls({"type": "disk", "path": "/x"})
    assert tier_cls is DiskSecondaryTierManager


def test_where_it_keeps_blocks(tmp_path: Path) -> None:
    with disk_harness(tmp_path / "kv.slab") as harness:
        assert harness.tier.medium is Medium.STORAGE
        assert harness.tier.locality is Locality.LOCAL
