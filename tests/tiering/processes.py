"""Server processes for tests: on loopback, on free ports, ended by the test that started them."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
from abc import ABC, abstractmethod
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from tests.tiering.patience import wait_until

__all__ = ["ServerProcess", "free_port", "stop_process"]


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
        assert isinstance(port, int)
        return port


def stop_process(pid: int) -> None:
    """Let a process stand still. Returns when all its threads do: on a busy machine, they go on for
    a while after the signal."""
    os.kill(pid, signal.SIGSTOP)
    wait_until(lambda: _states(pid) == {"T"}, "all threads stand still")


def _states(pid: int) -> set[str]:
    found = set()
    for task in Path(f"/proc/{pid}/task").iterdir():
        with suppress(FileNotFoundError, ProcessLookupError):  # the thread has ended
            found.add((task / "stat").read_text(encoding="utf-8").rpartition(")")[2].split()[0])
    return found


class ServerProcess(ABC):
    """A server that runs until `kill`. It can be started again, on the same ports."""

    def __init__(self, directory: Path) -> None:
        directory.mkdir(parents=True, exist_ok=True)
        self.directory = directory
        self._process: subprocess.Popen[bytes] | None = None

    @abstractmethod
    def command(self) -> list[str]:
        """The program and its arguments."""

    @abstractmethod
    def is_ready(self) -> bool:
        """True once it answers."""

    @property
    def pid(self) -> int:
        assert self._process is not None
        return self._process.pid

    def start(self) -> None:
        with (self.directory / "log").open("ab") as log:
            self._process = subprocess.Popen(
                self.command(), stdout=log, stderr=log, cwd=self.directory
            )
        wait_until(self._is_up, "the server answers")

    def _is_up(self) -> bool:
        assert self._process is not None
        assert self._process.poll() is None, (self.directory / "log").read_text()[-4000:]
        return self.is_ready()

    def stop(self) -> None:
        """Let the process stand still: connections stay, and nothing is answered."""
        stop_process(self.pid)

    def go_on(self) -> None:
        os.kill(self.pid, signal.SIGCONT)

    @contextmanager
    def standing_still(self) -> Iterator[None]:
        self.stop()
        try:
            yield
        finally:
            self.go_on()

    def kill(self) -> None:
        """End the process, as `kill -9` does. Idempotent."""
        if self._process is not None:
            self._process.kill()
            self._process.wait()
