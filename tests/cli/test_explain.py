"""`kvtier explain`: what it prints, and how it ends."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from kvtier.cli import main
from kvtier.observe.client import find_engines
from tests.observe.explained_engine import ExplainedEngine, prompt
from tests.test_architecture import SRC

EXAMPLE = {"type": "example", "max_blocks": 8}


@pytest.fixture(autouse=True)
def _run_dir(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KVTIER_RUN_DIR", str(tmp_path / "run"))


@pytest.fixture
def engine(tmp_path: Path) -> Iterator[ExplainedEngine]:
    """An engine that has served three requests; the last one found nothing any more."""
    with ExplainedEngine(tmp_path, EXAMPLE, host_blocks=8, status_socket="auto") as engine:
        for number in (1, 2, 1):
            engine.serve(prompt(number))
        yield engine


def run(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, str, str]:
    capsys.readouterr()
    code = main(["explain", *arguments])
    printed = capsys.readouterr()
    return code, printed.out, printed.err


def document(capsys: pytest.CaptureFixture[str], *arguments: str) -> Any:
    code, out, _ = run(capsys, *arguments, "--json")
    assert code == 0
    return json.loads(out)


@pytest.mark.usefixtures("engine")
def test_the_last_request_by_default(capsys: pytest.CaptureFixture[str]) -> None:
    code, out, err = run(capsys)
    assert (code, err) == (0, "")
    text = " ".join(out.split())
    assert "request request-3, ended" in text
    assert "evicted from host memory" in text
    assert "Raise cpu_bytes_to_use" in text
    assert "0:example: no" in text
    assert "\033" not in out
    assert run(capsys, "request-3")[1] == out
    assert run(capsys, "--engine", str(os.getpid()))[1] == out
    assert run(capsys, "--all")[1] == out


def test_the_tenant_of_a_request(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    rules: dict[str, Any] = {"acme": {}}
    with ExplainedEngine(tmp_path, tenants=rules, status_socket="auto") as engine:
        engine.serve(prompt(1), tenant="acme")
        assert "tenant" in run(capsys)[1]
        assert "acme" in run(capsys)[1]
        engine.serve(prompt(1))
        assert "tenant" not in run(capsys)[1]


@pytest.mark.usefixtures("engine")
def test_one_document(capsys: pytest.CaptureFixture[str]) -> None:
    (its,) = document(capsys, "--last", "3")["engines"]
    assert its["pid"] == os.getpid()
    assert [each["id"] for each in its["requests"]] == ["request-3", "request-2", "request-1"]
    assert its["requests"][0]["tokens"]["computed"] > 4
    block = its["requests"][0]["decisive_block"]
    key = block["key"]
    by_key = document(capsys, "--key", key)
    assert by_key["question"] == {"key": key}
    (found,) = by_key["engines"][0]["blocks"]
    assert found["key"] == key
    assert document(capsys, "--key", key[:-8])["engines"][0]["blocks"] == [found], "its hash"
    code, out, _ = run(capsys, "--key", key)
    assert code == 0
    assert f"block {key}" in out
    assert "evicted, host (request request-2)" in " ".join(out.split())


@pytest.mark.usefixtures("engine")
@pytest.mark.parametrize("width", ["40", "60", "100"])
def test_narrow_terminals(
    width: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", width)
    _, out, _ = run(capsys)
    words = [word for word in out.split() if len(word) > 28]
    lines = [line for line in out.splitlines() if not any(word in line for word in words)]
    assert max(map(len, lines)) <= int(width)


@pytest.mark.usefixtures("engine")
@pytest.mark.parametrize(
    ("arguments", "code", "said"),
    [
        (["nobody"], 1, "no such request"),
        (["--key", "00" * 16], 1, "no such block"),
        (["--key", "zz"], 2, "hexadecimal"),
        (["request-3", "--last", "2"], 2, "only one of"),
        (["--all", "--engine", "1"], 2, "not both"),
        (["--engine", "1"], 2, "process 1 is not an engine"),
        (["--engine", "/nowhere.sock"], 2, "no engine answers there"),
        (["--last", "0"], 2, "1<=x<=100"),
    ],
)
def test_wrong_questions(
    arguments: list[str], code: int, said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    ended, out, err = run(capsys, *arguments)
    assert ended == code
    assert said in " ".join((out + err).split())
    assert "Traceback" not in out + err


def test_without_an_engine(capsys: pytest.CaptureFixture[str]) -> None:
    for arguments in ([], ["--all"]):
        code, out, err = run(capsys, *arguments)
        assert (code, out) == (2, "")
        assert err.startswith("kvtier explain: no engine of this user runs here")
        assert err.count("\n") == 1


def test_an_engine_without_requests(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with ExplainedEngine(tmp_path, status_socket="auto"):
        code, out, _ = run(capsys)
        assert code == 1
        assert "no request yet" in out


@pytest.mark.usefixtures("engine")
@pytest.mark.parametrize(("extra", "is_bold"), [({}, True), ({"NO_COLOR": "1"}, False)])
def test_bold_only_where_it_is_wanted(extra: dict[str, str], is_bold: bool) -> None:
    ours, theirs = os.openpty()
    env = {k: v for k, v in os.environ.items() if k != "NO_COLOR"} | {
        "PYTHONPATH": str(SRC), "TERM": "xterm", **extra
    }  # fmt: skip
    assert find_engines()
    command = [sys.executable, "-m", "kvtier", "explain"]
    process = subprocess.Popen(command, env=env, stdout=theirs)
    os.close(theirs)
    out = b""
    while True:
        try:
            part = os.read(ours, 4096)
        except OSError:  # the other end was closed
            break
        out += part
    os.close(ours)
    assert process.wait(30) == 0
    assert b"request-3" in out
    assert (b"\033[1m" in out) is is_bold


def test_control_characters_in_ids_are_escaped(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with ExplainedEngine(tmp_path, status_socket="auto") as engine:
        engine.engine.add_request(prompt(1), 1, request_id="a\033[31mb\nc")
        engine.settle()
        _, out, _ = run(capsys)
        assert "\033" not in out
        assert "a\\x1b[31mb\\nc" in out
