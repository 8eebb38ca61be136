"""Child processes that measure on command."""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]


def vllm_python(benchmark: str) -> str:
    """The interpreter of an environment with vLLM."""
    python = os.environ.get("KVTIER_VLLM_PYTHON")
    if python is None:
        sys.exit(
            f"{benchmark}: KVTIER_VLLM_PYTHON is not set. Set it to the Python of an environment "
            "with vLLM, which is measured beside kvtier; `make bench` builds one and sets it."
        )
    return python


def answer(begin: Callable[[str], Any], subjects: Iterable[str], description: str | None) -> None:
    """The main loop of a child process: `begin` makes a session for the subject named on the
    command line, each command calls a method of it, and `end` ends it."""
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("subject", choices=sorted(subjects))
    session = begin(parser.parse_args().subject)
    try:
        for line in sys.stdin:
            ((command, argument),) = json.loads(line).items()
            print(json.dumps(getattr(session, command)(argument)), flush=True)
    finally:
        session.end()


class Worker:
    """A child process. Commands and answers are JSON documents, one per line."""

    def __init__(self, process: subprocess.Popen[str], module: str) -> None:
        self._process = process
        self._module = module

    def ask(self, question: object) -> Any:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        print(json.dumps(question), file=self._process.stdin, flush=True)
        line = self._process.stdout.readline()
        if not line:
            sys.exit(f"{self._module}: the measuring process ended while it answered {question}")
        return json.loads(line)

    def kill(self) -> None:
        """Kill the process with SIGKILL. No command may follow."""
        self._process.kill()


@contextmanager
def worker(python: str, module: str, *arguments: str) -> Iterator[Worker]:
    environment = os.environ | {
        "PYTHONPATH": f"{ROOT / 'src'}{os.pathsep}{ROOT}",
        "VLLM_LOGGING_LEVEL": "ERROR",
    }
    environment.pop("KVTIER_STRICT", None)
    with subprocess.Popen(
        [python, "-m", module, *arguments],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env=environment,
    ) as process:
        yield Worker(process, module)
