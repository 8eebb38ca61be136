"""Directories that `kvtier store` refuses, in one sentence each."""

from __future__ import annotations

import struct
from collections.abc import Callable
from pathlib import Path

import pytest

from kvtier.testing import TierHarness
from kvtier.tiering.fs.ledger import _COPY_BYTES
from tests.cli.store.engine_process import FsEngineProcess
from tests.cli.store.outcomes import (
    assert_all_refuse,
    assert_refused,
    assert_the_page_has_all_of,
)
from tests.cli.store.roots import file_of, fill_root
from tests.cli.store.slabs import flip, overwrite
from tests.cli.store.test_refusals import as_nobody, let_others_in
from tests.tiering.fs.harness import block_files

COMMANDS: dict[str, list[str]] = {
    "ls": [],
    "stat": [],
    "verify": [],
    "clear": ["--yes"],
    "gc": ["--yes"],
}
KEYS = TierHarness.keys(30)


def _newer(path: Path) -> None:
    fill_root(path, KEYS)
    for offset in (0, _COPY_BYTES):
        overwrite(path / "ledger", offset + 8, struct.pack("<H", 2))


def _books_of_someone(path: Path) -> None:
    path.mkdir()
    (path / "ledger").write_text("2026-01-01  rent  1000\n")


def _words(path: Path) -> None:
    (path / "blocks" / "of flats").mkdir(parents=True)


WRONG: dict[str, tuple[Callable[[Path], object], str]] = {
    "empty": (Path.mkdir, "no root of an fs tier: give the path of a slab file"),
    "a ledger of another kind": (_books_of_someone, "no root of an fs tier"),
    "blocks of another kind": (_words, "no root of an fs tier"),
    "newer": (_newer, "version 2; this kvtier reads 1. Use the kvtier that made it"),
}


@pytest.mark.parametrize("case", WRONG)
def test_what_is_no_root_is_refused_and_left_alone(
    case: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    make, remedy = WRONG[case]
    path = tmp_path / "kv"
    make(path)
    before = sorted((str(p), p.lstat().st_ctime_ns) for p in path.rglob("*"))
    assert_all_refuse(capsys, COMMANDS, path, remedy)
    assert sorted((str(p), p.lstat().st_ctime_ns) for p in path.rglob("*")) == before


def test_a_root_of_someone_else(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "kv"
    fill_root(path, KEYS)
    let_others_in(tmp_path)
    with as_nobody():
        assert_all_refuse(capsys, COMMANDS, path, f"no permission for {path}: run this as")
    assert len(block_files(path)) == len(KEYS)


def test_a_place_inside_of_a_root(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "kv"
    fill_root(path, KEYS)
    assert_all_refuse(capsys, COMMANDS, path / "blocks", f"an fs tier: give {path}\n")
    assert len(block_files(path)) == len(KEYS)


OPTIONS = {
    "a word as namespace": (["gc", "--namespace", "llama"], "--namespace", "hexadecimal digits"),
    "one of two": (["gc", "--namespace", "a", "--namespace", ""], "--namespace", "hexadecimal"),
    "no namespace": (["clear", "--yes", "--namespace", ""], "--namespace", "hexadecimal digits"),
    "no unit": (["gc", "--older-than", "7"], "--older-than", "such as 90m, 12h or 7d"),
    "an unknown unit": (["gc", "--older-than", "7y"], "--older-than", "such as 90m, 12h or 7d"),
    "a word as time": (["gc", "--older-than", "long"], "--older-than", "such as 90m, 12h or 7d"),
    "an unknown option": (["gc", "--quick"], "--quick", "--help"),
}


@pytest.mark.parametrize("case", OPTIONS)
def test_wrong_options_are_refused_with_a_remedy(
    case: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "kv"
    fill_root(path, KEYS)
    assert_refused(capsys, path, *OPTIONS[case])
    assert len(block_files(path)) == len(KEYS)


@pytest.mark.parametrize("command", COMMANDS)
def test_the_page_about_it_has_every_option_and_key(
    command: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "kv"
    name = fill_root(path, KEYS, "another")
    flip(file_of(path, name, KEYS[3]), 5000)
    with FsEngineProcess(path):
        assert_the_page_has_all_of(capsys, command, path, COMMANDS[command])
