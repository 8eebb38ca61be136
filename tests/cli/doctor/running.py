"""`kvtier doctor` and `kvtier bench`, run in this process or in one of their own."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from kvtier.cli import main
from tests.test_architecture import REPO, SRC

__all__ = ["AT", "config_of", "examine", "finding", "files_in", "run_apart", "status_of"]

AT = "secondary_tiers[0]"


def config_of(*tiers: Mapping[str, Any], **keys: Any) -> str:
    """The keys of kvtier, as JSON."""
    return json.dumps({"cpu_bytes_to_use": "1MiB", **keys, "secondary_tiers": list(tiers)})


def examine(
    capsys: pytest.CaptureFixture[str], config: str, *arguments: str
) -> tuple[int, dict[str, Any]]:
    """The exit code and the JSON document, without measuring disks."""
    code = main(["doctor", config, "--json", "--quick", *arguments])
    printed = capsys.readouterr()
    assert printed.err == ""
    document: dict[str, Any] = json.loads(printed.out)
    assert document["ok"] is (code == 0)
    return code, document


def finding(document: Mapping[str, Any], name: str) -> dict[str, str]:
    (found,) = [check for check in document["checks"] if check["name"] == name]
    return dict(found)


def status_of(document: Mapping[str, Any], name: str) -> str:
    return finding(document, name)["status"]


def files_in(root: Path) -> dict[str, bytes | None]:
    """Every file below a directory with its content, and every directory."""
    return {
        str(path.relative_to(root)): path.read_bytes() if path.is_file() else None
        for path in root.rglob("*")
    }


def run_apart(
    *arguments: str, before: tuple[str, ...] = (), **environment: str
) -> subprocess.CompletedProcess[str]:
    """Run the command in a process of its own, under the command line `before`."""
    return subprocess.run(
        [*before, sys.executable, "-m", "kvtier", *arguments],
        env=os.environ | {"PYTHONPATH": f"{SRC}:{REPO}"} | environment,
        capture_output=True,
        text=True,
        check=False,
        timeout=120,
    )
