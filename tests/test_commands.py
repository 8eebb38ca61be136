"""Commands under `tests` do what they are asked, or say why they do not."""

from __future__ import annotations

import subprocess
import sys
from argparse import ArgumentTypeError
from collections.abc import Callable
from itertools import islice
from pathlib import Path
from typing import Any

import pytest

from tests.arguments import one_of, positive_number, seeds, whole_number

REPO = Path(__file__).resolve().parent.parent


def run(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, *arguments],
        cwd=REPO,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )


@pytest.mark.parametrize(
    ("command", "arguments", "said"),
    [
        ("tests.tiering.simulation", ["--seeds", "9-5"], "give the smaller one first"),
        ("tests.tiering.simulation", ["--seeds", "0-1", "--trace"], "give its --seed"),
        ("tests.tiering.disk.crash", ["--seeds", "9-5"], "give the smaller one first"),
        ("tests.tiering.fs.crash", ["--mutant", "nobody"], "no mutant 'nobody': there are"),
        ("tests.e2e", ["--seed", "1", "--mutant", "nobody"], "no mutant 'nobody': there are"),
        ("tests.e2e.vllm.record", ["nothing"], "no scenario 'nothing': there are"),
        ("tests.bench", ["nothing"], "no benchmark 'nothing': there are"),
        ("tests.tiering.black_hole", ["--requests", "0"], "give a whole number, 1 or more"),
        ("tests.seed_names", ["docs"], "docs has no reports"),
    ],
)
def test_what_cannot_be_meant_is_refused(command: str, arguments: list[str], said: str) -> None:
    ended = run("-m", command, *arguments)
    assert ended.returncode == 2
    assert ended.stdout == ""
    assert ended.stderr.startswith("usage: python -m " + command)
    assert said in ended.stderr


ALL_BENCHMARKS = """
import runpy, sys
from tests.bench.__main__ import BENCHMARKS
for name in BENCHMARKS:
    sys.argv = [name, "--help"]
    try:
        runpy.run_module(f"tests.bench.{name}", run_name="__main__")
    except SystemExit as end:
        assert end.code == 0, name
    else:
        sys.exit(f"{name} did nothing")
"""


def test_every_benchmark_is_a_command_of_its_own() -> None:
    ended = run("-W", "ignore::RuntimeWarning", "-c", ALL_BENCHMARKS)
    assert (ended.returncode, ended.stderr) == (0, "")


@pytest.mark.parametrize(
    ("text", "first"), [("3-5", [3, 4, 5]), ("7", [7, 8, 9]), ("7-", [7, 8, 9])]
)
def test_ranges_of_seeds(text: str, first: list[int]) -> None:
    assert list(islice(seeds(text), 3)) == first


def test_a_range_ends() -> None:
    assert list(seeds("3-5")) == [3, 4, 5]


@pytest.mark.parametrize(
    ("kind", "text"),
    [
        (seeds, "9-5"),
        (seeds, "five"),
        (seeds, "1-x"),
        (seeds, "-5"),
        (whole_number, "0"),
        (whole_number, "-1"),
        (whole_number, "1.5"),
        (positive_number, "0"),
        (positive_number, "nan"),
        (positive_number, "inf"),
        (positive_number, "soon"),
        (one_of("fruit", ["apple"]), "pear"),
    ],
)
def test_nonsense(kind: Callable[[str], Any], text: str) -> None:
    with pytest.raises(ArgumentTypeError, match=text):
        kind(text)
