"""`kvtier store serve`: answers which of some blocks a shared tier has, over HTTP.

The main thread lists the storage again and again; a thread for each request looks into the last
list. Nothing here writes to the storage.
"""

from __future__ import annotations

import json
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from http.server import BaseHTTPRequestHandler
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kvtier.base import OffloadKey, get_offload_block_hash, get_offload_group_idx
from kvtier.cli.http_server import BoundedHTTPServer
from kvtier.cli.output import CannotServe, finish, note, write_line
from kvtier.tiering.inspection import InspectionRefused, TierInspector, open_inspector

__all__ = ["serve"]

_MOST_BODY_BYTES = 8 << 20
_MOST_HASHES = 1 << 20
_TIMEOUT_S = 10.0
_REST_SHARE = 3.0
"""Listing a storage takes at most a quarter of the time: the pause is this much longer."""
_HASH_BYTES = 8
_UNKNOWN = {"error": "there are POST /check_blocks and GET /health"}

_Place = tuple[str, int]
"""Namespace and group."""


class _BadRequest(Exception):
    """The message says what to send instead."""


class _Unavailable(Exception):
    """The storage could not be listed. The message says why."""


class _BlockList:
    """The blocks of a storage at one time, by the last 64 bits of their hashes: eight bytes for
    each. Any thread."""

    def __init__(self, keys: Iterable[tuple[str, OffloadKey]]) -> None:
        """`keys`: with their namespaces."""
        found: dict[_Place, bytearray] = defaultdict(bytearray)
        for namespace, key in keys:
            block_hash = get_offload_block_hash(key)[-_HASH_BYTES:].rjust(_HASH_BYTES, b"\0")
            found[namespace, get_offload_group_idx(key)] += block_hash
        self._hashes: dict[_Place, NDArray[np.uint64]] = {
            place: np.sort(np.frombuffer(bytes(hashes), ">u8").astype(np.uint64))
            for place, hashes in found.items()
        }
        self.time = time.monotonic()

    def sizes(self) -> dict[str, int]:
        """Number of blocks by namespace."""
        sizes: dict[str, int] = defaultdict(int)
        for (namespace, _), hashes in self._hashes.items():
            sizes[namespace] += len(hashes)
        return dict(sizes)

    def ranges(
        self, hashes: NDArray[np.uint64], namespace: str | None, group_idx: int
    ) -> list[list[int]]:
        """The positions of hashes that are there, as half-open ranges. Raises `_BadRequest` if it
        is not clear which namespace is meant."""
        here = self._hashes.get((self._namespace(namespace), group_idx))
        if here is None or not len(hashes):
            return []
        places = np.minimum(np.searchsorted(here, hashes), len(here) - 1)
        is_there = here[places] == hashes
        edges = np.flatnonzero(np.diff(is_there, prepend=False, append=False))
        starts_and_ends: list[list[int]] = edges.reshape(-1, 2).tolist()
        return starts_and_ends

    def _namespace(self, wanted: str | None) -> str:
        names = sorted({namespace for namespace, _ in self._hashes})
        found = [name for name in names if name.startswith((wanted or "").lower())]
        if len(found) > 1:
            raise _BadRequest(f'give "namespace": one of {", ".join(found)}')
        return found[0] if found else ""


class _Answers:
    """What requests are answered from. The main thread sets it."""

    def __init__(self, location: str, kind: str) -> None:
        self._about = {"path": location, "kind": kind}
        self._list: _BlockList | None = None
        self._problem: str | None = None

    def update(self, blocks: _BlockList) -> None:
        self._list, self._problem = blocks, None

    def fail(self, problem: str) -> None:
        """Answer nothing until the next update: what was there may have gone."""
        self._problem = problem

    def health(self) -> dict[str, Any]:
        """Raises `_Unavailable`."""
        blocks = self._current()
        age = round(time.monotonic() - blocks.time, 3)
        return {"status": "ok", **self._about, "namespaces": blocks.sizes(), "age_s": age}

    def check(self, request: object) -> dict[str, Any]:
        """Raises `_BadRequest` or `_Unavailable`."""
        if not isinstance(request, Mapping):
            raise _BadRequest('send an object such as {"block_hashes": [1, 2, 3]}')
        namespace, group_idx = request.get("namespace"), request.get("group_idx", 0)
        if not (namespace is None or isinstance(namespace, str)) or type(group_idx) is not int:
            raise _BadRequest("namespace is a text, and group_idx a number")
        hashes = _hashes_in(request.get("block_hashes"))
        return {"ranges": self._current().ranges(hashes, namespace, group_idx)}

    def _current(self) -> _BlockList:
        if self._problem is not None or self._list is None:
            raise _Unavailable(self._problem or "the storage is being listed")
        return self._list


