"""Accepted keys of the fs tier, and the errors for the others."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from kvtier.base import Locality, Medium
from kvtier.config import ConfigError
from kvtier.testing import TierHarness
from kvtier.testing.harness import sample_spec
from kvtier.tiering.factory import SecondaryTierFactory
from kvtier.tiering.fs.access import RootRefused
from kvtier.tiering.fs.manager import FsSecondaryTierManager
from kvtier.tiering.fs.options import FsOptions
from tests.config.sample import make_config
from tests.tiering.driven_manager import PlainSpec
from tests.tiering.fs.harness import ROW_BYTES, bytes_for, fs_harness


def parsed(tmp_path: Path, **given: Any) -> FsOptions:
    options = FsOptions.parse({"root_dir": str(tmp_path / "kv"), "max_bytes": "1GiB"} | given)
    options.require_place()
    return options


def test_a_root_and_a_size_are_enough(tmp_path: Path) -> None:
    assert parsed(tmp_path) == FsOptions(tmp_path / "kv", 1 << 30, 0, 2, 2)


def test_everything_can_be_set(tmp_path: Path) -> None:
    options = parsed(
        tmp_path, max_bytes="1.5GiB", min_free_bytes="2GB", n_read_threads=4, n_write_threads=256
    )
    assert options == FsOptions(tmp_path / "kv", 3 << 29, 2 * 10**9, 4, 256)
    assert parsed(tmp_path, min_free_bytes=0).min_free_bytes == 0
    assert parsed(tmp_path, root_dir=tmp_path).root_dir == tmp_path
    nothing = dict.fromkeys(("min_free_bytes", "n_read_threads", "n_write_threads"))
    assert parsed(tmp_path, **nothing) == parsed(tmp_path)


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("root_dir", "kv"),
        ("root_dir", "~/kv"),
        ("root_dir", ""),
        ("root_dir", "  "),
        ("root_dir", "/tmp/a\0b"),
        ("root_dir", 7),
        ("root_dir", None),
        ("root_dir", "/there/is/no/such/directory/kv"),
        ("max_bytes", None),
        ("max_bytes", 0),
        ("max_bytes", -1),
        ("max_bytes", "much"),
        ("max_bytes", True),
        ("max_bytes", "64G"),
        ("min_free_bytes", -1),
        ("min_free_bytes", "some"),
        ("min_free_bytes", False),
        ("n_read_threads", 0),
        ("n_read_threads", 257),
        ("n_read_threads", 2.5),
        ("n_read_threads", "two"),
        ("n_read_threads", True),
        ("n_write_threads", 0),
        ("n_write_threads", 257),
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
    wrong = {
        "root_dir": "here",
        "max_bytes": -1,
        "min_free_bytes": -1,
        "n_read_threads": 0,
        "n_write_threads": "x",
    }
    with pytest.raises(ConfigError) as refused:
        parsed(tmp_path, **wrong)
    assert {problem.key for problem in refused.value.problems} == wrong.keys()


def test_hardly_any_room_is_refused_with_what_is_enough(tmp_path: Path) -> None:
    options = parsed(tmp_path, max_bytes=10**6)
    with pytest.raises(ConfigError) as refused:
        options.require_room_for(5000)
    (problem,) = refused.value.problems
    assert problem.key == "max_bytes"
    enough = int(problem.allowed.removeprefix("at least ").removesuffix(" bytes"))
    parsed(tmp_path, max_bytes=enough).require_room_for(5000)
    with pytest.raises(ConfigError):
        parsed(tmp_path, max_bytes=enough - 1).require_room_for(5000)


# --- the tier itself ---------------------------------------------------------------------------


def test_the_least_that_is_taken_is_enough_to_store(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="max_bytes") as refused:
        fs_harness(tmp_path / "kv", max_bytes=1 << 20)
    assert not (tmp_path / "kv").exists()
    (problem,) = refused.value.problems
    enough = int(problem.allowed.removeprefix("at least ").removesuffix(" bytes"))
    with fs_harness(tmp_path / "kv", max_bytes=enough) as harness:
        (report,) = harness.wait_for(harness.store(harness.keys(8)))
        assert report.result.success


def test_a_directory_with_other_things_is_not_touched(tmp_path: Path) -> None:
    (tmp_path / "thesis.txt").write_text("mine")
    with pytest.raises(RootRefused, match=r"thesis\.txt.*directory of its own"):
        fs_harness(tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["thesis.txt"]


def test_a_file_is_refused(tmp_path: Path) -> None:
    (tmp_path / "kv").write_text("mine")
    with pytest.raises(RootRefused, match="directory"):
        fs_harness(tmp_path / "kv")
    assert (tmp_path / "kv").read_text() == "mine"


def test_an_empty_directory_is_taken(tmp_path: Path) -> None:
    (tmp_path / "kv").mkdir(mode=0o700)
    with fs_harness(tmp_path / "kv") as harness:
        harness.wait_for(harness.store(harness.keys(1)))


def test_weights_that_nobody_names_are_refused(tmp_path: Path) -> None:
    """Or blocks of other weights with the same name would be taken for ours."""

    def make_tier(_: object, view: memoryview) -> FsSecondaryTierManager:
        return FsSecondaryTierManager(
            PlainSpec(make_config()),
            view,
            "fs",
            root_dir=str(tmp_path / "kv"),
            max_bytes=bytes_for(4),
        )

    with pytest.raises(ConfigError, match="cache_namespace"):
        TierHarness(make_tier)
    assert not list(tmp_path.iterdir())


def test_rows_that_are_not_aligned_are_refused(tmp_path: Path) -> None:
    rows = memoryview(bytearray(5 * ROW_BYTES))[1 : 4 * ROW_BYTES + 1].cast("B", (4, ROW_BYTES))
    with pytest.raises(ValueError, match="aligned"):
        FsSecondaryTierManager(
            sample_spec(ROW_BYTES, 4, "weights", "engine"),
            rows,
            "fs",
            root_dir=str(tmp_path / "kv"),
            max_bytes=bytes_for(4),
        )
    assert not list(tmp_path.iterdir())


def test_it_is_found_by_its_type() -> None:
    tier_cls = SecondaryTierFactory.get_secondary_tier_cls({"type": "fs", "root_dir": "/x"})
    assert tier_cls is FsSecondaryTierManager


def test_where_it_keeps_blocks(tmp_path: Path) -> None:
    with fs_harness(tmp_path / "kv") as harness:
        assert harness.tier.medium is Medium.STORAGE
        assert harness.tier.locality is Locality.REMOTE


# --- what is said ------------------------------------------------------------------------------


@pytest.mark.parametrize("nothing", [0, "0", "0B", "0GiB", 0.0])
def test_nothing_may_be_written_in_many_ways(tmp_path: Path, nothing: Any) -> None:
    assert parsed(tmp_path, min_free_bytes=nothing).min_free_bytes == 0


def test_less_than_nothing_is_refused_with_what_is_allowed(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="Write 0, or a size above 0"):
        parsed(tmp_path, min_free_bytes=-1)


def test_too_little_is_shown_as_it_was_given(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r'got "1\.5KiB"'):
        parsed(tmp_path, max_bytes="1.5KiB").require_room_for(5000)


def test_a_file_in_the_place_of_the_parent_is_called_so(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("mine")
    with pytest.raises(ConfigError, match="file is not a directory"):
        parsed(tmp_path, root_dir=str(tmp_path / "file" / "kv"))
