"""An HTTP server before the S3 server: it passes requests on, or answers what the test says."""

from __future__ import annotations

import ssl
import subprocess
import threading
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from http.client import HTTPConnection, HTTPException
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from types import TracebackType
from typing import Any, Self

__all__ = ["Answer", "Asked", "Authority", "Front", "error"]

_HOP_BY_HOP = {"connection", "transfer-encoding", "content-length", "keep-alive"}


@dataclass(frozen=True, slots=True)
class Asked:
    """A request."""

    method: str
    path: str
    """With the query."""
    headers: Mapping[str, str]
    content: bytes


@dataclass(frozen=True, slots=True)
class Answer:
    """What the test answers instead of the S3 server."""

    status: int = 200
    body: bytes | Iterable[bytes] = b""
    headers: Mapping[str, str] = field(default_factory=dict)
    raw: bytes | None = None
    """If given, these bytes are sent instead of an HTTP answer, and the connection is closed."""


def error(status: int, code: str, message: str = "") -> Answer:
    """An error as S3 services answer it."""
    body = f"<?xml version='1.0'?><Error><Code>{code}</Code><Message>{message}</Message></Error>"
    return Answer(status, body.encode(), {"Content-Type": "application/xml"})


class Authority:
    """A certificate authority of the test's own, and a certificate for 127.0.0.1 by it."""

    def __init__(self, directory: Path) -> None:
        directory.mkdir()
        self._directory = directory
        self.bundle = directory / "ca.pem"
        (directory / "extensions").write_text(
            "subjectAltName=IP:127.0.0.1\nbasicConstraints=CA:FALSE\nextendedKeyUsage=serverAuth\n"
        )
        new_key = "-newkey ec -pkeyopt ec_paramgen_curve:prime256v1 -nodes"
        self._run(f"req -x509 {new_key} -keyout ca.key -out ca.pem -days 2 -subj /CN=tests")
        self._run(f"req {new_key} -keyout key -out request -subj /CN=server")
        self._run(
            "x509 -req -in request -CA ca.pem -CAkey ca.key -CAcreateserial -days 2 "
            "-extfile extensions -out certificate"
        )

    def _run(self, command: str) -> None:
        subprocess.run(
            ["openssl", *command.split()], cwd=self._directory, check=True, capture_output=True
        )

    def context(self) -> ssl.SSLContext:
        """For a server."""
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.load_cert_chain(self._directory / "certificate", self._directory / "key")
        return context


class Front(ThreadingHTTPServer):
    """The server. A context manager. With an `Authority`, it speaks TLS."""

    daemon_threads = True
    request_queue_size = 128

    def __init__(self, server_port: int, authority: Authority | None = None) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.s3_port = server_port
        self.answer: Callable[[Asked], Answer | None] = lambda asked: None
        """Returns None for requests that are to be passed on. Called on many threads."""
        self.asked: list[Asked] = []
        """All requests so far."""
        self._scheme = "http"
        if authority is not None:
            self._scheme = "https"
            self.socket = authority.context().wrap_socket(
                self.socket, server_side=True, do_handshake_on_connect=False
            )
        self._thread = threading.Thread(target=self.serve_forever, args=(0.05,), daemon=True)

    @property
    def endpoint(self) -> str:
        return f"{self._scheme}://127.0.0.1:{self.server_port}"

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Clients break connections; that is what some tests are about."""

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None = None,
        error: BaseException | None = None,
        traceback: TracebackType | None = None,
    ) -> None:
        self.shutdown()
        self.server_close()
        self._thread.join()


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True
    server: Front

    def log_message(self, *args: Any) -> None:
        pass

    def _serve(self) -> None:
        content = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        asked = Asked(self.command, self.path, dict(self.headers), content)
        self.server.asked.append(asked)
        answer = self.server.answer(asked)
        if answer is None:
            answer = self._pass_on(content)
        self.close_connection = True
        with suppress(OSError):
            if answer.raw is not None:
                self.wfile.write(answer.raw)
            else:
                self._send(answer)

    do_GET = do_HEAD = do_PUT = do_POST = do_DELETE = _serve  # noqa: N815

    def _pass_on(self, content: bytes) -> Answer:
        connection = HTTPConnection("127.0.0.1", self.server.s3_port, timeout=30)
        try:
            connection.putrequest(
                self.command, self.path, skip_host=True, skip_accept_encoding=True
            )
            for name, value in self.headers.items():
                connection.putheader(name, value)
            connection.endheaders(content)
            response = connection.getresponse()
            headers = {
                name: value
                for name, value in response.getheaders()
                if name.lower() not in _HOP_BY_HOP
            }
            if self.command == "HEAD":
                headers["Content-Length"] = response.getheader("Content-Length") or "0"
            return Answer(response.status, response.read(), headers)
        except (OSError, HTTPException):
            return Answer(502)
        finally:
            connection.close()

    def _send(self, answer: Answer) -> None:
        self.send_response(answer.status)
        for name, value in answer.headers.items():
            self.send_header(name, value)
        if isinstance(answer.body, bytes) and "Content-Length" not in answer.headers:
            self.send_header("Content-Length", str(len(answer.body)))
        self.send_header("Connection", "close")
        self.end_headers()
        if self.command != "HEAD":
            for part in [answer.body] if isinstance(answer.body, bytes) else answer.body:
                self.wfile.write(part)
