"""Real clusters of Valkey servers for tests."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from tests.tiering.patience import wait_until
from tests.tiering.processes import free_port
from tests.tiering.valkey.server import ValkeyProcess

__all__ = ["NUM_SLOTS", "ClusterOfServers", "cluster_of"]

NUM_SLOTS = 16_384


class ClusterOfServers:
    """Primaries with equal shares of the slots. A replica that was added follows the first."""

    def __init__(self, directory: Path, num_primaries: int, arguments: Sequence[str]) -> None:
        self._directory = directory
        self._arguments = arguments
        self.servers: list[ValkeyProcess] = []
        self._moved: list[tuple[ValkeyProcess, ValkeyProcess, tuple[int, int]]] = []
        for _ in range(num_primaries):
            self._add()
        share = -(-NUM_SLOTS // num_primaries)
        for number, server in enumerate(self.servers):
            with server.client() as client:
                last = min((number + 1) * share, NUM_SLOTS) - 1
                client.execute_command("CLUSTER", "ADDSLOTSRANGE", number * share, last)
                client.execute_command("CLUSTER", "SET-CONFIG-EPOCH", number + 1)
            self._meet(server)
        self.wait_until_all_agree()

    def _add(self) -> ValkeyProcess:
        settings = {
            "--cluster-enabled": "yes",
            "--cluster-port": str(free_port()),
            "--cluster-node-timeout": "1000",
            "--cluster-require-full-coverage": "no",
            "--cluster-replica-validity-factor": "0",
            "--cluster-allow-replica-migration": "no",
            "--repl-diskless-sync-delay": "0",
        }
        words = [part for pair in settings.items() for part in pair]
        directory = self._directory / f"{len(self.servers)}"
        self.servers.append(ValkeyProcess(directory, *words, *self._arguments))
        return self.servers[-1]

    def _meet(self, server: ValkeyProcess) -> None:
        first = self.servers[0]
        if server is not first:
            with server.client() as client:
                port = first.setting("--cluster-port")
                client.execute_command("CLUSTER", "MEET", "127.0.0.1", first.port, port)

    def add_replica(self) -> ValkeyProcess:
        """Add a server that takes over when the first one ends."""
        replica = self._add()
        self._meet(replica)
        its_id = self.id_of(self.servers[0])
        with replica.client() as client:
            wait_until(
                lambda: its_id in str(client.execute_command("CLUSTER NODES")),
                "the replica knows the primary",
            )
            client.execute_command("CLUSTER", "REPLICATE", its_id)
            wait_until(
                lambda: client.info("replication").get("master_link_status") == "up",
                "the replica follows",
            )
        self.wait_until_all_agree()
        return replica

    def id_of(self, server: ValkeyProcess) -> str:
        with server.client() as client:
            return bytes(client.execute_command("CLUSTER", "MYID")).decode()

    def wait_until_all_agree(self, but: ValkeyProcess | None = None) -> None:
        """Wait until all servers but that one know of all slots."""

        def agrees(server: ValkeyProcess) -> bool:
            with server.client() as client:
                info = client.execute_command("CLUSTER INFO")
            return (
                info["cluster_state"] == "ok"
                and int(info["cluster_slots_ok"]) == NUM_SLOTS
                and int(info["cluster_known_nodes"]) == len(self.servers)
            )

        wait_until(
            lambda: all(agrees(server) for server in self.servers if server is not but),
            "all servers agree",
        )

    def move_slots(self, source: ValkeyProcess, target: ValkeyProcess) -> None:
        """Move all slots of a server to another one, with their keys."""
        ranges = self._ranges_of(source)
        assert ranges
        for each in ranges:
            self._move(source, target, each)
            self._moved.append((source, target, each))

    def give_back_slots(self) -> None:
        """Undo `move_slots`."""
        while self._moved:
            source, target, each = self._moved.pop()
            self._move(target, source, each)

    @staticmethod
    def _ranges_of(server: ValkeyProcess) -> list[tuple[int, int]]:
        with server.client() as client:
            slots = client.execute_command("CLUSTER SLOTS")
        return [(first, last) for first, last, primary, *_ in slots if primary[1] == server.port]

    def _move(self, source: ValkeyProcess, target: ValkeyProcess, slots: tuple[int, int]) -> None:
        words = ("SLOTSRANGE", *slots, "NODE", self.id_of(target))
        with source.client() as client:
            client.execute_command("CLUSTER", "MIGRATESLOTS", *words)

        def is_known_to(server: ValkeyProcess) -> bool:
            """To have moved."""
            with server.client() as client:
                found = client.execute_command("CLUSTER SLOTS")
            return any(
                first <= slots[0] and slots[1] <= last and primary[1] == target.port
                for first, last, primary, *_ in found
            )

        wait_until(lambda: all(map(is_known_to, self.servers)), "the slots have moved")

    def kill(self) -> None:
        for server in self.servers:
            server.kill()


@contextmanager
def cluster_of(
    directory: Path, num_primaries: int = 3, arguments: Sequence[str] = ()
) -> Iterator[ClusterOfServers]:
    """A cluster that ends with the context."""
    cluster = ClusterOfServers(directory, num_primaries, arguments)
    try:
        yield cluster
    finally:
        cluster.kill()
