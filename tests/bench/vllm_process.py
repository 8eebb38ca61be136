"""Starts processes with one vLLM engine each, and sends them commands. For benchmarks on a GPU."""

from __future__ import annotations

import json
import os
import select
import subprocess
import sys
import time
import traceback
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from tests.bench.worker import ROOT

_ENDS_WITHIN_S = 15.0
_KILLED_WITHIN_S = 10.0
_TAIL_LINES = 40
_TAIL_BYTES = 64 << 10
_READ_BYTES = 1 << 16


class EngineFailed(Exception):
    """An engine did not start, could not answer, or took too long. It is not used again."""


class EngineProcess:
    """One engine process. It starts when this object is made; `await_start` waits until it is
    ready."""

    def __init__(self, name: str, module: str, order: Mapping[str, Any], folder: Path) -> None:
        """`module`: executed in the process; its `Session` gets `order` and the commands. `folder`:
        made here, and written to by the engine."""
        self.name = name
        self.started_in_s: float | None = None
        self.folder = folder
        folder.mkdir()
        self._log = folder / "log"
        written = folder / "order.json"
        written.write_text(json.dumps(order))
        with self._log.open("wb") as log:
            self._process = subprocess.Popen(
                [sys.executable, "-m", module, str(written)],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                env=_environment(),
                cwd=ROOT,
                # Only the parent handles Ctrl-C; it ends this process in order.
                start_new_session=True,
                bufsize=0,
            )
        self._received = b""

    def has_started(self, wait_s: float) -> bool:
        """True once the engine is ready; waits for a limited time. Raises `EngineFailed`."""
        line = self._line(time.monotonic() + wait_s)
        if line is None:
            return False
        self.started_in_s = self._answer_in(line)["started_in_s"]
        return True

    def ask(self, command: str, argument: object, within_s: float = 120.0) -> Any:
        """Call a method of the engine's session. Raises `EngineFailed`."""
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(json.dumps({command: argument}).encode() + b"\n")
        except OSError as error:
            raise EngineFailed(f"it has ended, before it was asked to {command}") from error
        line = self._line(time.monotonic() + within_s)
        if line is None:
            raise EngineFailed(f"it did not {command} within {within_s:.0f} s")
        return self._answer_in(line)

    def last_words(self) -> str:
        """The last lines of the engine's log."""
        with self._log.open("rb") as log:
            log.seek(max(0, self._log.stat().st_size - _TAIL_BYTES))
            lines = log.read().decode(errors="replace").splitlines()
        return "\n".join(lines[-_TAIL_LINES:])

    def hang_up(self) -> None:
        """Close its standard input, so that it ends."""
        assert self._process.stdin is not None
        self._process.stdin.close()

    def end(self, within_s: float = _ENDS_WITHIN_S) -> None:
        """Wait until it has ended; kill it if it does not."""
        assert self._process.stdout is not None
        self.hang_up()
        try:
            self._process.wait(within_s)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait(_KILLED_WITHIN_S)
        finally:
            self._process.stdout.close()

    def _line(self, deadline: float) -> bytes | None:
        assert self._process.stdout is not None
        while b"\n" not in self._received:
            left = max(0.0, deadline - time.monotonic())
            ready, _, _ = select.select([self._process.stdout], [], [], left)
            if not ready:
                return None
            received = os.read(self._process.stdout.fileno(), _READ_BYTES)
            if not received:
                raise EngineFailed(f"its process has ended, with {self._process.wait()}")
            self._received += received
        line, _, self._received = self._received.partition(b"\n")
        return line

    def _answer_in(self, line: bytes) -> Any:
        document = json.loads(line)
        if "error" in document:
            raise EngineFailed(document["error"])
        return document["answer"]


def answer_commands(make_session: Callable[[dict[str, Any]], Any]) -> int:
    """The main loop of such a process: make the session, answer until standard input ends, and
    return the exit code. Everything that vLLM prints goes to standard error."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)

    def tell(document: dict[str, Any]) -> None:
        print(json.dumps(document), file=answers, flush=True)

    began = time.monotonic()
    try:
        session = make_session(json.loads(Path(sys.argv[1]).read_text()))
    except BaseException as error:
        traceback.print_exc()
        tell({"error": f"{type(error).__name__}: {error}"})
        return 1
    tell({"answer": {"started_in_s": time.monotonic() - began}})
    try:
        for line in sys.stdin:
            ((command, argument),) = json.loads(line).items()
            tell(_answered(getattr(session, command), argument))
    finally:
        session.end()
    return 0


def _answered(command: Callable[[Any], Any], argument: object) -> dict[str, Any]:
    try:
        return {"answer": command(argument)}
    except Exception as error:
        traceback.print_exc()
        return {"error": f"{type(error).__name__}: {error}"}


def _environment() -> dict[str, str]:
    path = [str(ROOT / "src"), str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]
    environment = os.environ | {
        "PYTHONPATH": os.pathsep.join(path),
        "PYTHONHASHSEED": "0",
        "PYTHONUNBUFFERED": "1",
        "VLLM_LOGGING_LEVEL": "INFO",
    }
    environment.pop("KVTIER_STRICT", None)
    return environment
