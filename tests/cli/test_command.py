"""The `kvtier` command: its options, and what its commands have in common."""

from __future__ import annotations

import os
import subprocess
import sys
import tomllib
from importlib import import_module
from pathlib import Path

import pytest
import typer
import typer.core
import typer.main

from kvtier import __version__
from kvtier.cli import main
from kvtier.cli.app import app
from tests import traces
from tests.test_architecture import REPO, SRC, foreign_modules


def test_the_installed_script_is_this_command() -> None:
    project = tomllib.loads((REPO / "pyproject.toml").read_text())["project"]
    module, _, name = project["scripts"]["kvtier"].partition(":")
    assert getattr(import_module(module), name) is main


def test_its_room_alone_loads_nothing_foreign() -> None:
    assert foreign_modules(["kvtier.cli"], SRC) == set()


@pytest.mark.parametrize("missing", ["typer", "rich"])
def test_without_its_extra_it_says_what_to_install(
    missing: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, missing, None)
    assert main(["demo"]) == 2
    printed = capsys.readouterr()
    assert printed.out == ""
    assert printed.err.count("\n") == 1
    assert missing in printed.err
    assert "pip install typer rich" in printed.err


def test_version(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--version"]) == 0
    assert capsys.readouterr().out == f"kvtier {__version__}\n"


def test_help_leads_to_the_demo_and_its_exit_codes(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--help"]) == 0
    text = " ".join(capsys.readouterr().out.split())
    assert "demo" in text
    assert "half a minute" in text
    assert main(["demo", "--help"]) == 0
    text = " ".join(capsys.readouterr().out.split())
    assert "Exit code 0" in text
    assert "about half a minute of processor time" in text
    assert "32 to 8184" in text
    for option in ("--tokens", "--requests", "--lengths", "--seed", "--json"):
        assert option in text
        assert option in Path(REPO, "docs", "demo.md").read_text()


def test_the_help_fits_one_screen_and_names_every_command(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert main(["--help"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) <= 24
    assert max(map(len, lines)) <= 80
    named = {line.split()[0] for line in lines if line.startswith("  ")}
    command = typer.main.get_command(app)
    assert isinstance(command, typer.core.TyperGroup)
    assert named == command.commands.keys()


def test_the_help_of_every_command_says_its_exit_codes(
    capsys: pytest.CaptureFixture[str],
) -> None:
    command = typer.main.get_command(app)
    assert isinstance(command, typer.core.TyperGroup)
    for name in command.commands:
        assert main([name, "--help"]) == 0
        assert "xit code" in capsys.readouterr().out, name


def test_a_shell_completes_commands_and_options(tmp_path: Path) -> None:
    script = tmp_path / "kvtier.bash"
    kvtier = tmp_path / "kvtier"
    kvtier.write_text(f'#!/bin/sh\nPYTHONPATH={SRC} exec {sys.executable} -m kvtier "$@"\n')
    kvtier.chmod(0o755)
    shell = """
        kvtier --show-completion > $SCRIPT && . $SCRIPT
        complete -p kvtier > /dev/null || exit 1
        COMP_WORDS=(kvtier sw) COMP_CWORD=1 && _kvtier_completion kvtier && echo ${COMPREPLY[*]}
        COMP_WORDS=(kvtier switch --sh) COMP_CWORD=2 && _kvtier_completion kvtier
        echo ${COMPREPLY[*]}
    """
    ended = subprocess.run(
        ["bash", "--norc", "-c", shell],
        env=os.environ | {"PATH": f"{tmp_path}:{os.environ['PATH']}", "SCRIPT": str(script)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert ended.stdout.split() == ["switch", "--share"], ended


@pytest.mark.parametrize(
    ("arguments", "name"),
    [
        (["--help"], "kvtier"),
        (["store", "--help"], "kvtier"),
        (["store", "gc", "--help"], "kvtier"),
        (["replay", str(traces.CHATS)], "kvtier replay"),
        (["plan", "--kv-bytes-per-token", "128KiB"], "kvtier plan"),
        (["vllm-config", "--cpu", "1MiB", "--no-check"], "kvtier vllm-config"),
    ],
)
def test_a_full_disk_is_said_in_one_line(arguments: list[str], name: str) -> None:
    with open("/dev/full", "w") as full:
        ended = subprocess.run(
            [sys.executable, "-m", "kvtier", *arguments],
            env=os.environ | {"PYTHONPATH": str(SRC)},
            stdout=full,
            stderr=subprocess.PIPE,
            text=True,
            check=False,
        )
    assert ended.returncode == 2
    assert ended.stderr.startswith(f"{name}: the result could not be written: ")
    assert ended.stderr.count("\n") == 1


WRONG = {
    "no tokens": (["--tokens", "0"], "--tokens", "from 32"),
    "one block": (["--tokens", "16"], "--tokens", "from 32"),
    "longer than the model takes": (["--tokens", "9000"], "--tokens", "to 8184"),
    "more than the cache takes": (
        ["--tokens", "4096", "--requests", "64"],
        "--tokens",
        "at most --tokens 1016",
    ),
    "no requests": (["--requests", "0"], "--requests", "from 1 to 64"),
    "too many requests": (["--requests", "65"], "--requests", "from 1 to 64"),
    "a negative seed": (["--seed", "-1"], "--seed", "from 0"),
    "no lengths": (["--lengths", ""], "--lengths", "such as 256,1024"),
    "words as lengths": (["--lengths", "256,long"], "--lengths", "such as 256,1024"),
    "a length too short": (["--lengths", "256,8"], "--lengths", "from 32"),
    "words as a number": (["--tokens", "many"], "--tokens", "many"),
    "an unknown option": (["--gpu"], "--gpu", "--help"),
}


@pytest.mark.parametrize("case", WRONG)
def test_wrong_input_is_refused_with_a_remedy(
    case: str, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments, option, remedy = WRONG[case]
    assert main(["demo", *arguments]) == 2
    printed = capsys.readouterr()
    assert printed.out == ""
    assert option in printed.err
    assert remedy in printed.err


def test_what_is_said_to_fit_fits() -> None:
    """The remedy for too many tokens names the exact limit."""
    from kvtier.cli.demo.settings import DemoSettings, WrongSetting

    DemoSettings.from_options(1016, 64, "64", 0)
    with pytest.raises(WrongSetting, match="1016"):
        DemoSettings.from_options(1017, 64, "64", 0)
