"""The server of `kvtier page`: who gets an answer, and what is in its headers."""

from __future__ import annotations

import http.client
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

import pytest

from kvtier.cli import main
from tests.cli.watch.told_engine import ToldEngine
from tests.test_architecture import SRC
from tests.tiering.patience import PATIENCE_S


@contextmanager
def serving(*arguments: str) -> Iterator[tuple[subprocess.Popen[str], str, int]]:
    """Yield the process of `kvtier page`, the host and the port."""
    process = subprocess.Popen(
        [sys.executable, "-m", "kvtier", "page", "--port", "0", *arguments],
        env=os.environ | {"PYTHONPATH": str(SRC)},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert process.stdout is not None
    assert process.stderr is not None
    try:
        url = re.fullmatch(r"http://(.+):(\d+)/\n", process.stdout.readline())
        assert url
        yield process, url[1].strip("[]"), int(url[2])
    finally:
        process.kill()
        process.wait()
        process.stdout.close()
        process.stderr.close()


def asked(
    host: str, port: int, path: str = "/", method: str = "GET", **headers: str
) -> tuple[http.client.HTTPResponse, bytes]:
    connection = http.client.HTTPConnection(host, port, timeout=PATIENCE_S)
    try:
        connection.request(method, path, headers=headers)
        answer = connection.getresponse()
        return answer, answer.read()
    finally:
        connection.close()


@pytest.fixture(scope="module")
def page() -> Iterator[tuple[str, int]]:
    """The page of no engine: who may read it does not depend on one."""
    with serving() as (_, host, port):
        yield host, port


def test_what_there_is(page: tuple[str, int]) -> None:
    for path, kind in (
        ("/", "text/html; charset=utf-8"),
        ("/?x=1", "text/html; charset=utf-8"),
        ("/status.json", "application/json"),
        ("/hour.json", "application/json"),
    ):
        answer, body = asked(*page, path)
        assert (answer.status, answer.headers["Content-Type"]) == (200, kind)
        head, nothing = asked(*page, path, "HEAD")
        assert (head.status, nothing) == (200, b"")
        assert int(head.headers["Content-Length"]) > 0
        assert int(answer.headers["Content-Length"]) == len(body)
    for path in ("/page.py", "/../page.py", "/status", "/%2e%2e/etc/passwd"):
        assert asked(*page, path)[0].status == 404


@pytest.mark.parametrize("method", ["POST", "PUT", "DELETE", "PATCH", "OPTIONS", "TRACE", "BREW"])
def test_nothing_but_reading(page: tuple[str, int], method: str) -> None:
    answer, body = asked(*page, "/", method)
    assert answer.status == 405
    assert answer.headers["Allow"] == "GET, HEAD"
    assert answer.headers["Content-Type"].startswith("text/plain")
    assert method.encode() not in body


def test_each_answer_keeps_the_browser_from_everything_else(page: tuple[str, int]) -> None:
    for path, method in (("/", "GET"), ("/status.json", "GET"), ("/no", "GET"), ("/", "POST")):
        headers = asked(*page, path, method)[0].headers
        policy = dict(
            part.strip().split(" ", 1) for part in headers["Content-Security-Policy"].split(";")
        )
        assert policy["default-src"] == policy["frame-ancestors"] == "'none'"
        assert policy["connect-src"] == "'self'"
        assert re.fullmatch(r"'sha256-[\w+/]+='", policy["script-src"])
        assert re.fullmatch(r"'sha256-[\w+/]+='", policy["style-src"])
        assert headers["X-Content-Type-Options"] == "nosniff"
        assert headers["Cache-Control"] == "no-store"
        assert headers["Cross-Origin-Resource-Policy"] == "same-origin"
        assert "Access-Control-Allow-Origin" not in headers


@pytest.mark.parametrize(
    ("name", "status"),
    [
        ("localhost", 200),
        ("LOCALHOST:9000", 200),
        ("127.0.0.1", 200),
        ("[::1]:8642", 200),
        ("192.168.7.9:8642", 200),
        ("evil.example", 421),
        ("evil.example:8642", 421),
        ("localhost.evil.example", 421),
        ("127.0.0.1.evil.example", 421),
        ("", 421),
        ("[::1", 200),
        ("[x]", 421),
    ],
)
def test_a_name_that_somebody_has_made_stand_for_this_address_gets_nothing(
    page: tuple[str, int], name: str, status: int
) -> None:
    for path in ("/", "/status.json", "/hour.json"):
        answer, body = asked(*page, path, Host=name)
        assert answer.status == status
        assert status == 200 or len(body) < 100


@pytest.mark.parametrize(
    "request_text",
    [
        b"GET / HTTP/1.1\r\n\r\n",
        b"GET / HTTP/1.1\r\nHost: localhost\r\nHost: evil.example\r\n\r\n",
        b"\x00\x01\x02\r\n\r\n",
        b"GET\r\n\r\n",
        b"GET / HTTP/9.9\r\n\r\n",
        b"GET /" + 70_000 * b"x" + b" HTTP/1.1\r\n\r\n",
    ],
    ids=range(6),
)
def test_nonsense_gets_nothing(page: tuple[str, int], request_text: bytes) -> None:
    with socket.create_connection(page, timeout=PATIENCE_S) as connection:
        connection.sendall(request_text)
        connection.shutdown(socket.SHUT_WR)
        answer = connection.makefile("rb").read()
    assert b"<html" not in answer
    assert b"Traceback" not in answer
    assert asked(*page)[0].status == 200


def test_many_connections_are_bounded(page: tuple[str, int]) -> None:
    connections = [socket.create_connection(page, timeout=PATIENCE_S) for _ in range(40)]
    try:
        # The last ones are closed at once, without an answer.
        assert connections[-1].recv(1) == b""
    finally:
        for connection in connections:
            connection.close()
    for _ in range(100):
        try:
            assert asked(*page)[0].status == 200
            return
        except (ConnectionError, http.client.HTTPException):
            continue
    raise AssertionError("no answer after the others have gone")


def test_it_reads_the_engine_and_ends_when_told(run_dir: Path) -> None:
    with ToldEngine() as told, serving() as (process, host, port):
        told.counters = {"kvtier_cpu_stored_blocks": 1234}
        status = json.loads(asked(host, port, "/status.json")[1])
        assert status["tiers"][0]["stored_blocks"] == 1234
        assert status["engines"][0]["pid"] == 4711
        process.send_signal(signal.SIGTERM)
        assert process.wait(PATIENCE_S) == 0


def test_it_waits_for_an_engine_and_for_the_next_one(run_dir: Path) -> None:
    def state() -> str:
        process_state: str = json.loads(asked(host, port, "/status.json")[1])["state"]
        return process_state

    with serving() as (_, host, port):
        assert state() == "none"
        with ToldEngine():
            while state() == "none":
                pass
            assert state() == "working"
        while state() == "working":
            pass
        assert state() == "gone"
        with ToldEngine():
            while state() == "gone":
                pass
            assert state() == "working"


def test_other_machines_are_kept_out_unless_they_are_asked_in(
    capsys: pytest.CaptureFixture[str],
) -> None:
    for host in ("0.0.0.0", "::", "", "192.0.2.1"):
        assert main(["page", "--port", "0", "--host", host]) == 2
        said = capsys.readouterr().err
        assert "--public" in said
        assert said.count("\n") == 1
    with serving("--host", "0.0.0.0", "--public") as (_, _, port):
        assert asked("127.0.0.1", port)[0].status == 200
    with serving("--host", "::1") as (_, host, port):
        assert asked(host, port)[0].status == 200


def test_addresses_that_cannot_be_used(capsys: pytest.CaptureFixture[str], run_dir: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = str(taken.getsockname()[1])
        assert main(["page", "--port", port]) == 2
        assert f"port {port} of 127.0.0.1 is in use" in capsys.readouterr().err.splitlines()[-1]
    assert main(["page", "--host", "no.such.host.invalid"]) == 2
    assert main(["page", "--port", "70000"]) == 2
    assert main(["page", "4711"]) == 2
    with ToldEngine(), ToldEngine():
        assert main(["page"]) == 2
        assert "2 engines run here" in capsys.readouterr().err
