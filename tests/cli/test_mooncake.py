"""`kvtier mooncake` with the real programs, in a network that has nothing but loopback."""

from __future__ import annotations

import json
import os
import re
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from kvtier.cli import main
from kvtier.tiering.mooncake.options import MooncakeOptions
from tests.tiering.mooncake.pool import Master, mooncake_master, package_folder
from tests.tiering.networks import (
    Namespace,
    environment_of_tests,
    network_of_process,
    private_network,
)
from tests.tiering.patience import wait_until

SEGMENT = 64 << 20
CLIENT = """
import json, sys
from mooncake.store import MooncakeDistributedStore
entry = json.loads(sys.argv[1])
store = MooncakeDistributedStore()
lent = int(entry.get("segment_bytes", 0))
metadata = entry.get("metadata", "P2PHANDSHAKE")
assert store.setup("127.0.0.1", metadata, lent, 1 << 20, "tcp", "", entry["master"]) == 0
assert store.put("name", b"value") == 0
assert store.get("name") == b"value"
print(json.dumps("served"), flush=True)
sys.stdin.read()
store.close()
"""


@pytest.fixture(autouse=True)
def network() -> Iterator[Namespace]:
    package_folder()
    with network_of_process().entered():
        yield network_of_process()


class Command:
    """A running `kvtier mooncake`."""

    def __init__(self, *arguments: str) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-m", "kvtier", "mooncake", *arguments],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            env=environment_of_tests(),
        )
        self.said = ""

    def line(self) -> str:
        """The next one of standard output."""
        assert self.process.stdout is not None
        line = self.process.stdout.readline().decode()
        self.said += line
        assert line, self.process.communicate()
        return line

    def until(self, what: str) -> None:
        """Read lines up to one that contains this."""
        while what not in self.line():
            pass

    def pids(self) -> list[int]:
        """Of the processes that it has started."""
        pids = [int(pid) for pid in re.findall(r"process (\d+)", self.said)]
        assert pids
        return pids

    def ended(self) -> tuple[int, str]:
        """Exit code, and what it wrote to standard error."""
        _, problems = self.process.communicate(timeout=60)
        return self.process.returncode, problems.decode()


@contextmanager
def command(*arguments: str) -> Iterator[Command]:
    running = Command(*arguments)
    try:
        yield running
    finally:
        running.process.kill()
        running.process.communicate()


def document_of(running: Command) -> dict[str, Any]:
    document: dict[str, Any] = json.loads(running.line())
    return document


def is_running(pid: int) -> bool:
    """False also for one that has ended and whose exit code nobody has asked for."""
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except (FileNotFoundError, ProcessLookupError):
        return False
    return state != "Z"


def none_runs(pids: list[int]) -> bool:
    return not any(map(is_running, pids))


def is_free(port: int) -> bool:
    with socket.socket() as probe:
        return probe.connect_ex(("127.0.0.1", port)) != 0


