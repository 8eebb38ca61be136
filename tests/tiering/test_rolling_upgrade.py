"""Engines of two releases share a tier: the release before, taken from this repository's history,
this one, and one still to come that writes another format of seals."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.tiering.valkey.server import valkey_server

REPO = Path(__file__).resolve().parents[2]
BEFORE = "2067eb3"
"""The last commit before seals could be signed."""

ENGINE = """
import json, sys
from importlib import import_module
from kvtier import seal
from kvtier.testing import TierHarness

kind, keys, namespace, *commands = sys.argv[1:]
module = import_module(f"kvtier.tiering.{kind}.manager")
tier_cls = getattr(module, f"{kind.capitalize()}SecondaryTierManager")
make = lambda spec, view: tier_cls(spec, view, kind, **json.loads(keys))
with TierHarness(make, namespace=namespace, row_bytes=1 << 20, num_slots=16) as harness:
    for command in commands:
        what, _, span = command.partition(" ")
        if what == "newer":
            seal._VERSION = 3
            continue
        first, count = map(int, span.split())
        (report,) = harness.wait_for(getattr(harness, what)(harness.keys(count, first)))
        refused = {str(why): n for why, n in harness.tier.take_seal_failures().items()}
        print(json.dumps([len(report.moved), refused]), flush=True)
"""
"""One engine. Its commands: "store FIRST COUNT" and "load FIRST COUNT" of numbered blocks; "newer":
write seals of another version from now on. Prints how many blocks were moved, and the seals that
were refused."""


@pytest.fixture(scope="module")
def before(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The source of the release before."""
    archive = subprocess.run(
        ["git", "-C", str(REPO), "archive", BEFORE, "src/kvtier"], capture_output=True, check=False
    )
    if archive.returncode:
        pytest.skip(f"needs commit {BEFORE} in the history of {REPO}")
    directory = tmp_path_factory.mktemp("before")
    subprocess.run(["tar", "-x", "-C", str(directory)], input=archive.stdout, check=True)
    return directory / "src"


@pytest.fixture(params=["fs", "obj", "valkey"])
def tier(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[tuple[str, dict[str, Any]]]:
    if request.param == "fs":
        yield "fs", {"root_dir": str(tmp_path / "root"), "max_bytes": 64 << 20}
    elif request.param == "obj":
        yield "obj", {"url": f"file://{tmp_path}/objects"}
    else:
        with valkey_server(tmp_path) as server:
            yield "valkey", {"url": server.url}


def run(source: Path, tier: tuple[str, dict[str, Any]], *commands: str) -> list[list[Any]]:
    kind, keys = tier
    ended = subprocess.run(
        [sys.executable, "-c", ENGINE, kind, json.dumps(keys), "fleet", *commands],
        env=os.environ | {"PYTHONPATH": str(source)},
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )
    assert ended.returncode == 0, ended.stderr
    return [json.loads(line) for line in ended.stdout.splitlines()]


def test_each_release_reads_the_blocks_of_the_other(
    before: Path, tier: tuple[str, dict[str, Any]]
) -> None:
    now = REPO / "src"
    assert run(before, tier, "store 0 4") == [[4, {}]]
    assert run(now, tier, "load 0 4", "store 4 4") == [[4, {}], [4, {}]]
    assert run(before, tier, "load 4 4") == [[4, {}]]


def test_a_newer_format_is_a_miss_and_stays(before: Path, tier: tuple[str, dict[str, Any]]) -> None:
    now = REPO / "src"
    assert run(now, tier, "newer", "store 0 4") == [[4, {}]]
    # The fs tier of before removes such a block.
    for older in [now] if tier[0] == "fs" else [before, now]:
        # If the first load removed a block, the second one would not find anything to refuse.
        refused = run(older, tier, "load 0 4", "load 0 4", "store 0 4")
        assert refused[:2] == [[0, {"format": 4}]] * 2
    assert run(now, tier, "newer", "load 0 4") == [[4, {}]]
