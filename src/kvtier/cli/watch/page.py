"""`kvtier page`: a status page over HTTP. It reads the sockets of engines, and changes nothing."""

from __future__ import annotations

import ipaddress
import json
import signal
import socket
import threading
import time
from base64 import b64encode
from collections.abc import Callable
from contextlib import suppress
from dataclasses import asdict
from hashlib import sha256
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler
from importlib.resources import files
from typing import Any

from kvtier.cli.http_server import BoundedHTTPServer
from kvtier.cli.output import CannotServe, finish, note, write_line
from kvtier.cli.watch.engines import FollowedEngines
from kvtier.cli.watch.overview import Hour, Overview, look, look_back
from kvtier.observe.client import EngineNotFound, find_engines

__all__ = ["run_page"]

_STATUS_FOR_S, _HOUR_FOR_S = 1.0, 5.0
"""For so long, an answer is given again without asking the engines."""
_CLIENT_TIMEOUT_S = 10.0
_LOCAL_NAMES = frozenset({"localhost"})


def run_page(engines: FollowedEngines, host: str, port: int, *, is_public: bool) -> int:
    """Serve the page until the process is to end. Returns the exit code. Raises `CannotServe`, and
    `EngineNotFound` if it is not clear which engine is meant."""
    family, address = _address_of(host, port, is_public)
    try:
        engines.find()
    except EngineNotFound as problem:
        if find_engines() or not engines.may_return:
            raise
        note(f"kvtier page: {problem}. The page waits for an engine")
    try:
        server = _Server(family, address, _Source(engines), host)
    except OSError as error:
        raise CannotServe.at(host, port, error) from None
    with server:
        shown = f"[{host}]" if family == socket.AF_INET6 else host
        write_line(f"http://{shown}:{server.server_address[1]}/")
        finish()
        if is_public:
            note("kvtier page: everyone who reaches this address can read the page")
        _serve_until_told(server)
    return 0


def _serve_until_told(server: _Server) -> None:
    def end(_number: int, _frame: object) -> None:
        # `shutdown` waits for the loop, which runs on this thread.
        threading.Thread(target=server.shutdown, daemon=True).start()

    former = signal.signal(signal.SIGTERM, end)
    try:
        server.serve_forever(poll_interval=0.2)
    finally:
        signal.signal(signal.SIGTERM, former)


def _address_of(host: str, port: int, is_public: bool) -> tuple[socket.AddressFamily, Any]:
    try:
        found = socket.getaddrinfo(host or None, port, type=socket.SOCK_STREAM)
    except (OSError, UnicodeError) as error:
        raise CannotServe.at(host, port, error) from None
    family, _, _, _, address = found[0]
    if not host or not (ipaddress.ip_address(address[0]).is_loopback or is_public):
        raise CannotServe(
            f"--host {host or '(empty)'}: other machines can reach it, and the page asks nobody "
            "for a password. Leave the option out and use ssh -L, or add --public"
        )
    return family, address


class _Source:
    """Asks the engines for what browsers want. Any thread."""

    def __init__(self, engines: FollowedEngines) -> None:
        self._engines = engines
        self._lock = threading.Lock()
        self._kept: dict[str, tuple[float, bytes]] = {}

    def status(self) -> bytes:
        """An overview."""
        return self._answer("status", _STATUS_FOR_S, lambda: look(self._engines))

    def hour(self) -> bytes:
        """The charts, as of the last `status`."""
        return self._answer("hour", _HOUR_FOR_S, lambda: look_back(self._engines))

    def _answer(self, name: str, keep_s: float, make: Callable[[], Overview | Hour]) -> bytes:
        with self._lock:
            made_at, answer = self._kept.get(name, (-keep_s, b""))
            if time.monotonic() - made_at >= keep_s or not answer:
                answer = json.dumps(asdict(make()), separators=(",", ":"), allow_nan=False).encode()
                self._kept[name] = time.monotonic(), answer
            return answer


def _page() -> tuple[bytes, str]:
    """The page, and the only policy with which a browser runs what is in it."""
    here = files("kvtier.cli.watch")
    style, script, html = (
        (here / f"page.{kind}").read_text("utf-8") for kind in ("css", "js", "html")
    )
    html = html.replace("/* page.css */", style).replace("/* page.js */", script)
    policy = (
        f"default-src 'none'; script-src '{_digest(script)}'; style-src '{_digest(style)}'; "
        "img-src data:; connect-src 'self'; base-uri 'none'; form-action 'none'; "
        "frame-ancestors 'none'"
    )
    return html.encode(), policy


def _digest(text: str) -> str:
    return "sha256-" + b64encode(sha256(text.encode()).digest()).decode()


class _Server(BoundedHTTPServer):
    def __init__(
        self, family: socket.AddressFamily, address: Any, source: _Source, host: str
    ) -> None:
        self.address_family = family
        self.names = _LOCAL_NAMES | {host.lower()}
        """What browsers may call this server, besides its addresses."""
        self.page, self.policy = _page()
        self.answers = {"/status.json": source.status, "/hour.json": source.hour}
        super().__init__(address[:2], _Handler)


class _Handler(BaseHTTPRequestHandler):
    server: _Server
    protocol_version = "HTTP/1.1"
    server_version, sys_version = "kvtier", ""
    timeout = _CLIENT_TIMEOUT_S

    def do_GET(self) -> None:
        path = self.path.partition("?")[0]
        if not self._is_called_by_its_name():
            # A page of another site has made its own name stand for this address.
            self.send_error(HTTPStatus.MISDIRECTED_REQUEST)
        elif path == "/":
            self._send(HTTPStatus.OK, "text/html; charset=utf-8", self.server.page)
        elif path in self.server.answers:
            self._send(HTTPStatus.OK, "application/json", self.server.answers[path]())
        else:
            self.send_error(HTTPStatus.NOT_FOUND)

    do_HEAD = do_GET  # noqa: N815 - the base class calls it by this name

    def _is_called_by_its_name(self) -> bool:
        given = self.headers.get_all("Host", [])
        if len(given) != 1:
            return False
        name = given[0].strip().lower()
        if name.startswith("["):
            name = name[1:].partition("]")[0]
        elif ":" in name:
            name = name.rpartition(":")[0]
        with suppress(ValueError):
            ipaddress.ip_address(name)
            return True
        return name in self.server.names

    def send_error(self, code: int, message: str | None = None, explain: str | None = None) -> None:
        """Answer with a status alone. Also called for requests that cannot be read."""
        if code == HTTPStatus.NOT_IMPLEMENTED:
            code = HTTPStatus.METHOD_NOT_ALLOWED
        status = HTTPStatus(code)
        self.close_connection = True
        self._send(status, "text/plain; charset=utf-8", f"{status} {status.phrase}\n".encode())

    def _send(self, status: HTTPStatus, kind: str, body: bytes) -> None:
        self.send_response(status)
        for name, value in (
            ("Content-Type", kind),
            ("Content-Length", str(len(body))),
            ("Content-Security-Policy", self.server.policy),
            ("Cross-Origin-Resource-Policy", "same-origin"),
            ("Cross-Origin-Opener-Policy", "same-origin"),
            ("X-Content-Type-Options", "nosniff"),
            ("Referrer-Policy", "no-referrer"),
            ("Cache-Control", "no-store"),
        ):
            self.send_header(name, value)
        if status == HTTPStatus.METHOD_NOT_ALLOWED:
            self.send_header("Allow", "GET, HEAD")
        if self.close_connection:
            self.send_header("Connection", "close")
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)

    def log_message(self, format: str, *args: object) -> None:  # noqa: A002 - the base class names it
        """Requests are not logged."""
