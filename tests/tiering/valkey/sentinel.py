"""Real Sentinels for tests, over a primary and its replica."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import valkey

from tests.tiering.patience import wait_until
from tests.tiering.processes import ServerProcess, free_port
from tests.tiering.valkey.server import ValkeyProcess, valkey_binary

__all__ = ["SERVICE", "Guardians", "SentinelProcess", "guardians"]

SERVICE = "the-service"


class SentinelProcess(ServerProcess):
    """One Sentinel. Two of them agree before they act."""

    def __init__(
        self, directory: Path, primary_port: int, *lines: str, binary: Path | None = None
    ) -> None:
        """`lines`: further ones of its configuration."""
        super().__init__(directory)
        self._binary = binary or valkey_binary()
        self.port = free_port()
        self._configuration = directory / "sentinel.conf"
        its_lines = (
            *("bind 127.0.0.1", f"port {self.port}", f"dir {directory}"),
            f"sentinel monitor {SERVICE} 127.0.0.1 {primary_port} 2",
            f"sentinel down-after-milliseconds {SERVICE} 500",
            f"sentinel failover-timeout {SERVICE} 2000",
            *lines,
        )
        self._configuration.write_text("\n".join(its_lines) + "\n", encoding="utf-8")
        self.start()

    @property
    def url(self) -> str:
        return f"valkey://127.0.0.1:{self.port}"

    def client(self) -> valkey.Valkey:
        return valkey.Valkey(port=self.port, socket_timeout=10)

    def command(self) -> list[str]:
        return [str(self._binary), str(self._configuration), "--sentinel"]

    def is_ready(self) -> bool:
        try:
            with socket.create_connection(("127.0.0.1", self.port), timeout=1) as probe:
                probe.sendall(b"PING\r\n")
                return probe.recv(64).startswith((b"+PONG", b"-NOAUTH"))
        except OSError:
            return False


class Guardians:
    """A primary, a replica, and two Sentinels."""

    def __init__(self, directory: Path, undo: ExitStack) -> None:
        self.primary = ValkeyProcess(directory / "primary", "--repl-diskless-sync-delay", "0")
        undo.callback(self.primary.kill)
        follows = ("--replicaof", f"127.0.0.1 {self.primary.port}")
        self.replica = ValkeyProcess(directory / "replica", *follows)
        undo.callback(self.replica.kill)
        self.sentinels: list[SentinelProcess] = []
        for number in range(2):
            sentinel = SentinelProcess(directory / f"sentinel-{number}", self.primary.port)
            undo.callback(sentinel.kill)
            self.sentinels.append(sentinel)
        wait_until(lambda: all(map(_knows_all, self.sentinels)), "the Sentinels know all")

    def named_port(self) -> int:
        """The port of the primary that the second Sentinel names."""
        with self.sentinels[1].client() as client:
            _, port = client.sentinel_get_master_addr_by_name(SERVICE)
        assert isinstance(port, int)
        return port


def _knows_all(sentinel: SentinelProcess) -> bool:
    with sentinel.client() as client:
        its = client.sentinel_master(SERVICE)
    with valkey.Valkey(port=its["port"]) as primary:
        num_replicas = primary.info("replication")["connected_slaves"]
    return bool(its["num-other-sentinels"] == its["num-slaves"] == num_replicas == 1)


@contextmanager
def guardians(directory: Path) -> Iterator[Guardians]:
    """All of them end with the context."""
    with ExitStack() as undo:
        yield Guardians(directory, undo)
