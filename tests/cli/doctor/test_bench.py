"""`kvtier bench`: tiers are timed beside a limit, nothing is left, failures are named."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest

from kvtier.cli import main
from tests.cli.doctor.running import config_of, files_in
from tests.tiering.processes import free_port

SMALL = ("--size", "2MiB", "--block", "64KiB", "--job-blocks", "8")


def bench(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, dict[str, Any], str]:
    """The exit code, the JSON document, and what was noted."""
    code = main(["bench", *arguments, *SMALL, "--json"])
    printed = capsys.readouterr()
    document: dict[str, Any] = json.loads(printed.out)
    return code, document, printed.err


@pytest.mark.parametrize("kind", ["disk", "fs"])
def test_one_tier(kind: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code, document, _ = bench(
        capsys, kind, "--path", str(tmp_path / {"disk": ".", "fs": "d"}[kind])
    )
    assert code == 0
    (timed,) = document["tiers"]
    assert (timed["type"], timed["block_bytes"]) == (kind, 65536)
    assert min(timed["stores"], timed["loads"], timed["lookups"], timed["one_block_s"]) > 0
    assert timed["limit"]["of"].startswith("the disk")
    assert timed["loads_of_limit"] == timed["loads"] / timed["limit"]["read_bytes_per_s"]
    assert files_in(tmp_path) == {}


def test_the_tiers_of_a_configuration(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    config = config_of(
        {"type": "example", "simulate_async": True},
        {"type": "obj", "url": f"file://{tmp_path}/o"},
        cache_namespace="w",
    )
    code, document, _ = bench(capsys, "--config", config, "--threads", "2")
    assert (code, [timed["type"] for timed in document["tiers"]]) == (0, ["example", "obj"])
    assert document["tiers"][0]["limit"]["of"] == "one thread's copy in host memory"
    for name in ("1", "obj"):
        _, document, _ = bench(capsys, name, "--config", config)
        assert [timed["tier"] for timed in document["tiers"]] == ["secondary_tiers[1]"]


def test_the_text(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    config = config_of({"type": "example"})
    assert main(["bench", "--config", config, *SMALL]) == 0
    printed = capsys.readouterr()
    assert printed.err == ""
    head, *rows = printed.out.splitlines()
    assert head == "secondary_tiers[0] (example), blocks of 64 KiB"
    assert [row.split()[0] for row in rows] == ["stores", "loads", "lookups", "one"]
    assert " of one thread's copy" not in printed.out
    assert "one thread's copy in host memory" in rows[0]


def test_a_tier_that_fails_does_not_hide_the_others(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    url = f"valkey://127.0.0.1:{free_port()}"
    liar = {"type": "Flips", "module_path": "tests.cli.doctor.liars"}
    config = config_of(
        {"type": "valkey", "url": url}, liar, {"type": "example"}, cache_namespace="w"
    )
    code, document, noted = bench(capsys, "--config", config)
    assert (code, [timed["type"] for timed in document["tiers"]]) == (1, ["example"])
    dead, wrong = document["failed"]
    assert "cannot connect" in dead["found"]
    assert "damaged blocks" in wrong["found"]
    assert "kvtier bench: secondary_tiers[0]: " in noted


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ([], "which tiers?"),
        (["disk"], "the tier disk needs it"),
        (["nothing", "--path", "/tmp"], "give one of disk, fs, valkey, obj"),
        (["disk", "fs", "--path", "/tmp"], "exactly one"),
        (["disk", "--path", "/nowhere"], "not a directory"),
        (["disk", "--path", "/dev/null"], "not a directory"),
        (["disk", "--path", "/tmp", "--url", "valkey://localhost"], "the tier disk has none"),
        (["disk", "--path", "/tmp", "--block", "5"], "give a multiple of"),
        (["disk", "--path", "/tmp", "--size", "1KiB"], "three blocks"),
        (["disk", "--path", "/tmp", "--threads", "999"], "io_threads"),
        (["--config", "{}", "--path", "/tmp"], "give either this or --config"),
        (["disk", "--config", '{"cpu_bytes_to_use": 1048576}'], "the tiers of --config are none"),
        (["--config", '{"cpu_bytes_to_use": 1048576}'], "no tier below host memory"),
        (["--config", os.devnull], "has no --kv-transfer-config"),
    ],
)
def test_wrong_usage(arguments: list[str], said: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", *arguments]) == 2
    printed = capsys.readouterr()
    assert (printed.out, "Traceback" in printed.err) == ("", False)
    assert said in " ".join(printed.err.split())


def test_ctrl_c_while_a_trial_ends_is_not_lost(capsys: pytest.CaptureFixture[str]) -> None:
    entry = {"type": "PressesCtrlC", "module_path": "tests.cli.doctor.liars"}
    assert main(["bench", "--config", config_of(entry, {"type": "example"}), *SMALL]) == 130
    assert capsys.readouterr().out == ""
