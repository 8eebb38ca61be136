"""A real pool for tests: a master with its metadata server, and processes that lend it memory.

All of them listen on every address of the network they are in. So they run in network namespaces
that the tests make (`tests.tiering.networks`), and so do tests with a client of their own: see the
fixture `network`. The client's library keeps threads in the network where it was imported, and
others where the process had its first client. So a test process has clients in one network only
(`network_of_process`); a client on another host is another process.

    python -m tests.tiering.mooncake.pool SETTINGS    lends a segment until standard input ends
"""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path
from typing import IO, Any

import pytest

from tests.tiering.networks import REPO, Host, Namespace, environment_of_tests
from tests.tiering.patience import wait_until
from tests.tiering.processes import ServerProcess, free_port

__all__ = [
    "CLIENT_TTL_S",
    "LEASE_MS",
    "Master",
    "Place",
    "Segment",
    "mooncake_master",
    "package_folder",
    "segment",
]

LEASE_MS = 500
"""How long what was read or looked up cannot be evicted."""
CLIENT_TTL_S = 2
"""Seconds without a sign of life after which the master forgets a client and its segment."""
_LOOPBACK = "127.0.0.1"
Place = Namespace | Host


def package_folder() -> Path:
    """Where the package and its programs are. Skips the test if they cannot run here."""
    spec = find_spec("mooncake")
    if spec is None or not spec.submodule_search_locations:
        pytest.skip("needs mooncake: pip install 'kvtier[mooncake]'")
    folder = Path(spec.submodule_search_locations[0])
    answer = subprocess.run(
        ["ldd", str(folder / "store.so")], capture_output=True, text=True, check=False, timeout=30
    )
    if missing := [line.split()[0] for line in answer.stdout.splitlines() if "not found" in line]:
        pytest.skip(f"needs {', '.join(missing)} (Debian: libibverbs1 libnuma1 libcurl4)")
    return folder


class Master(ServerProcess):
    """A master and, in the same process, the metadata server. It keeps nothing when it ends, and
    can be started again on the same ports: `kill`, then `start`."""

    def __init__(
        self,
        directory: Path,
        place: Place,
        *flags: str,
        address: str = _LOOPBACK,
        binary: Path | None = None,
    ) -> None:
        """`flags`: further ones, which prevail. `address`: one of the place, which clients use."""
        super().__init__(directory)
        self._place, self._flags = place, flags
        self._binary = binary or package_folder() / "mooncake_master"
        self._host = address
        with place.entered():
            self._ports = [free_port() for _ in range(3)]
        self.start()

    @property
    def address(self) -> str:
        """What clients call `master_server_addr`."""
        return f"{self._host}:{self._ports[0]}"

    @property
    def metadata_url(self) -> str:
        return f"http://{self._host}:{self._ports[1]}/metadata"

    @property
    def admin_address(self) -> str:
        """Of its HTTP interface."""
        return f"{self._host}:{self._ports[2]}"

    def command(self) -> list[str]:
        rpc, metadata, admin = self._ports
        return [
            str(self._binary),
            f"-rpc_address={self._host}",
            f"-rpc_port={rpc}",
            "-enable_http_metadata_server=true",
            f"-http_metadata_server_host={self._host}",
            f"-http_metadata_server_port={metadata}",
            f"-metrics_host={self._host}",
            f"-metrics_port={admin}",
            f"-default_kv_lease_ttl={LEASE_MS}",
            f"-client_ttl={CLIENT_TTL_S}",
            "-enable_metadata_cleanup_on_timeout=true",
            *self._flags,
        ]

    def start(self) -> None:
        with self._place.entered():
            super().start()

    def ask(self, path: str) -> str:
        """An answer of its HTTP interface, such as "/metrics" or "/get_all_keys". Any place."""
        url = f"http://{self._host}:{self._ports[2]}{path}"
        with self._place.entered(), urllib.request.urlopen(url, timeout=10) as answer:
            text: str = answer.read().decode()
            return text

    def keys(self) -> list[str]:
        """Names of all objects in the pool."""
        return self.ask("/get_all_keys").split()

    def segments(self) -> list[str]:
        """Names of the segments that the master knows: the addresses of those that lend them."""
        return self.ask("/get_all_segments").split()

    def is_ready(self) -> bool:
        try:
            health = json.loads(self.ask("/health"))
            return bool(health["service_ready"]) and self._metadata_answers()
        except OSError:
            return False

    def _metadata_answers(self) -> bool:
        url = self.metadata_url.removesuffix("/metadata") + "/health"
        with urllib.request.urlopen(url, timeout=10) as answer:
            return bool(answer.status == 200)


