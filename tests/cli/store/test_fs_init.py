"""`kvtier store init`: makes a root, or a removed one anew."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import pytest

from kvtier.cli import main
from kvtier.testing import TierHarness
from tests.cli.store.outcomes import assert_the_page_has_all_of
from tests.cli.store.roots import balance_of, fill_root
from tests.cli.store.slabs import fill, run_store
from tests.tiering.fs.harness import fs_harness

KEYS = TierHarness.keys(12)


@pytest.fixture
def root(tmp_path: Path) -> Path:
    return tmp_path / "kv"


@pytest.mark.parametrize("exists", [False, True])
def test_a_new_root(root: Path, exists: bool, capsys: pytest.CaptureFixture[str]) -> None:
    if exists:
        root.mkdir(mode=0o700)
    code, document = run_store(capsys, "init", root)
    assert (code, document["made"], document["blocks"]) == (0, True, 0)
    assert document["uid"] == os.geteuid()
    assert sorted(os.listdir(root)) == ["blocks", "engines", "ledger"]
    assert os.listdir(root / "engines") == []
    assert root.stat().st_mode & 0o777 == 0o700
    with fs_harness(root) as harness:
        assert harness.wait_for(harness.store(harness.keys(4)))[0].result.success


def test_what_is_there_stays(root: Path, capsys: pytest.CaptureFixture[str]) -> None:
    fill_root(root, KEYS)
    code, document = run_store(capsys, "init", root)
    assert (code, document["made"], document["blocks"]) == (0, False, len(KEYS))
    (root / "ledger").unlink()
    code, document = run_store(capsys, "init", root)
    assert (code, document["made"], document["blocks"]) == (0, True, len(KEYS))
    assert balance_of(root).num_blocks == len(KEYS)
    shutil.rmtree(root / "engines")
    assert main(["store", "init", str(root)]) == 0
    assert f"{root} was the root of an fs tier already, with 12 blocks." in capsys.readouterr().out


def test_what_cannot_be_a_root_is_refused(
    tmp_path: Path, root: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    fill(tmp_path / "kv.slab", KEYS)
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "thesis.tex").touch()
    root.mkdir()
    root.chmod(0o777)
    for path, words in (
        (tmp_path / "kv.slab", "Not a directory"),
        (tmp_path / "other", "thesis.tex"),
        (tmp_path / "not" / "there", "mount the file system first"),
        (root, "chmod 700"),
    ):
        assert main(["store", "init", str(path)]) == 2
        printed = capsys.readouterr()
        assert printed.out == ""
        assert words in printed.err
    assert os.listdir(tmp_path / "other") == ["thesis.tex"]
    assert os.listdir(root) == []


def test_the_page_about_it_has_every_option_and_key(
    root: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert_the_page_has_all_of(capsys, "init", root, [])
