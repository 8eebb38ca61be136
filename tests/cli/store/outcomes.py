"""Assertions that hold for every command of `kvtier store`."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

import pytest

from kvtier.cli import main
from tests.cli.store.slabs import run_store
from tests.test_architecture import REPO, SRC

__all__ = [
    "assert_all_refuse",
    "assert_refused",
    "assert_the_page_has_all_of",
    "interrupt",
    "start",
]

_PAGE = (REPO / "docs" / "store.md").read_text()


def assert_all_refuse(
    capsys: pytest.CaptureFixture[str],
    commands: Mapping[str, list[str]],
    path: Path,
    remedy: str,
) -> None:
    """Every command prints one line that says what is wrong with `path`, and nothing else."""
    for command, options in commands.items():
        assert main(["store", command, str(path), *options]) == 2
        printed = capsys.readouterr()
        assert printed.out == ""
        assert printed.err.count("\n") == 1
        assert printed.err.startswith("kvtier store: ")
        assert str(path) in printed.err
        assert remedy in printed.err


def assert_refused(
    capsys: pytest.CaptureFixture[str], path: Path, arguments: list[str], option: str, remedy: str
) -> None:
    """The command and its options are refused for this option, with this remedy."""
    command, *options = arguments
    assert main(["store", command, str(path), *options]) == 2
    printed = capsys.readouterr()
    assert printed.out == ""
    assert option in printed.err
    assert remedy in printed.err


def assert_the_page_has_all_of(
    capsys: pytest.CaptureFixture[str], command: str, path: Path, options: list[str]
) -> None:
    """docs/store.md explains every option and every JSON key of a command."""
    assert main(["store", command, "--help"]) == 0
    text = capsys.readouterr().out
    possible = {word for word in text.replace(",", " ").split() if word.startswith("--")}
    assert [option for option in possible - {"--help"} if f"`{option}" not in _PAGE] == []
    document = run_store(capsys, command, path, *options)[1]
    keys = set(document)
    for inner in document.values():
        rows = inner if isinstance(inner, list) else [inner]
        keys |= {key for row in rows if isinstance(row, dict) for key in row}
    assert [key for key in keys if f"`{key}`" not in _PAGE] == []


def start(*arguments: str, output: int) -> subprocess.Popen[str]:
    """A command in a process of its own."""
    return subprocess.Popen(
        [sys.executable, "-m", "kvtier", "store", *arguments],
        env=os.environ | {"PYTHONPATH": str(SRC)},
        stdout=output,
        stderr=subprocess.PIPE,
        text=True,
    )


def interrupt(process: subprocess.Popen[str], first_line: str) -> str:
    """Send SIGINT once standard error shows `first_line`. Returns the standard output."""
    with process:
        try:
            assert process.stderr is not None
            assert first_line in process.stderr.readline()
            process.send_signal(signal.SIGINT)
            out, err = process.communicate(timeout=60)
        finally:
            process.kill()
    assert (process.returncode, err) == (128 + signal.SIGINT, "")
    return out