@contextmanager
def mooncake_master(
    directory: Path, place: Place, *flags: str, address: str = _LOOPBACK
) -> Iterator[Master]:
    """A master that ends with the context."""
    master = Master(directory, place, *flags, address=address)
    try:
        yield master
    finally:
        master.kill()


class Segment:
    """A process that lends memory to the pool, and has no other use."""

    def __init__(
        self,
        master: Master,
        num_bytes: int,
        place: Place,
        address: str = _LOOPBACK,
        metadata: str | None = None,
        **environment: str,
    ) -> None:
        """Returns when the memory is lent. `address`: one of the place. `metadata`: in place of the
        master's metadata server."""
        before = set(master.segments())
        with place.entered():
            self.name = f"{address}:{free_port()}"
            self._log = (master.directory / f"segment-{self.name}").open("ab")
            settings = {
                "local_hostname": self.name,
                "metadata_server": metadata or master.metadata_url,
                "global_segment_size": str(num_bytes),
                "local_buffer_size": str(16 << 20),
                "protocol": "tcp",
                "master_server_addr": master.address,
            }
            self._process = subprocess.Popen(
                [sys.executable, "-m", "tests.tiering.mooncake.pool", json.dumps(settings)],
                stdin=subprocess.PIPE,
                stdout=self._log,
                stderr=self._log,
                cwd=REPO,
                env=environment_of_tests() | {"MC_TCP_BIND_ADDRESS": address} | environment,
            )
        try:
            wait_until(lambda: self._is_lent(master, before), f"{self.name} has lent its memory")
        except BaseException:
            self.kill()
            raise

    def _is_lent(self, master: Master, before: set[str]) -> bool:
        said = Path(self._log.name).read_text(errors="replace")
        assert self._process.poll() is None, said[-4000:]
        # Without a metadata server, the library chooses the port.
        if new := set(master.segments()) - before:
            (self.name,) = new
        return bool(new)

    @property
    def pid(self) -> int:
        return self._process.pid

    def stop(self) -> None:
        """Let the process stand still: connections stay, and nothing is answered."""
        self._process.send_signal(signal.SIGSTOP)

    def go_on(self) -> None:
        self._process.send_signal(signal.SIGCONT)

    @contextmanager
    def standing_still(self) -> Iterator[None]:
        self.stop()
        try:
            yield
        finally:
            self.go_on()

    def kill(self) -> None:
        """End the process, as `kill -9` does: it takes its leave of nobody. Idempotent."""
        self._process.kill()
        self._gone()

    def close(self) -> None:
        """Take the memory back in an orderly way, and end. Idempotent."""
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._gone()

    def _gone(self) -> None:
        self._process.wait(timeout=60)
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._log.close()


@contextmanager
def segment(
    master: Master,
    num_bytes: int,
    place: Place,
    address: str = _LOOPBACK,
    metadata: str | None = None,
    **environment: str,
) -> Iterator[Segment]:
    """A segment that ends with the context."""
    lent = Segment(master, num_bytes, place, address, metadata, **environment)
    try:
        yield lent
    finally:
        lent.kill()


def _lend(settings: dict[str, Any], until: IO[str]) -> None:
    from mooncake.store import MooncakeDistributedStore

    store = MooncakeDistributedStore()
    if (code := store.setup(settings)) != 0:
        raise SystemExit(f"setup: {code}")
    until.read()
    store.close()


if __name__ == "__main__":
    _lend(json.loads(sys.argv[1]), sys.stdin)
