"""What `kvtier store` refuses, in one sentence each, and how it ends when interrupted."""

from __future__ import annotations

import errno
import io
import json
import os
import signal
import socket
import struct
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from kvtier.cli import main
from kvtier.testing import TierHarness
from kvtier.tiering.disk.layout import Geometry, Superblock
from kvtier.tiering.disk.reader import Snapshot
from kvtier.tiering.disk.scrub import SlabScrubber
from kvtier.tiering.io.page import PAGE_BYTES, close_page
from tests.cli.store.outcomes import (
    assert_all_refuse,
    assert_refused,
    assert_the_page_has_all_of,
    interrupt,
    start,
)
from tests.cli.store.slabs import GEOMETRY, engine_on, fill, flip, overwrite, read, run_store
from tests.test_architecture import SRC, foreign_modules

COMMANDS: dict[str, list[str]] = {"ls": [], "stat": [], "verify": [], "clear": ["--yes"]}
KEYS = TierHarness.keys(30)


def _damage_both_superblocks(path: Path) -> None:
    fill(path, [])
    flip(path, 100)
    flip(path, PAGE_BYTES + 100)


def _newer_version(path: Path) -> None:
    fill(path, [])
    for offset in (0, PAGE_BYTES):
        page = bytearray(read(path, offset, PAGE_BYTES))
        struct.pack_into("<H", page, 8, 2)
        close_page(page)
        overwrite(path, offset, bytes(page))


def _impossible(path: Path) -> None:
    """An intact superblock that says the file is larger than any disk."""
    fill(path, [])
    page = Superblock(b"u" * 16, Geometry(PAGE_BYTES, 2**39), revision=99).encode()
    overwrite(path, 0, page)


def _sparse(path: Path) -> None:
    """Two superblocks for an index of 1 GiB. The rest of the file is a hole."""
    geometry = Geometry(PAGE_BYTES, 2**24)
    page = Superblock(bytes(16), geometry, clock=10).encode()
    path.write_bytes(page + page)
    os.truncate(path, geometry.file_bytes)


def _sparse_and_cut_off(path: Path) -> None:
    _sparse(path)
    os.truncate(path, path.stat().st_size - (256 << 20))


def _socket(path: Path) -> None:
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(path))


WRONG: dict[str, tuple[Callable[[Path], Any], str]] = {
    "nothing": (lambda path: None, "there is no"),
    "no directory": (lambda path: path.symlink_to("nowhere/at/all"), "there is no"),
    "directory": (Path.mkdir, "no root of an fs tier: give the path of a slab"),
    "pipe": (os.mkfifo, "is not a regular file: give the path"),
    "socket": (_socket, "is not a regular file: give the path"),
    "device": (lambda path: path.symlink_to("/dev/zero"), "is not a regular file: give the path"),
    "empty": (Path.touch, "is empty, so it is not a slab"),
    "text": (lambda path: path.write_text("hello\n" * 5000), "is not a slab: give the path"),
    "short": (lambda path: path.write_text("hello"), "is not a slab: give the path"),
    "damaged": (_damage_both_superblocks, "both copies of the superblock"),
    "newer": (_newer_version, "version 2; this kvtier reads 1. Use the kvtier that wrote it"),
    "sparse": (_sparse, "has a hole where its index should be"),
    "sparse and cut off": (_sparse_and_cut_off, "it was truncated; remove it"),
    "impossible": (_impossible, "it was truncated; remove it"),
}


