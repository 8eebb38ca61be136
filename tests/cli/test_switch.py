"""`kvtier switch` against a running engine, and without one."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from kvtier.cli import main
from tests.tiering.engine import Engine, engine_with


@pytest.fixture(autouse=True)
def run_dir(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KVTIER_RUN_DIR", str(tmp_path / "run"))


@pytest.fixture
def engine() -> Iterator[Engine]:
    with engine_with({"type": "example"}, num_rows=4, namespace="weights") as engine:
        yield engine


def test_what_is_switched(engine: Engine, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["switch"]) == 0
    assert capsys.readouterr().out == "loads: on\nstores: on\nshare: 100 % of new requests\n"
    assert main(["switch", "--loads", "off", "--tier", "0:example", "--share", "12.5"]) == 0
    assert capsys.readouterr().out == (
        "loads: off for 0:example\nstores: on\nshare: 12.5 % of new requests\n"
    )
    assert main(["switch", "--json"]) == 0
    state = {"loads_off": ["0:example"], "stores_off": [], "share": 12.5}
    assert json.loads(capsys.readouterr().out) == state
    assert main(["switch", "--loads", "on", "--stores", "off"]) == 0
    assert "loads: on\nstores: off for 0:example, host\n" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["--tier", "0:example"], "give --loads or --stores"),
        (["--loads", "maybe"], "maybe"),
        (["--share", "101"], "101"),
        (["--tier", "1:disk", "--loads", "off"], "host, 0:example"),
        (["1"], "process 1 is not an engine"),
        (["/nowhere.sock"], "no engine answers there"),
    ],
)
def test_wrong_input(
    engine: Engine,
    arguments: list[str],
    says: str,
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert main(["switch", *arguments]) == 2
    printed = capsys.readouterr()
    assert printed.out == ""
    assert says in printed.err


def test_without_an_engine(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["switch", "--loads", "off"]) == 2
    assert "no engine of this user runs here" in capsys.readouterr().err
