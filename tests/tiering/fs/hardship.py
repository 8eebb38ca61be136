"""Faults that a test can inject into its own process, and remove again."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest

from tests.tiering.patience import wait_until

__all__ = [
    "directory_for_everybody",
    "failing_calls",
    "path_in",
    "somebody_else",
    "stopped_holder",
]

_NOBODY = 65534


@contextmanager
def directory_for_everybody() -> Iterator[Path]:
    """A directory that everybody may read and only its owner may write. Skips the test unless run
    as root, which can become another user."""
    if os.geteuid() != 0:
        pytest.skip("becoming someone else needs root")
    with tempfile.TemporaryDirectory() as name:
        os.chmod(name, 0o755)
        yield Path(name)


@contextmanager
def somebody_else() -> Iterator[None]:
    """All threads of this process act as an ordinary user, to whom file modes apply."""
    os.seteuid(_NOBODY)
    try:
        yield
    finally:
        os.seteuid(0)


@contextmanager
def failing_calls(error: int, concerns: Callable[[object], bool], *names: str) -> Iterator[None]:
    """These functions of `os` fail for paths and descriptors for which `concerns` is true. For
    errors that no file system here can produce. A name relative to a directory's descriptor is
    passed to `concerns` as a whole path."""

    def failing(call: Callable[..., Any]) -> Callable[..., Any]:
        def fail_or_call(target: object, *args: Any, **options: Any) -> Any:
            fd = options.get("dir_fd", options.get("src_dir_fd"))
            if concerns(target if fd is None else path_in(target, fd)):
                raise OSError(error, os.strerror(error))
            return call(target, *args, **options)

        return fail_or_call

    patches = [patch.object(os, name, failing(getattr(os, name))) for name in names]
    for each in patches:
        each.start()
    try:
        yield
    finally:
        for each in patches:
            each.stop()


def path_in(name: object, dir_fd: int | None) -> str:
    """The whole path of a name that may be relative to an open directory."""
    return str(name) if dir_fd is None else f"{os.readlink(f'/proc/self/fd/{dir_fd}')}/{name}"


_HOLDER = """
import os, signal, sys
from pathlib import Path
from kvtier.tiering.fs.ledger import Ledger
with Ledger(Path(sys.argv[1])).lock(lambda: 30.0):
    os.kill(os.getpid(), signal.SIGSTOP)
    print("goes on", flush=True)
"""


@contextmanager
def stopped_holder(root: Path) -> Iterator[None]:
    """Another process holds the ledger's lock and is stopped by SIGSTOP. It continues at the end of
    the context."""
    command = [sys.executable, "-c", _HOLDER, str(root / "ledger")]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    with subprocess.Popen(command, env=environment, stdout=subprocess.PIPE) as holder:
        try:
            state = Path(f"/proc/{holder.pid}/stat")
            wait_until(lambda: state.read_text().rpartition(")")[2].split()[0] == "T", "stopped")
            yield
        finally:
            holder.send_signal(signal.SIGCONT)
            holder.wait()
