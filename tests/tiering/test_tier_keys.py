"""Remedies for keys of another tier, or in the wrong place."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from kvtier.config import USER_KEYS, ConfigError, Problem, TierConfig
from kvtier.config.fields import declared_keys
from kvtier.tiering.base import SecondaryTierManager
from kvtier.tiering.factory import SecondaryTierFactory, TierStartError
from tests.tiering.fs.engine import configured_engine


def problems_of(**entry: Any) -> dict[str, Problem]:
    """By key."""
    with pytest.raises(ConfigError) as refused:
        SecondaryTierFactory.plan_secondary_tiers([TierConfig.from_entry(entry)])
    return {problem.key.rpartition(".")[2]: problem for problem in refused.value.problems}


DISK_TO_FS = {
    "path": '"root_dir"',
    "directory": '"root_dir"',
    "io_threads": '"n_read_threads" and "n_write_threads"',
    "eviction_policy": "Remove it; the fs tier always evicts the least recently used blocks",
    "use_o_direct": "Remove it; the tier tests for O_DIRECT",
}
FS_TO_DISK = {
    "root_dir": '"path"',
    "n_read_threads": '"io_threads"',
    "n_write_threads": '"io_threads"',
    "min_free_bytes": "Remove it",
}


@pytest.mark.parametrize("key", DISK_TO_FS)
def test_a_disk_entry_that_becomes_an_fs_entry(key: str) -> None:
    found = problems_of(type="fs", root_dir="/mnt/kv", max_bytes="1GiB", **{key: "x"})
    assert found.keys() == {key}
    assert DISK_TO_FS[key] in found[key].remedy


@pytest.mark.parametrize("key", FS_TO_DISK)
def test_an_fs_entry_that_becomes_a_disk_entry(key: str) -> None:
    found = problems_of(type="disk", path="/mnt/kv.slab", max_bytes="1GiB", **{key: "x"})
    assert found.keys() == {key}
    assert FS_TO_DISK[key] in found[key].remedy


def _own_keys(tier_type: str) -> set[str]:
    tier_cls: type[SecondaryTierManager]
    tier_cls = SecondaryTierFactory.get_secondary_tier_cls({"type": tier_type})
    assert tier_cls.options_cls is not None
    return set(declared_keys(tier_cls.options_cls))


@pytest.mark.parametrize("tier_type", ["fs", "disk"])
def test_a_hint_names_keys_that_there_are(tier_type: str) -> None:
    hints = DISK_TO_FS if tier_type == "fs" else FS_TO_DISK
    named = {word for hint in hints.values() for word in hint.split('"')[1::2]}
    assert named
    assert named <= _own_keys(tier_type)
    assert not hints.keys() & _own_keys(tier_type)


@pytest.mark.parametrize("key", sorted(set(USER_KEYS) - {"eviction_policy"}))
def test_a_key_of_the_engine_inside_of_a_tier(key: str) -> None:
    found = problems_of(type="fs", root_dir="/mnt/kv", max_bytes="1GiB", **{key: "x"})
    assert found[key].remedy == "Move it out of secondary_tiers, beside cpu_bytes_to_use"


def test_what_is_missing_is_shown_as_it_is_written() -> None:
    found = problems_of(type="fs")
    assert found["max_bytes"].remedy.endswith('add it, such as "max_bytes": "2TiB"')
    assert found["root_dir"].remedy.endswith('add it, such as "root_dir": "/mnt/shared/kv"')


def test_a_directory_that_cannot_be_used_is_named_with_its_key(tmp_path: Path) -> None:
    (tmp_path / "strange").write_bytes(b"")
    with pytest.raises(TierStartError, match=r"^secondary_tiers\[0\]\.root_dir: .*other things"):
        configured_engine(tmp_path)
