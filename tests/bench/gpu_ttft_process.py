"""Starts the engine processes of `tests.bench.gpu_ttft` and sends them commands."""

from __future__ import annotations

import json
import os
import select
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from tests.bench.gpu_ttft_settings import Engine, Settings
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

    def __init__(self, engine: Engine, settings: Settings, folder: Path, engine_id: str) -> None:
        self.engine = engine
        self.started_in_s: float | None = None
        self.folder = folder
        folder.mkdir()
        self._log = folder / "log"
        order = folder / "order.json"
        order.write_text(json.dumps(engine.order(settings, folder, engine_id)))
        with self._log.open("wb") as log:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "tests.bench.gpu_ttft_engine", str(order)],
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

    @property
    def name(self) -> str:
        return self.engine.name

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
