"""`kvtier vllm-config`, run in this process or in one of its own."""

from __future__ import annotations

import json
import os
import shlex
import subprocess
import sys
from collections.abc import Mapping
from typing import Any

import pytest

from kvtier.cli import main
from tests.test_architecture import SRC

__all__ = ["answer_of", "config_in", "finding", "run_apart"]


def answer_of(
    capsys: pytest.CaptureFixture[str], *arguments: str, cpu: str = "1MiB"
) -> tuple[int, dict[str, Any]]:
    """The exit code and the JSON document."""
    code = main(["vllm-config", "--cpu", cpu, "--json", *arguments])
    printed = capsys.readouterr()
    assert printed.err == ""
    document: dict[str, Any] = json.loads(printed.out)
    return code, document


def finding(document: Mapping[str, Any], name: str) -> dict[str, str]:
    (found,) = [check for check in document["checks"] if check["name"] == name]
    return dict(found)


def config_in(flag: str) -> dict[str, Any]:
    """The arguments that vLLM gets from a shell that has read the flag."""
    *others, option, text = shlex.split(flag)
    assert others[:1] in ([], ["--shutdown-timeout"])
    assert option == "--kv-transfer-config"
    config: dict[str, Any] = json.loads(text)
    return config


def run_apart(
    *arguments: str, before: tuple[str, ...] = (), **environment: str
) -> subprocess.CompletedProcess[str]:
    """Run the command in a process of its own, under the command line `before`."""
    return subprocess.run(
        [*before, sys.executable, "-m", "kvtier", "vllm-config", *arguments],
        env=os.environ | {"PYTHONPATH": str(SRC)} | environment,
        capture_output=True,
        text=True,
        check=False,
        timeout=120,
    )
