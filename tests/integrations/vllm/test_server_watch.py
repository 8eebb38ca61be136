"""An engine whose server was killed ends itself, whenever that happened."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest

from kvtier.integrations.vllm.server_watch import ServerWatch

ROOT = Path(__file__).parents[3]
METHODS = ["fork", "spawn", "forkserver"]


class Server:
    """A server in a process of its own, with the engine that it has started."""

    def __init__(self, process: subprocess.Popen[str], gate: Path) -> None:
        self._process = process
        self._gate = gate
        self.pid = process.pid
        self.engine_pid = int(self.line())

    def line(self) -> str:
        """The next line that the engine prints or logs."""
        assert self._process.stdout is not None
        return self._process.stdout.readline().rstrip("\n")

    def connect(self) -> None:
        """Let the engine make its connector."""
        self._gate.write_bytes(b"")

    def kill(self) -> None:
        self._process.kill()
        self._process.wait()


@contextmanager
def serving(
    folder: Path,
    method: str = "spawn",
    name: str = "EngineCore",
    num_servers: int = 1,
    num_files: int = 0,
) -> Iterator[Server]:
    gate = folder / "gate"
    os.mkfifo(gate)
    arguments = [method, name, str(num_servers), str(num_files), str(gate)]
    environment = {"PYTHONPATH": f"{ROOT / 'src'}{os.pathsep}{ROOT}"}
    with (
        # A server that is killed leaves the socket of its fork server, whose path must be short.
        tempfile.TemporaryDirectory() as sockets,
        subprocess.Popen(
            [sys.executable, "-m", "tests.integrations.vllm.server_and_engine", *arguments],
            stdout=subprocess.PIPE,
            text=True,
            cwd=ROOT,
            env=os.environ | environment | {"TMPDIR": sockets},
        ) as process,
    ):
        try:
            server = Server(process, gate)
            engine = os.pidfd_open(server.engine_pid)
            try:
                yield server
            finally:
                with suppress(ProcessLookupError):
                    signal.pidfd_send_signal(engine, signal.SIGKILL)
                os.close(engine)
        finally:
            process.kill()


def assert_engine_ends(server: Server) -> None:
    assert server.line().startswith(
        f"the server that started this engine, process {server.pid}, has ended without ending the "
        "engine"
    )
    assert server.line() == "SIGTERM"


@pytest.mark.parametrize("num_files", [0, 1100])
@pytest.mark.parametrize("method", METHODS)
def test_an_engine_ends_when_its_server_is_killed(
    tmp_path: Path, method: str, num_files: int
) -> None:
    """Also one that has more files open than `select` can wait for."""
    with serving(tmp_path, method, num_files=num_files) as server:
        server.connect()
        assert server.line() == "watched"
        server.kill()
        assert_engine_ends(server)


@pytest.mark.parametrize("method", METHODS)
def test_an_engine_ends_if_its_server_was_killed_while_it_loaded_its_model(
    tmp_path: Path, method: str
) -> None:
    with serving(tmp_path, method) as server:
        server.kill()
        server.connect()
        assert_engine_ends(server)


@pytest.mark.parametrize(("name", "num_servers"), [("EngineCore_DP0", 1), ("EngineCore", 2)])
def test_an_engine_that_others_may_reach_does_not_end(
    tmp_path: Path, name: str, num_servers: int
) -> None:
    with serving(tmp_path, name=name, num_servers=num_servers) as server:
        server.kill()
        server.connect()
        assert server.line() == "unwatched"


def test_a_closed_watch_does_not_end_anything() -> None:
    received: list[int] = []
    before = signal.signal(signal.SIGTERM, lambda number, _: received.append(number))
    try:
        with subprocess.Popen(["sleep", "60"]) as process:
            watch = ServerWatch(process.pid)
            watch.close()
            watch.close()
            process.kill()
    finally:
        signal.signal(signal.SIGTERM, before)
    assert received == []
