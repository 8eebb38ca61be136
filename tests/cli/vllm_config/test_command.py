"""Standard output, standard error and exit codes of the command."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from kvtier.cli import main
from tests.cli.vllm_config.running import answer_of, config_in, run_apart
from tests.test_architecture import REPO, SRC, foreign_modules

PAGE = (REPO / "docs" / "vllm-config.md").read_text()


def test_the_flag_alone_is_on_standard_output(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["vllm-config", "--cpu", "1MiB", "--disk", f"{tmp_path}/kv.slab:1MiB"]) == 0
    printed = capsys.readouterr()
    assert printed.out.count("\n") == 1
    assert config_in(printed.out)["kv_connector"] == "KVTierConnector"
    for line in printed.err.splitlines():
        assert re.match(r"(ok|WARNING|PROBLEM)? +\S", line)
    assert "secondary_tiers[0].room" in printed.err


def test_both_ways_to_answer_say_the_same(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = ["--disk", f"{tmp_path}/missing/kv.slab:1MiB"]
    code, document = answer_of(capsys, *arguments)
    assert main(["vllm-config", "--cpu", "1MiB", *arguments]) == code == 1
    printed = capsys.readouterr()
    for check in document["checks"]:
        assert set(check) == {"name", "status", "found", "remedy"}
        assert check["status"] in ("ok", "warning", "problem")
        if check["name"] != "memory":  # it changes all the time
            assert check["found"] in printed.err
            assert check["remedy"] in printed.err
        assert bool(check["remedy"]) == (check["status"] != "ok")


def test_what_an_engine_would_warn_of_is_found(capsys: pytest.CaptureFixture[str]) -> None:
    code, document = answer_of(capsys, "--set", "canonical_layout=true", "--no-check")
    (check,) = document["checks"]
    assert (code, check["name"], check["status"]) == (0, "configuration", "warning")
    assert "canonical_layout has no effect" in check["found"]


def test_neither_torch_nor_vllm_is_loaded(tmp_path: Path) -> None:
    """Importing them takes seconds, and would make the command slow."""
    probe = (
        "import sys; from kvtier.cli import main; main(sys.argv[1:]); "
        "print({name.partition('.')[0] for name in sys.modules} & {'torch', 'vllm'})"
    )
    arguments = ["--cpu", "1MiB", f"--disk={tmp_path}/a:1MiB", f"--fs={tmp_path}/b:8MiB"]
    ended = subprocess.run(
        [sys.executable, "-c", probe, "vllm-config", *arguments],
        env=os.environ | {"PYTHONPATH": str(SRC)},
        capture_output=True,
        text=True,
        check=True,
    )
    assert ended.stdout.splitlines()[-1] == "set()"


def test_help_needs_nothing_heavy() -> None:
    modules = foreign_modules(["kvtier.cli.vllm_config.app", "kvtier.cli.app"], SRC)
    assert modules.isdisjoint({"numpy", "xxhash"})


def test_the_page_about_it_has_every_option_and_check(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["vllm-config", "--help"]) == 0
    text = capsys.readouterr().out
    options = {word for word in text.replace(",", " ").split() if word.startswith("--")}
    assert "--blocks-per-chunk" in options
    assert [option for option in options - {"--help"} if f"`{option}" not in PAGE] == []
    tiers = [f"--disk={tmp_path}/a:1MiB", f"--fs={tmp_path}/b:8MiB", "--world-size=2"]
    document = answer_of(capsys, *tiers)[1]
    names = {check["name"].rpartition(".")[2] for check in document["checks"]}
    assert {"shared_memory", "room", "ranks"} <= names
    assert [name for name in [*names, *document] if f"`{name}`" not in PAGE] == []


# --- cut short ---------------------------------------------------------------------------------


def test_a_reader_that_has_gone_ends_it_quietly() -> None:
    reader, writer = os.pipe()
    os.close(reader)
    try:
        ended = subprocess.run(
            [sys.executable, "-m", "kvtier", "vllm-config", "--cpu", "1MiB", "--no-check"],
            env=os.environ | {"PYTHONPATH": str(SRC)},
            stdout=writer,
            stderr=subprocess.PIPE,
            text=True,
            check=False,
        )
    finally:
        os.close(writer)
    assert (ended.returncode, ended.stderr) == (128 + signal.SIGPIPE, "")


def test_terminals_of_any_encoding() -> None:
    """The flag is ASCII, and the findings escape what the locale cannot write."""
    ended = run_apart(
        "--cpu", "1MiB", "--fs", "/tmp/é:8MiB", "--json", PYTHONIOENCODING="ascii", LC_ALL="C.UTF-8"
    )
    tier = json.loads(ended.stdout)["config"]["kv_connector_extra_config"]["secondary_tiers"][0]
    assert tier["root_dir"] == "/tmp/é"
    ended = run_apart(
        "--cpu", "1MiB", "--fs", "/tmp/é:8MiB", PYTHONIOENCODING="ascii", LC_ALL="C.UTF-8"
    )
    assert r"the engine makes /tmp/\xe9 when it starts" in ended.stderr
