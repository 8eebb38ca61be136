"""What runs on the two hosts of `test_two_hosts.py`, each in a network namespace of its own.

    python -m tests.tiering.two_hosts link PORT DELAY_S BYTES_PER_S    on the server's host
    python -m tests.tiering.two_hosts engine URL PREFILL_TOKENS_PER_S  on the engine's host

The link forwards connections to PORT of its host, late and not faster than given. The engine prints
as JSON how many tokens of each prompt it loaded, and the sums of its counters.
"""

from __future__ import annotations

import json
import queue
import socket
import sys
import threading
import time
from contextlib import suppress
from typing import Any

from tests.tiering.valkey.serving import TOKENS, serving

__all__ = ["LINK_PORT"]

LINK_PORT = 7000
_CHUNK = 4096
_ROUNDS = 6


class _Link:
    """One direction of one connection: bytes arrive in order, late, and at a limited rate."""

    def __init__(self, source: socket.socket, sink: socket.socket, delay_s: float, rate: float):
        self._source, self._sink = source, sink
        self._delay_s, self._rate = delay_s, rate
        self._under_way: queue.Queue[tuple[float, bytes]] = queue.Queue()
        for run in (self._take, self._deliver):
            threading.Thread(target=run, daemon=True).start()

    def _take(self) -> None:
        free_at = time.monotonic()
        with suppress(OSError):
            while data := self._source.recv(_CHUNK):
                free_at = max(free_at, time.monotonic()) + len(data) / self._rate
                self._under_way.put((free_at + self._delay_s, data))
                time.sleep(max(0.0, free_at - time.monotonic()))
        self._under_way.put((time.monotonic() + self._delay_s, b""))

    def _deliver(self) -> None:
        with suppress(OSError):
            while True:
                at, data = self._under_way.get()
                time.sleep(max(0.0, at - time.monotonic()))
                if not data:
                    break
                self._sink.sendall(data)
            self._sink.shutdown(socket.SHUT_WR)


def _link(port: int, delay_s: float, rate: float) -> None:
    with socket.create_server(("0.0.0.0", LINK_PORT)) as listener:
        print("ready", flush=True)
        while True:
            client, _ = listener.accept()
            server = socket.create_connection(("127.0.0.1", port))
            for each in (client, server):
                each.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            _Link(client, server, delay_s, rate)
            _Link(server, client, delay_s, rate)


def _engine(url: str, prefill_tokens_per_s: float) -> None:
    patient: dict[str, Any] = {f"{what}_timeout_ms": 10_000 for what in ("lookup", "load", "store")}
    with serving(url, prefill_tokens_per_s=prefill_tokens_per_s, **patient) as served:
        served.serve_all()
        # What host memory has dropped is stored before the rounds that count.
        served.step_for(1.0)
        loaded = [count for _ in range(_ROUNDS) for count in served.serve_all()]
        print(json.dumps({"loaded": loaded, "tokens": TOKENS, "figures": served.figures}))


if __name__ == "__main__":
    what, *arguments = sys.argv[1:]
    if what == "link":
        _link(int(arguments[0]), float(arguments[1]), float(arguments[2]))
    else:
        _engine(arguments[0], float(arguments[1]))
