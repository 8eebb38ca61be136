"""Control characters in names of engines, hosts and files are escaped."""

from __future__ import annotations

import fcntl
import json
import os
from pathlib import Path

import pytest

from kvtier.cli import main
from kvtier.config.errors import printable
from kvtier.testing import TierHarness
from kvtier.tiering.disk.layout import HOLDER_OFFSET, Holder
from kvtier.tiering.disk.ownership import SlabRefused
from kvtier.tiering.fs.access import RootRefused
from tests.cli.store.slabs import fill
from tests.tiering.disk.harness import disk_harness
from tests.tiering.fs.harness import fs_harness

KEYS = TierHarness.keys(4)
EVIL = "x\x1b]0;pwned\x07\n2026-01-01 ERROR forged\r\x9b2K\u202egnp"


def assert_harmless(text: str) -> None:
    lines = text.splitlines()
    assert text.count("\n") == len(lines), "no other line ends"
    assert all(line.isprintable() for line in lines)
    assert not any(line.startswith("2026") for line in lines)


@pytest.mark.parametrize("text", ["", "plain", "größer 漢字", "a b", "C:\\x"])
def test_what_can_be_printed_stays_as_it_is(text: str) -> None:
    assert printable(text) == text


def test_what_cannot_be_printed_is_escaped() -> None:
    assert printable("a\nb\x1b[31m\x9b\u202e\udc80") == (r"a\nb\x1b[31m\x9b\u202e\udc80")


def test_names_in_an_fs_root(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    root = tmp_path / "kv"
    with fs_harness(root) as harness:
        assert harness.wait_for(harness.store(harness.keys(4)))[0].result.success
        name = harness.fingerprint.hex()
        [alive] = (root / "engines").glob("*.alive")
        with open(alive, "r+b") as file:
            file.write(json.dumps([EVIL, 1, EVIL, 1, name]).encode())
        (root / "blocks" / name / "07" / EVIL).touch()
        (root / "engines" / EVIL).touch()
        for arguments in (
            ["stat"],
            ["verify"],
            ["ls"],
            ["gc", "--dry-run"],
            ["gc", "--yes"],
            ["gc", "--yes", "--namespace", name],
        ):
            command, *options = arguments
            main(["store", command, str(root), *options])
            printed = capsys.readouterr()
            assert_harmless(printed.out)
            assert_harmless(printed.err)
            if command != "ls":
                assert r"\x1b" in printed.out + printed.err
        main(["store", "stat", str(root), "--json"])
        [engine] = json.loads(capsys.readouterr().out)["engines"]
        assert engine["engine_id"] == EVIL, "programs get it as it is"


def test_names_in_a_directory_of_other_things(tmp_path: Path) -> None:
    (tmp_path / EVIL).touch()
    with pytest.raises(RootRefused) as refused:
        fs_harness(tmp_path)
    assert_harmless(f"{refused.value}\n")


def test_the_name_of_who_holds_a_slab(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "kv.slab"
    fill(path, KEYS)
    fd = os.open(path, os.O_RDWR)
    try:
        os.pwrite(fd, Holder(EVIL, 1, EVIL, 1).encode(), HOLDER_OFFSET)
        fcntl.flock(fd, fcntl.LOCK_EX)
        main(["store", "stat", str(path)])
        printed = capsys.readouterr().out
        assert_harmless(printed)
        assert r"\x1b" in printed
        with pytest.raises(SlabRefused) as refused:
            disk_harness(path, 40)
        assert_harmless(f"{refused.value}\n")
    finally:
        os.close(fd)
