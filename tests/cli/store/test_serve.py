"""`kvtier store serve` tells routers which blocks exist, whatever engines do meanwhile."""

from __future__ import annotations

import json
import signal
import socket
import struct
import subprocess
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from kvtier.base import OffloadKey, get_offload_block_hash
from kvtier.cli import main
from kvtier.testing import TierHarness
from tests.cli.store.outcomes import start
from tests.cli.store.roots import fill_root
from tests.cli.store.slabs import fill
from tests.tiering.valkey.server import valkey_server

KEYS = TierHarness.keys(8)
OTHERS = TierHarness.keys(3, start=50)
PATIENCE_S = 30.0

Fill = Callable[[list[OffloadKey], str], str]
"""Stores blocks of a namespace, and returns the name of the namespace."""


class Served:
    """A running `kvtier store serve`."""

    def __init__(self, url: str) -> None:
        self._url = url

    def call(self, path: str, document: object = None) -> tuple[int, Any]:
        body = None if document is None else json.dumps(document).encode()
        return self.send(path, body)

    def send(self, path: str, body: bytes | None) -> tuple[int, Any]:
        try:
            with urllib.request.urlopen(self._url + path, body, timeout=10) as answer:
                return answer.status, json.loads(answer.read())
        except urllib.error.HTTPError as error:
            return error.code, json.loads(error.read())

    def raw(self, header: bytes, *, resets: bool = False) -> bytes:
        """The beginning of the answer to a request with this header. `resets`: go away instead,
        before the body is sent."""
        host, port = self._url.removeprefix("http://").split(":")
        with socket.create_connection((host, int(port)), timeout=PATIENCE_S) as connection:
            connection.sendall(
                b"POST /check_blocks HTTP/1.1\r\nhost: it\r\n" + header + b"\r\n\r\n"
            )
            if resets:
                # Closing then resets the connection instead of ending it.
                connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
                return b""
            return connection.recv(100)

    def ranges(self, keys: list[OffloadKey], **more: Any) -> list[list[int]]:
        hashes = [as_number(key) for key in keys]
        status, answer = self.call("/check_blocks", {"block_hashes": hashes, **more})
        assert status == 200, answer
        found: list[list[int]] = answer["ranges"]
        return found

    def wait_for(self, keys: list[OffloadKey], ranges: list[list[int]], **more: Any) -> None:
        deadline = time.monotonic() + PATIENCE_S
        while (found := self.ranges(keys, **more)) != ranges:
            assert time.monotonic() < deadline, f"{found} instead of {ranges}"
            time.sleep(0.05)


def as_number(key: OffloadKey) -> int:
    """A hash as it is in events."""
    return int.from_bytes(get_offload_block_hash(key)[-8:], "big")


@contextmanager
def served(location: str, *options: str) -> Iterator[Served]:
    process = start(
        "serve", location, "--port", "0", "--refresh", "0.1", *options, output=subprocess.PIPE
    )
    with process:
        try:
            assert process.stdout is not None
            assert process.stderr is not None
            line = process.stdout.readline()
            assert line.startswith("http://127.0.0.1:"), process.stderr.read()
            yield Served(line.split()[0])
            process.send_signal(signal.SIGINT)
            assert process.wait(60) == 128 + signal.SIGINT
            assert "Traceback" not in process.stderr.read()
        finally:
            process.kill()


