"""Something else answers at the server's address: the engine serves without the tier, takes little
memory, and uses the tier when the server is there."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from itertools import chain, repeat
from typing import Any

import pytest

from kvtier.cli import main
from kvtier.tiering.remote.errors import FailureKind, ServerFailure
from kvtier.tiering.valkey import wire
from tests.tiering.valkey.harness import little_memory, valkey_harness
from tests.tiering.valkey.server import ValkeyProcess
from tests.tiering.valkey.serving import PROMPTS, TOKENS, serving

_KINDS = ("garbage", "unreachable", "refused")
Nonsense = Callable[[], Iterable[bytes]]

_CHUNK = bytes(1 << 16)
_HOST = b"$9\r\n127.0.0.1\r\n"
_NO_LIST = b"*0\r\n"

NONSENSE: dict[str, Nonsense] = {
    "http": lambda: [b"HTTP/1.1 400 Bad Request\r\nContent-Length: 0\r\n\r\n"],
    "nothing": list,
    "an endless line": lambda: repeat(b"7" * 4096),
    "an endless string": lambda: chain([b"$99999999999\r\n"], repeat(_CHUNK)),
    "an endless list": lambda: chain([b"*1000000000\r\n"], repeat(b":1\r\n" * 1000)),
    "endless lists": lambda: repeat(b"*9999\r\n" + b":1\r\n" * 9999),
    "endless lists in lists": lambda: repeat(b"*1\r\n" * 1000),
    "endless answers": lambda: repeat(b"+OK\r\n" * 1000),
    "endless zeros": lambda: repeat(b":0\r\n" * 1000),
    "a string that is shorter": lambda: [b"$5\r\nab\r\n" * 100],
    "no number": lambda: [b":abc\r\n$abc\r\n*abc\r\n" * 100],
    "a negative length": lambda: [b"$-7\r\n*-7\r\n" * 100],
    "errors": lambda: [b"-\r\n-ERR \xff\xfe\r\n" * 100],
    "a list of long words": lambda: chain(
        [b"*65000\r\n"], repeat(b"$2000\r\n" + bytes(2000) + b"\r\n")
    ),
    "a greeting": lambda: [b"220 mail.example ESMTP\r\n"],
}


class NonsenseServer:
    """Sends the same to everyone who connects, as soon as they have said something."""

    def __init__(self, port: int, nonsense: Nonsense) -> None:
        self._nonsense = nonsense
        self._listener = socket.create_server(("127.0.0.1", port))
        self.port: int = self._listener.getsockname()[1]
        self._connected: list[socket.socket] = []
        self._threads = [threading.Thread(target=self._accept)]
        self._threads[0].start()

    def _accept(self) -> None:
        with suppress(OSError):
            while True:
                connected, _ = self._listener.accept()
                self._connected.append(connected)
                thread = threading.Thread(target=self._talk, args=(connected,))
                self._threads.append(thread)
                thread.start()

    def _talk(self, connected: socket.socket) -> None:
        with suppress(OSError):
            connected.recv(1)
            for some in self._nonsense():
                connected.sendall(some)
            connected.shutdown(socket.SHUT_WR)
            while connected.recv(1 << 16):
                pass

    @property
    def num_connections(self) -> int:
        return len(self._connected)

    def close(self) -> None:
        with suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        for connected in self._connected:
            with suppress(OSError):
                connected.shutdown(socket.SHUT_RDWR)
        for thread in self._threads:
            thread.join()
        for connected in self._connected:
            connected.close()


@contextmanager
def talking(nonsense: Nonsense, port: int = 0) -> Iterator[NonsenseServer]:
    server = NonsenseServer(port, nonsense)
    try:
        yield server
    finally:
        server.close()


@pytest.mark.parametrize(
    "name",
    [
        *("http", "an endless line", "an endless string", "endless zeros", "errors"),
        *(pytest.param(name, marks=pytest.mark.soak) for name in NONSENSE),
    ],
)
def test_a_server_that_turns_into_another_one_and_back(server: ValkeyProcess, name: str) -> None:
    with serving(server.url) as engine:
        engine.serve_until_loaded()
        server.kill()
        try:
            with talking(NONSENSE[name], server.port), little_memory():
                for _ in range(2):
                    assert sum(engine.serve_all()) < len(PROMPTS) * TOKENS
                assert sum(engine.counted(f"failures_{kind}") for kind in _KINDS) > 0
        finally:
            server.start()
        engine.serve_until_loaded()


@pytest.mark.parametrize(
    ("name", "keys"),
    [
        *((name, {}) for name in NONSENSE),
        *((name, {"password": "the-password"}) for name in ("http", "endless zeros", "errors")),
        *((name, {"cluster": True}) for name in NONSENSE if "list" in name or name == "http"),
        *((name, {"sentinel_service": "main"}) for name in ("http", "endless lists", "errors")),
    ],
)
def test_an_engine_starts_beside_another_server(
    name: str, keys: dict[str, Any], caplog: pytest.LogCaptureFixture
) -> None:
    with talking(NONSENSE[name]) as other, little_memory():
        with serving(f"valkey://127.0.0.1:{other.port}", **keys) as engine:
            assert engine.serve(PROMPTS[0]) == 0
            assert engine.serve(PROMPTS[0]) == TOKENS, "from host memory"
        assert "Traceback" not in caplog.text
        assert "the-password" not in caplog.text


TOPOLOGIES: dict[str, tuple[bytes, dict[str, Any]]] = {
    "slots without a server": (b"*1\r\n*2\r\n:0\r\n:16383\r\n", {"cluster": True}),
    "slots beyond the last": (
        b"*1\r\n*3\r\n:0\r\n:99999\r\n*2\r\n" + _HOST + b":1\r\n",
        {"cluster": True},
    ),
    "a server at no port": (
        b"*1\r\n*3\r\n:0\r\n:16383\r\n*2\r\n" + _HOST + b":-1\r\n",
        {"cluster": True},
    ),
    "a primary at no port": (
        b"*2\r\n" + _HOST + b"$3\r\nabc\r\n" + _NO_LIST,
        {"sentinel_service": "main"},
    ),
    "a primary whose host is no text": (
        b"*2\r\n$1\r\n\xff\r\n$1\r\n1\r\n" + _NO_LIST,
        {"sentinel_service": "main"},
    ),
    "a Sentinel whose figures have no names": (
        b"*2\r\n" + _HOST + b"$1\r\n1\r\n" + b"*1\r\n*2\r\n*0\r\n:1\r\n",
        {"sentinel_service": "main"},
    ),
}
"""What a server answers that is asked for others, with the keys of an engine that asks."""


def test_an_engine_starts_beside_a_server_that_takes_long_for_each_answer(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(wire, "_LONGEST_S", 0.5)

    def slowly() -> Iterator[bytes]:
        for _ in range(30):
            time.sleep(0.1)
            yield b":0\r\n"

    with talking(slowly) as other, serving(f"valkey://127.0.0.1:{other.port}") as engine:
        assert "the server is too slow. The engine starts without this tier" in caplog.text
        assert engine.serve(PROMPTS[0]) == 0


@pytest.mark.parametrize("name", TOPOLOGIES)
def test_an_engine_beside_a_server_that_names_impossible_ones(
    name: str, caplog: pytest.LogCaptureFixture
) -> None:
    answer, keys = TOPOLOGIES[name]
    with talking(lambda: [answer]) as other:
        with serving(f"valkey://127.0.0.1:{other.port}", **keys) as engine:
            assert engine.serve(PROMPTS[0]) == 0
            assert sum(engine.counted(f"failures_{kind}") for kind in _KINDS) > 0
            threads = [thread.name for thread in threading.enumerate()]
            assert sum("valkey-lookup" in thread for thread in threads) == 2
        assert "Traceback" not in caplog.text


def test_a_server_that_fails_is_not_called_for_each_block() -> None:
    with talking(NONSENSE["nothing"]) as other:
        url = f"valkey://127.0.0.1:{other.port}"
        with valkey_harness(url, connections=1) as harness:
            for block in harness.keys(300):
                (report,) = harness.wait_for(harness.store([block]))
                assert not report.moved
        assert other.num_connections < 30


@pytest.mark.parametrize("began", [b"", b"$100\r\n"], ids=["a line", "a block"])
def test_a_server_that_sends_one_byte_after_the_other(
    began: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is never silent, and never done."""
    monkeypatch.setattr(wire, "_LONGEST_S", 0.2)

    def slowly() -> Iterator[bytes]:
        yield began
        for _ in range(95):
            time.sleep(0.02)
            yield b"1"

    with talking(slowly) as other:
        connected = wire.Wire(socket.create_connection(("127.0.0.1", other.port)))
        try:
            connected.send([wire.command(b"GET", b"key")])
            with pytest.raises(ServerFailure) as failure:
                connected.read_into(memoryview(bytearray(100)))
            assert failure.value.kind is FailureKind.SILENT
        finally:
            connected.close()


@pytest.mark.parametrize("name", ["http", "nothing", "no number", "a greeting", "errors"])
def test_the_command_on_another_server(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    with talking(NONSENSE[name]) as other:
        assert main(["store", "stat", f"valkey://127.0.0.1:{other.port}"]) == 2
    printed = capsys.readouterr()
    assert printed.out == ""
    assert printed.err.count("\n") == 1
