"""Without the client library, what needs it is refused with the command that installs it."""

from __future__ import annotations

import subprocess
import sys

import pytest

_WITHOUT = """
import sys
sys.modules["valkey"] = None  # every import of it fails
"""
_ENGINE = """
from tests.tiering.valkey.serving import serving
serving("valkey://127.0.0.1:1", **{}).__enter__()
"""
_COMMAND = """
from kvtier.cli import main
sys.exit(main(["store", "stat", "valkey://127.0.0.1:1"]))
"""


@pytest.mark.parametrize(
    ("program", "keys"),
    [
        (_ENGINE, {}),
        (_ENGINE, {"cluster": True}),
        (_ENGINE, {"sentinel_service": "main"}),
        (_COMMAND, {}),
    ],
    ids=["engine", "cluster", "sentinel", "command"],
)
def test_the_command_that_installs_it_is_named(program: str, keys: dict[str, object]) -> None:
    code = _WITHOUT + program.replace("{}", repr(keys))
    ended = subprocess.run(
        [sys.executable, "-c", code], check=False, capture_output=True, text=True, timeout=120
    )
    last_line = ended.stderr.strip().splitlines()[-1]
    assert ended.returncode != 0
    assert "valkey" in last_line
    assert "pip install 'kvtier[valkey]'" in last_line
    if program is _ENGINE:
        assert "TierStartError: secondary_tiers[0]" in last_line
    else:
        assert "Traceback" not in ended.stderr