@contextmanager
def client(entry: dict[str, Any]) -> Iterator[None]:
    """A client that has stored and loaded, and stays until the end."""
    with subprocess.Popen(
        [sys.executable, "-c", CLIENT, json.dumps(entry)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        env=environment_of_tests() | {"MC_TCP_BIND_ADDRESS": "127.0.0.1"},
    ) as process:
        assert process.stdout is not None
        assert process.stdin is not None
        assert b"served" in process.stdout.readline(), process.communicate()
        try:
            yield
        finally:
            process.stdin.close()
            process.wait(timeout=60)


def test_a_pool_for_a_trial_and_its_end() -> None:
    with command("up", "--segment", str(SEGMENT)) as up:
        up.until("pool  ")
        entries = json.loads(up.said.partition("secondary_tiers: ")[2].splitlines()[0])
        assert entries == [{"type": "mooncake", "master": "127.0.0.1:50051"}]
        assert "--mooncake 127.0.0.1:50051\n" in up.said
        assert "lends 64 MiB, listens on all addresses" in up.said
        assert "objects: 0; 0 B of 64 MiB; segments: 1" in up.said
        with client(entries[0]):
            up.until("objects: 1; ")
        up.process.send_signal(signal.SIGINT)
        assert up.ended() == (130, "")
        assert none_runs(up.pids())
        assert is_free(50051)
        assert is_free(9003)


def test_programs_get_a_document_and_a_metadata_server() -> None:
    ports = ("--metadata-port", "8080", "--port", "50052", "--admin-port", "9004")
    with command("up", "--json", *ports) as up:
        document = document_of(up)
        assert document["master"]["address"] == "127.0.0.1:50052"
        assert document["metadata"] == {
            "url": "http://127.0.0.1:8080/metadata",
            "listens_on": "0.0.0.0:8080",
        }
        assert document["segment"] is None
        (entry,) = document["secondary_tiers"]
        assert entry == {
            "type": "mooncake",
            "master": "127.0.0.1:50052",
            "admin": "127.0.0.1:9004",
            "metadata": "http://127.0.0.1:8080/metadata",
            "segment_bytes": "4GiB",
        }
        MooncakeOptions.parse({key: entry[key] for key in entry if key != "type"})
        with client(entry | {"segment_bytes": SEGMENT}):
            up.process.terminate()
            assert up.ended() == (0, "")
        assert none_runs([document["master"]["pid"]])


@pytest.mark.parametrize(("place", "name"), [(0, "master"), (1, "process that lends")])
def test_the_death_of_a_part_ends_the_pool(place: int, name: str) -> None:
    with command("up", "--segment", str(SEGMENT)) as up:
        up.until("pool  ")
        os.kill(up.pids()[place], signal.SIGKILL)
        code, problems = up.ended()
        assert code == 1
        assert problems == (
            f"kvtier mooncake up: the {name} has ended (killed by signal 9). The pool is ended\n"
        )
        assert none_runs(up.pids())


def test_nothing_is_left_of_a_killed_command() -> None:
    with command("up", "--segment", str(SEGMENT)) as up:
        up.until("pool  ")
        up.process.kill()
        wait_until(lambda: none_runs(up.pids()), "its processes have ended")


def test_a_master_that_stands_still_is_reported_and_ended() -> None:
    with command("up") as up:
        up.until("pool  ")
        assert "segment   none: engines lend memory" in up.said
        assert "--mooncake 127.0.0.1:50051:4GiB\n" in up.said
        os.kill(up.pids()[0], signal.SIGSTOP)
        up.until("the master does not answer")
        up.process.terminate()
        assert up.ended() == (0, "")
        assert none_runs(up.pids())


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["up", "--port", "0"], "0 is not a port"),
        (["up", "--metadata-port", "65536"], "65536 is not a port"),
        (["up", "--port", "9003"], "give each of the ports another number"),
        (["up", "--segment", "a lot"], "a lot"),
        (["up", "--segment", "800TiB"], "only"),
        (["up", "--host", "0.0.0.0"], "give one IPv4 address of this machine"),
        (["up", "--host", "cache.example"], "give one IPv4 address of this machine"),
        (["up", "--host", "10.99.99.99"], "10.99.99.99 is not an address of this machine"),
        (["up", "--host", "9.9.9.9"], "listen on 9.9.9.9, which the internet can reach"),
        (["lend", "0", "--master", "127.0.0.1:50051"], "SIZE is 0"),
        (["lend", "1GiB", "--master", "nowhere"], "master"),
        (["lend", "1GiB", "--master", "127.0.0.1:50051"], "no connection to the master"),
        (["lend", "800TiB", "--master", "127.0.0.1:50051"], "only"),
        (["lend", "1GiB", "--master", "127.0.0.1:1", "--protocol", "pigeon"], "protocol"),
        (["lend", "1GiB", "--master", "127.0.0.1:1", "--devices", "mlx5_0"], "devices"),
    ],
)
def test_wrong_input(
    arguments: list[str], says: str, capfd: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    assert main(["mooncake", *arguments]) == 2
    printed = capfd.readouterr()
    assert printed.out == ""
    assert says in printed.err
    assert "Traceback" not in printed.err


@pytest.mark.parametrize("option", ["--port", "--admin-port", "--metadata-port"])
def test_a_port_in_use_is_refused_by_the_name_of_its_option(
    option: str, capfd: pytest.CaptureFixture[str]
) -> None:
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = other.getsockname()[1]
        assert main(["mooncake", "up", option, str(port)]) == 2
    problems = capfd.readouterr().err
    assert f"port {port}" in problems
    assert f"is in use: give another {option}" in problems


@pytest.fixture
def public_network() -> Iterator[None]:
    with private_network():
        subprocess.run(["ip", "address", "add", "9.9.9.9/32", "dev", "lo"], check=True)
        yield


@pytest.mark.usefixtures("public_network")
def test_a_public_address_needs_an_explicit_option() -> None:
    with command("up", "--segment", str(SEGMENT)) as up:
        code, problems = up.ended()
        assert code == 2
        assert "listen on 9.9.9.9, which the internet can reach" in problems
        assert "--allow-public" in problems
    with command("up", "--segment", str(SEGMENT), "--allow-public", "--json") as up:
        (entry,) = document_of(up)["secondary_tiers"]
        assert entry["allow_public"] is True


def test_without_the_package_it_says_what_to_install(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "mooncake.store", None)
    assert main(["mooncake", "up"]) == 2
    assert "pip install 'kvtier[mooncake]'" in capfd.readouterr().err


def test_without_a_library_it_says_what_to_install(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    (tmp_path / "mooncake").mkdir()
    (tmp_path / "mooncake" / "__init__.py").touch()
    (tmp_path / "mooncake" / "store.py").write_text('raise ImportError("libibverbs.so.1: gone")')
    monkeypatch.syspath_prepend(tmp_path)
    for name in [name for name in sys.modules if name.partition(".")[0] == "mooncake"]:
        monkeypatch.delitem(sys.modules, name)
    assert main(["mooncake", "up"]) == 2
    problems = capfd.readouterr().err
    assert "libibverbs.so.1: gone" in problems
    assert "apt-get install libibverbs1" in problems
    monkeypatch.delitem(sys.modules, "mooncake")


@pytest.fixture
def master(network: Namespace, tmp_path: Path) -> Iterator[Master]:
    with mooncake_master(tmp_path, network) as running:
        yield running


def test_memory_is_lent_and_taken_back(master: Master) -> None:
    arguments = ("--master", master.address, "--hostname", "127.0.0.1", "--json")
    with command("lend", str(SEGMENT), *arguments) as lend:
        document = document_of(lend)
        assert document["bytes"] == SEGMENT
        assert master.segments() == [document["name"]]
        with client({"master": master.address}):
            assert master.keys() == ["name"]
        master.kill()
        master.start()
        wait_until(lambda: master.segments() == [document["name"]], "it is lent again")
        lend.process.terminate()
        assert lend.ended()[0] == 0
        # At once, and not when its time has run out.
        assert master.segments() == []