@pytest.fixture(params=["fs", "disk", "valkey"])
def place(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[tuple[str, Fill]]:
    """The location of a storage, and a function that fills it."""
    if request.param == "fs":
        root = tmp_path / "root"
        yield str(root), lambda keys, namespace: fill_root(root, keys, namespace)
    elif request.param == "disk":
        slab = tmp_path / "kv.slab"
        yield str(slab), lambda keys, namespace: fill(slab, keys, namespace).hex()
    else:
        with valkey_server(tmp_path / "server") as server, server.client() as client:

            def put(keys: list[OffloadKey], namespace: str) -> str:
                fingerprint = namespace.encode().ljust(16, b".")[:16].hex()
                for key in keys:
                    client.set(b"kvtier:1:" + fingerprint.encode() + b":" + key, b"a block")
                return fingerprint

            yield server.url, put


def test_it_answers_for_what_engines_store_and_remove(place: tuple[str, Fill]) -> None:
    location, put = place
    one = put(KEYS[2:5], "a model")
    with served(location) as service:
        assert service.ranges(KEYS) == [[2, 5]]
        assert service.ranges([*KEYS[4:], KEYS[3], KEYS[2]]) == [[0, 1], [4, 6]]
        assert service.ranges([]) == []
        assert service.ranges(KEYS, group_idx=1) == []
        hexes = [get_offload_block_hash(key).hex() for key in KEYS]
        assert service.call("/check_blocks", {"block_hashes": hexes})[1]["ranges"] == [[2, 5]]

        put(KEYS[6:], "a model")
        service.wait_for(KEYS, [[2, 5], [6, 8]])
        status, health = service.call("/health")
        assert (status, health["status"], health["namespaces"]) == (200, "ok", {one: 5})

        assert main(["store", "clear", location, "--yes"]) == 0
        service.wait_for(KEYS, [])


def test_blocks_of_another_model_are_not_taken_for_these(place: tuple[str, Fill]) -> None:
    location, put = place
    one, other = put(KEYS, "a model"), put(OTHERS, "other weights")
    with served(location) as service:
        status, answer = service.call("/check_blocks", {"block_hashes": [1]})
        assert status == 400
        assert one in answer["error"]
        assert other in answer["error"]
        assert service.ranges([*KEYS, *OTHERS], namespace=one[:12].upper()) == [[0, 8]]
        assert service.ranges([*KEYS, *OTHERS], namespace=other) == [[8, 11]]
    with served(location, "--namespace", other) as service:
        assert service.ranges([*KEYS, *OTHERS]) == [[8, 11]]


def test_wrong_requests_are_refused_and_harm_nothing(tmp_path: Path) -> None:
    fill_root(tmp_path / "root", KEYS)
    with served(str(tmp_path / "root")) as service:
        requests: list[Any] = [
            [],
            {"block_hashes": None},
            {"block_hashes": "ab"},
            {"block_hashes": [1.5]},
            {"block_hashes": [True]},
            {"block_hashes": [1 << 64]},
            {"block_hashes": ["not hex"]},
            {"block_hashes": [1], "group_idx": "0"},
            {"block_hashes": [1], "namespace": 7},
        ]
        for wrong in requests:
            status, answer = service.call("/check_blocks", wrong)
            assert (status, list(answer)) == (400, ["error"]), wrong
        assert service.send("/check_blocks", b"{")[0] == 400
        assert service.raw(b"content-length: " + b"9" * 5000).startswith(b"HTTP/1.1 400")
        service.raw(b"content-length: 100", resets=True)
        assert service.call("/clear", {})[0] == service.call("/")[0] == 404
        assert service.ranges(KEYS) == [[0, 8]]


def test_what_cannot_be_listed_counts_as_nothing(tmp_path: Path) -> None:
    root = tmp_path / "root"
    fill_root(root, KEYS)
    with served(str(root)) as service:
        root.rename(tmp_path / "gone")
        deadline = time.monotonic() + PATIENCE_S
        while service.call("/health")[0] != 503:
            assert time.monotonic() < deadline
            time.sleep(0.05)
        assert service.call("/check_blocks", {"block_hashes": [1]})[0] == 503
        (tmp_path / "gone").rename(root)
        while service.call("/health")[0] == 503:
            assert time.monotonic() < deadline
            time.sleep(0.05)
        assert service.ranges(KEYS) == [[0, 8]]


def test_what_is_no_store_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["store", "serve", str(tmp_path / "nothing")]) == 2
    assert capsys.readouterr().err.startswith("kvtier store: ")


def test_addresses_that_cannot_be_used(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    root = str(tmp_path / "root")
    fill_root(tmp_path / "root", KEYS, namespace="a")
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = str(taken.getsockname()[1])
        assert main(["store", "serve", root, "--port", port]) == 2
    said = f"kvtier store: port {port} of 127.0.0.1 is in use: give another --port"
    assert capsys.readouterr().err.startswith(said)
    assert main(["store", "serve", root, "--host", "192.0.2.1"]) == 2
    assert "--host 192.0.2.1 is not an address of this machine" in capsys.readouterr().err
