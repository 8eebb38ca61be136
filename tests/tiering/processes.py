"""Server processes for tests: on loopback, on free ports, ended by the test that started them."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
from abc import ABC, abstractmethod
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from tests.tiering.patience import wait_until

__all__ = ["ServerProcess", "free_port"]


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
        assert isinstance(port, int)
        return port


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
        os.kill(self.pid, signal.SIGSTOP)

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
