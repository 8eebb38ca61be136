"""Roots written by an earlier version of kvtier are found warm: blocks, ledger and quota.

The archive was made with the code of commit 17d2745. It must never be made again with newer code:
it stands for the directories that users have. `clean` was left in order, with blocks of two models.
In `killed`, the engine died by SIGKILL after a reset, with two private blocks, a half-written file
and bytes reserved.
"""

from __future__ import annotations

import os
import tarfile
from pathlib import Path

import pytest

from kvtier.testing import TierHarness
from kvtier.tiering.fs import manager
from kvtier.tiering.fs.access import NoFollowTree
from kvtier.tiering.fs.layout import count_blocks
from kvtier.tiering.fs.survey import read_balance, survey
from tests.tiering.fs.accounts import Figures, load_all, store_all, wait_until_the_gauge_is_right
from tests.tiering.fs.harness import block_files, bytes_for, du, fs_harness
from tests.tiering.fs.pauses import shorten_pauses
from tests.tiering.patience import wait_until

ARCHIVE = Path(__file__).parents[2] / "data" / "fs_roots" / "before.tar.xz"
ROW_BYTES = 4096
KEYS = {"clean": TierHarness.keys(8), "killed": TierHarness.keys(6)}
OTHER_KEYS = TierHarness.keys(3, start=100)
PRIVATE_KEYS = TierHarness.keys(2, start=50)
NUM_BLOCKS = {"clean": 8 + 3, "killed": 6}


@pytest.fixture(params=sorted(KEYS))
def old(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    """An old root, as it lay there when its last engine had ended."""
    with tarfile.open(ARCHIVE) as archive:
        archive.extractall(tmp_path, filter="fully_trusted")
    root = tmp_path / str(request.param)
    for path in (root, *root.rglob("*")):
        os.chown(path, os.geteuid(), os.getegid())
    return root


def harness_at(root: Path, namespace: str = "these weights") -> TierHarness:
    return fs_harness(root, num_blocks=64, row_bytes=ROW_BYTES, namespace=namespace)


def test_its_blocks_are_found_loaded_and_verified(old: Path) -> None:
    keys = KEYS[old.name]
    with harness_at(old) as harness:
        assert harness.hits([*keys, *OTHER_KEYS, *PRIVATE_KEYS]) == set(keys)
        load_all(harness, keys)
        assert not harness.tier.take_seal_failures()
        figures = Figures(harness)
        assert figures[manager.FORGOTTEN] == figures[manager.FAILED] == 0


def test_blocks_of_the_other_model_are_found_too(old: Path) -> None:
    with harness_at(old, "other weights") as harness:
        expected = set(OTHER_KEYS) if old.name == "clean" else set()
        assert harness.hits([*KEYS[old.name], *OTHER_KEYS]) == expected
        if expected:
            load_all(harness, OTHER_KEYS)


def test_no_file_of_it_is_a_stray(old: Path) -> None:
    seen = survey(old)
    assert seen.strays == []
    assert seen.num_blocks == NUM_BLOCKS[old.name]
    assert seen.balance is not None
    if old.name == "clean":
        assert seen.balance.num_blocks == NUM_BLOCKS["clean"]
        assert not seen.balance.accounts
        assert not seen.engines
    else:
        assert seen.balance.num_blocks == NUM_BLOCKS["killed"] + len(PRIVATE_KEYS)
        assert [engine.is_alive for engine in seen.engines] == [False]


def test_ledger_and_quota_are_right_afterwards(old: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What the dead engine left is reclaimed, new blocks are counted beside the old ones, and in
    the end the ledger says what `du` says."""
    shorten_pauses(monkeypatch)
    new_keys = TierHarness.keys(4, start=200)
    with harness_at(old) as harness:
        store_all(harness, new_keys)
        wait_until(lambda: len(os.listdir(old / "engines")) == 2, "only our presence is left")
        wait_until_the_gauge_is_right(harness, old)
        load_all(harness, [*KEYS[old.name], *new_keys])
    balance = read_balance(old)
    assert balance is not None
    assert not balance.accounts
    assert balance.num_blocks == NUM_BLOCKS[old.name] + len(new_keys) == len(block_files(old))
    there = count_blocks(NoFollowTree(old), old / "blocks")
    assert (balance.blocks, balance.num_blocks) == there
    assert balance.total == du(old) <= bytes_for(64, ROW_BYTES)


def test_its_blocks_are_evicted_for_new_ones(old: Path) -> None:
    """The oldest go first: those of the old root."""
    keys, new_keys = KEYS[old.name], TierHarness.keys(600, start=1000)
    with fs_harness(old, num_blocks=64, row_bytes=ROW_BYTES, num_rows=128) as harness:
        for start in range(0, len(new_keys), 50):
            store_all(harness, new_keys[start : start + 50])
            assert du(old) <= bytes_for(64, ROW_BYTES)
        assert Figures(harness)[manager.EVICTED] > len(keys)
        names = {path.name for path in block_files(old)}
        assert not names & {key.hex() for key in keys}
