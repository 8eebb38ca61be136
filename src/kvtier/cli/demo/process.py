"""Runs an engine of the demo in a process of its own. This module has the code of both processes.

The demo sends an `EngineTask` over a connection and receives `Message`s. If the demo ends early,
the connection closes. The engine's process then ends too, and removes the files of the demo.
"""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from pathlib import Path
from typing import IO, Any

from kvtier.cli.demo.report import OperatorLog
from kvtier.cli.demo.server import OffloadingServer, Served
from kvtier.cli.demo.settings import Prompt
from kvtier.engine import ModelConfig

__all__ = [
    "Ended",
    "Failed",
    "EngineTask",
    "Message",
    "ProcessFailed",
    "Started",
    "run_in_process",
    "main",
]

_POLL_S = 0.1
_PATIENCE_S = 60.0
"""Seconds that the engine's process gets to end after the demo has closed the connection. The
engine's process checks the connection between two engine steps."""


@dataclass(frozen=True, slots=True)
class EngineTask:
    """The task of an engine: serve these prompts one after the other, and end."""

    model: ModelConfig
    prompts: Sequence[Prompt]
    tiers: Sequence[dict[str, Any]]


@dataclass(frozen=True, slots=True)
class Started:
    """The engine has started. Implements the protocol `kvtier.cli.demo.report.Offloader`."""

    process_id: int
    block_bytes: int
    tier_types: Sequence[str]


@dataclass(frozen=True, slots=True)
class Failed:
    """The engine ended early."""

    reason: str


@dataclass(frozen=True, slots=True)
class Ended:
    """All prompts were served and stored, and the engine has shut down."""

    warnings: Sequence[str]


Message = Started | Served | Failed | Ended


# --- in the process ----------------------------------------------------------------------------


class _DemoHasEnded(Exception):
    """The connection to the demo is closed."""


def main() -> int:
    """Run an engine in this process, and return the exit code. The arguments of the program are the
    descriptor of this process's end of the connection, and the folder to remove if the demo ends
    early."""
    # Ctrl-C sends SIGINT to every process of the terminal. The demo handles the signal, and closes
    # the connection to end this process.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    descriptor, folder = sys.argv[1:]
    with Connection(int(descriptor)) as demo:
        try:
            with OperatorLog() as log:
                _serve(demo.recv(), demo)
            demo.send(Ended(log.take()))
        except (_DemoHasEnded, EOFError, ConnectionError):
            shutil.rmtree(folder, ignore_errors=True)
            return 1
        except Exception as error:
            with suppress(ConnectionError):
                demo.send(Failed(str(error) or type(error).__name__))
            return 1
    return 0


def _serve(task: EngineTask, demo: Connection) -> None:
    def check() -> None:
        if demo.poll():  # the demo sends only the task, so the connection was closed
            raise _DemoHasEnded

    with OffloadingServer(task.model, task.prompts, check, task.tiers) as server:
        demo.send(Started(os.getpid(), server.block_bytes, server.tier_types))
        for prompt in task.prompts:
            demo.send(server.serve(prompt))
            server.settle()


# --- in the demo -------------------------------------------------------------------------------


# Run with `-c`. With `-m`, the classes of sent objects would belong to `__main__`, where the demo
# could not find them.
_PROGRAM = f"from {EngineTask.__module__} import main; raise SystemExit(main())"


class ProcessFailed(RuntimeError):
    """The process failed. The message says why, as far as is known."""


def run_in_process(
    task: EngineTask, folder: Path, check: Callable[[], None]
) -> Generator[Message, None, None]:
    """Run `task` in a new process, and yield its messages up to `Ended`. Raises `ProcessFailed`.

    The process removes `folder` if the demo is killed. `check` is called while waiting for a
    message. If it raises, the process is ended before the exception goes on.
    """
    with (
        tempfile.TemporaryFile() as stderr_file,
        _process(folder, stderr_file) as (process, connection),
    ):
        message = _answer(connection, task, check)
        while not isinstance(message, Ended):
            if message is None:
                raise ProcessFailed(f"the process ended {_how_it_ended(process, stderr_file)}")
            if isinstance(message, Failed):
                raise ProcessFailed(message.reason)
            yield message
            message = _answer(connection, None, check)
        yield message


def _answer(
    connection: Connection, task: EngineTask | None, check: Callable[[], None]
) -> Message | None:
    """Send `task`, if given, and return the next message. None if the process has ended."""
    try:
        if task is not None:
            connection.send(task)
        while not connection.poll(_POLL_S):
            check()
        message: Message = connection.recv()
    except (EOFError, ConnectionError):
        return None
    return message


@contextmanager
def _process(
    folder: Path, stderr_file: IO[bytes]
) -> Iterator[tuple[subprocess.Popen[bytes], Connection]]:
    connection, child_end = Pipe()
    try:
        with child_end:
            process = subprocess.Popen(
                [sys.executable, "-P", "-c", _PROGRAM, str(child_end.fileno()), folder],
                env=os.environ | {"PYTHONPATH": os.pathsep.join(_import_path())},
                pass_fds=[child_end.fileno()],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=stderr_file,
            )
        try:
            yield process, connection
        finally:
            connection.close()  # this makes the process end
            try:
                process.wait(_PATIENCE_S)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
    finally:
        connection.close()


def _import_path() -> list[str]:
    """Return this process's `sys.path`, for the PYTHONPATH of the new process."""
    return [path or os.getcwd() for path in sys.path]


def _how_it_ended(process: subprocess.Popen[bytes], stderr_file: IO[bytes]) -> str:
    code = process.wait(_PATIENCE_S)
    if code < 0:
        return f"by {signal.Signals(-code).name}"
    stderr_file.seek(0)
    last_lines = stderr_file.read().decode(errors="replace").splitlines()[-1:]
    return ": ".join([f"with exit code {code}", *last_lines])