def _hashes_in(given: object) -> NDArray[np.uint64]:
    if not isinstance(given, Sequence) or isinstance(given, str) or len(given) > _MOST_HASHES:
        raise _BadRequest(f"block_hashes is a list of at most {_MOST_HASHES} hashes")
    try:
        return np.array([_number_of(value) for value in given], np.uint64)
    except (ValueError, OverflowError, TypeError):
        raise _BadRequest(
            "each of block_hashes is a number of 64 bits, as in events, or hexadecimal digits"
        ) from None


def _number_of(value: Any) -> int:
    if isinstance(value, str):
        return int.from_bytes(bytes.fromhex(value)[-_HASH_BYTES:], "big")
    if type(value) is not int:
        raise ValueError
    return value & (1 << 64) - 1 if -(1 << 63) <= value < 0 else value


class _Server(BoundedHTTPServer):
    max_connections = 256
    """Routers keep theirs open."""

    def __init__(self, host: str, port: int, answers: _Answers) -> None:
        self.answers = answers
        super().__init__((host, port), _Handler)


class _Handler(BaseHTTPRequestHandler):
    """The requests of one connection, on a thread of their own."""

    server: _Server
    protocol_version = "HTTP/1.1"
    server_version = "kvtier"
    sys_version = ""
    timeout = _TIMEOUT_S

    def do_GET(self) -> None:
        if self.path == "/health":
            self._answer(self.server.answers.health)
        else:
            self._send(404, _UNKNOWN)

    def do_POST(self) -> None:
        if self.path == "/check_blocks":
            self._answer(lambda: self.server.answers.check(self._body()))
        else:
            self.close_connection = True  # the body was not read
            self._send(404, _UNKNOWN)

    def _body(self) -> object:
        length = self.headers.get("content-length", "")
        # Python refuses to convert thousands of digits.
        if not length.isdecimal() or len(length) > 19 or int(length) > _MOST_BODY_BYTES:
            self.close_connection = True
            raise _BadRequest(f"send a content-length of at most {_MOST_BODY_BYTES}")
        try:
            return json.loads(self.rfile.read(int(length)))
        except (ValueError, RecursionError):
            raise _BadRequest("the body is not JSON") from None

    def _answer(self, find: Callable[[], Mapping[str, Any]]) -> None:
        try:
            self._send(200, find())
        except _BadRequest as problem:
            self._send(400, {"error": str(problem)})
        except _Unavailable as problem:
            self._send(503, {"error": str(problem)})

    def _send(self, status: int, document: Mapping[str, Any]) -> None:
        body = json.dumps(document).encode()
        with suppress(OSError):  # the client has gone
            self.send_response(status)
            self.send_header("content-type", "application/json")
            self.send_header("content-length", str(len(body)))
            if self.close_connection:
                self.send_header("connection", "close")
            self.end_headers()
            self.wfile.write(body)

    def log_message(self, *_: Any) -> None:
        """Log nothing: routers ask for every prompt."""


def serve(location: str, namespace: str | None, host: str, port: int, refresh_s: float) -> None:
    """Serve until Ctrl-C. Raises `InspectionRefused`, `CannotServe` or `OSError`."""
    with open_inspector(location) as store:
        answers = _Answers(store.location, store.kind)
        answers.update(_BlockList(store.keys(namespace)))
        try:
            server = _Server(host, port, answers)
        except (OSError, UnicodeError) as error:
            raise CannotServe.at(host, port, error) from None
        threading.Thread(target=server.serve_forever, name="kvtier-serve", daemon=True).start()
        try:
            address = f"http://{host}:{server.server_address[1]}"
            write_line(f"{address} answers for {store.location}")
            finish()
            _keep_current(store, namespace, answers, refresh_s)
        finally:
            server.shutdown()
            server.server_close()


def _keep_current(
    store: TierInspector, namespace: str | None, answers: _Answers, refresh_s: float
) -> None:
    """List the storage again and again, until Ctrl-C."""
    pause_s, was_refused = refresh_s, False
    while True:
        time.sleep(pause_s)
        began = time.monotonic()
        try:
            answers.update(_BlockList(store.keys(namespace)))
            was_refused = False
        except (InspectionRefused, OSError) as problem:
            answers.fail(str(problem))
            if not was_refused:
                note(f"kvtier store: {problem}; requests are answered with 503 until that is over")
            was_refused = True
        pause_s = max(refresh_s, (time.monotonic() - began) * _REST_SHARE)
