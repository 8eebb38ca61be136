"""Another process of the demo, seen from the demo."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Generator, Iterator
from contextlib import contextmanager
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from pathlib import Path
from typing import IO

from kvtier.cli.demo.life import Ended, Failed, Life, Message

__all__ = ["ProcessFailed", "live"]

# Not `-m`: what it sends must not be of classes in `__main__`.
_PROGRAM = f"from {Life.__module__} import main; raise SystemExit(main())"
_LOOK_EVERY_S = 0.1
_PATIENCE_S = 60.0
"""For a process that has been told to end. It looks between two engine steps."""


class ProcessFailed(RuntimeError):
    """A process that did not do what it was started for. Says why, as far as that is known."""


def live(a_life: Life, folder: Path, check: Callable[[], None]) -> Generator[Message, None, None]:
    """Live it in a new process, and yield all that it says, to `Ended`, after which the process is
    gone. `folder` is removed by it if nobody is there any more to do so. `check` is called while
    waiting, and may raise; then the process is ended first."""
    with (
        tempfile.TemporaryFile() as complaints,
        _process(folder, complaints) as (process, connection),
    ):
        message = _answer(connection, a_life, check)
        while not isinstance(message, Ended):
            if message is None:
                raise ProcessFailed(f"the process ended {_how(process, complaints)}")
            if isinstance(message, Failed):
                raise ProcessFailed(message.reason)
            yield message
            message = _answer(connection, None, check)
        yield message


def _answer(
    connection: Connection, a_life: Life | None, check: Callable[[], None]
) -> Message | None:
    """What it says next; None if it has ended. `a_life` is sent before."""
    try:
        if a_life is not None:
            connection.send(a_life)
        while not connection.poll(_LOOK_EVERY_S):
            check()
        message: Message = connection.recv()
    except (EOFError, ConnectionError):
        return None
    return message


@contextmanager
def _process(
    folder: Path, complaints: IO[bytes]
) -> Iterator[tuple[subprocess.Popen[bytes], Connection]]:
    connection, theirs = Pipe()
    try:
        with theirs:
            process = subprocess.Popen(
                [sys.executable, "-P", "-c", _PROGRAM, str(theirs.fileno()), folder],
                env=os.environ | {"PYTHONPATH": os.pathsep.join(_import_path())},
                pass_fds=[theirs.fileno()],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=complaints,
            )
        try:
            yield process, connection
        finally:
            connection.close()  # says that it should end, unless it has
            try:
                process.wait(_PATIENCE_S)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
    finally:
        connection.close()


def _import_path() -> list[str]:
    """Where this process finds modules, as another one has to be told."""
    return [path or os.getcwd() for path in sys.path]


def _how(process: subprocess.Popen[bytes], complaints: IO[bytes]) -> str:
    code = process.wait(_PATIENCE_S)
    if code < 0:
        return f"by {signal.Signals(-code).name}"
    complaints.seek(0)
    last_lines = complaints.read().decode(errors="replace").splitlines()[-1:]
    return ": ".join([f"with exit code {code}", *last_lines])