@pytest.mark.parametrize("case", WRONG)
def test_what_is_no_slab_is_refused_with_a_remedy(
    case: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    make, remedy = WRONG[case]
    path = tmp_path / "kv.slab"
    make(path)
    assert_all_refuse(capsys, COMMANDS, path, remedy)


@contextmanager
def as_nobody() -> Iterator[None]:
    """Drop the rights of root, if the tests have them, for `open` and for `access`."""
    if os.geteuid() != 0:
        yield
        return
    os.setresuid(65534, 65534, 0)
    try:
        yield
    finally:
        os.setresuid(0, 0, 0)


def let_others_in(folder: Path) -> None:
    """Open the directories of pytest, which are private, to other users."""
    top = Path(tempfile.gettempdir()).resolve()
    for each in (folder, *folder.parents):
        if top in each.parents:
            each.chmod(0o755)


def test_a_slab_of_someone_else(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "kv.slab"
    fill(path, [])
    path.chmod(0)
    let_others_in(tmp_path)
    with as_nobody():
        assert_all_refuse(capsys, COMMANDS, path, f"no permission for {path}: run this as")


OPTIONS = {
    "no namespace": (["verify", "--namespace", ""], "--namespace", "hexadecimal digits"),
    "a word as namespace": (["ls", "--namespace", "llama"], "--namespace", "hexadecimal digits"),
    "a word as rate": (["verify", "--max-rate", "fast"], "--max-rate", "a number and a unit"),
    "no rate": (["verify", "--max-rate", "0"], "--max-rate", "above 0"),
    "an unknown unit": (["verify", "--max-rate", "200M"], "--max-rate", "200MB"),
    "a negative limit": (["ls", "--limit", "-1"], "--limit", "x>=0"),
    "an unknown order": (["ls", "--sort", "size"], "--sort", "recent, oldest, place"),
    "no time": (["clear", "--yes", "--timeout", "0"], "--timeout", "x>=0.1"),
    "a time that is no number": (["clear", "--yes", "--timeout", "nan"], "--timeout", "a number"),
    "a time without end": (["clear", "--yes", "--timeout", "inf"], "--timeout", "a number"),
    "an unknown option": (["stat", "--quick"], "--quick", "--help"),
}


@pytest.mark.parametrize("case", OPTIONS)
def test_wrong_options_are_refused_with_a_remedy(
    case: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert_refused(capsys, tmp_path / "kv.slab", *OPTIONS[case])


# --- are you sure? -----------------------------------------------------------------------------


class Keyboard(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_without_a_terminal_nobody_is_asked(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "kv.slab"
    fill(path, KEYS)
    monkeypatch.setattr(sys, "stdin", io.StringIO("y\n"))
    assert main(["store", "clear", str(path)]) == 2
    printed = capsys.readouterr()
    assert printed.out == ""
    assert "--yes" in printed.err
    assert run_store(capsys, "stat", path)[1]["blocks"] == len(KEYS)


@pytest.mark.parametrize(("answer", "code"), [("y\n", 0), ("n\n", 1), ("\n", 1), ("", 1)])
def test_on_a_terminal_the_user_is_asked(
    answer: str,
    code: int,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    path = tmp_path / "kv.slab"
    fill(path, KEYS)
    monkeypatch.setattr(sys, "stdin", Keyboard(answer))
    assert main(["store", "clear", str(path)]) == code
    printed = capsys.readouterr()
    assert f"{path} holds {len(KEYS)} blocks. Clear all of them? [y/N]\n" in printed.err
    assert ("nothing was cleared" in printed.err) == (code == 1)
    assert run_store(capsys, "stat", path)[1]["blocks"] == (len(KEYS) if code else 0)


# --- cut short ---------------------------------------------------------------------------------


def test_ctrl_c_ends_it_with_what_was_found(tmp_path: Path) -> None:
    path = tmp_path / "kv.slab"
    fill(path, KEYS)
    process = start("verify", str(path), "--max-rate", "1", "--json", output=subprocess.PIPE)
    document = json.loads(interrupt(process, "that takes about"))  # it reads now
    assert (document["ok"], document["complete"], document["damaged"]) == (False, False, 0)


def test_ctrl_c_does_not_hide_what_looks_damaged(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "kv.slab"
    fill(path, KEYS)
    for slot in range(len(KEYS)):
        flip(path, GEOMETRY.slot_offset(slot) + PAGE_BYTES)

    def interrupted(scrubber: SlabScrubber, snapshot: Snapshot, slots: list[int]) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(SlabScrubber, "_still_damaged", interrupted)
    assert main(["store", "verify", str(path)]) == 128 + signal.SIGINT
    text = capsys.readouterr().out
    assert "ended by Ctrl-C after 360 KiB of 360 KiB" in text
    assert "damaged blocks were not checked a second time" in text
    assert f"damaged  {len(KEYS)}\n" in text


def test_a_reader_that_has_gone_ends_it_quietly(tmp_path: Path) -> None:
    path = tmp_path / "kv.slab"
    fill(path, KEYS)
    reader, writer = os.pipe()
    os.close(reader)
    try:
        process = start("ls", str(path), output=writer)
    finally:
        os.close(writer)
    _, err = process.communicate(timeout=60)
    assert (process.returncode, err) == (128 + signal.SIGPIPE, "")


def test_a_full_disk_is_said_in_one_line(tmp_path: Path) -> None:
    path = tmp_path / "kv.slab"
    fill(path, KEYS)
    with open("/dev/full", "w") as full:
        process = start("stat", str(path), "--json", output=full.fileno())
    _, err = process.communicate(timeout=60)
    reason = os.strerror(errno.ENOSPC)
    assert process.returncode == 2
    assert err == f"kvtier store: the result could not be written: {reason}\n"


# --- what is said about it ---------------------------------------------------------------------


def test_help_needs_nothing_heavy() -> None:
    assert foreign_modules(["kvtier.cli.store.app"], SRC).isdisjoint({"numpy", "xxhash"})


@pytest.mark.parametrize("command", COMMANDS)
def test_the_page_about_it_has_every_option_and_key(
    command: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "kv.slab"
    fill(path, KEYS)
    flip(path, GEOMETRY.slot_offset(3) + PAGE_BYTES)
    assert_the_page_has_all_of(capsys, command, path, COMMANDS[command])


def test_clearing_says_that_the_bytes_stay(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["store", "clear", "--help"]) == 0
    text = " ".join(capsys.readouterr().out.split())
    assert "The bytes stay in the file until they are overwritten" in text
    assert "remove the file" in text


def test_the_slab_of_a_running_engine_is_not_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "kv.slab"
    with engine_on(path) as harness:
        harness.wait_for(harness.store(KEYS))
        for command, options in COMMANDS.items():
            assert run_store(capsys, command, path, *options)[0] == 0
