"""A TCP proxy in front of a server, to cut and to stall connections in the middle of a transfer."""

from __future__ import annotations

import socket
import struct
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from enum import Enum, auto

__all__ = ["Direction", "Proxy", "proxy_to"]

_RESET = struct.pack("ii", 1, 0)
"""SO_LINGER that makes `close` send a reset."""


class Direction(Enum):
    TO_SERVER = auto()
    FROM_SERVER = auto()


class Proxy:
    """Forwards connections to a port of this machine. Its methods may be called at any time."""

    def __init__(self, port: int) -> None:
        self._target = port
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port: int = self._listener.getsockname()[1]
        self._changed = threading.Condition()
        self._left: dict[Direction, int | None] = dict.fromkeys(Direction)
        """Bytes that still pass. None: no limit."""
        self._cuts = False
        self._is_closed = False
        self._sockets: set[socket.socket] = set()
        self._forgotten: set[socket.socket] = set()
        self._threads = [threading.Thread(target=self._accept)]
        self._threads[0].start()

    def stall(self, direction: Direction, after: int = 0) -> None:
        """Let so many further bytes pass in this direction, then nothing, until `heal`."""
        with self._changed:
            self._left[direction] = after

    def cut(self, direction: Direction, after: int = 0) -> None:
        """Let so many further bytes pass, then reset all connections, and each new one after as
        many bytes, until `heal`."""
        with self._changed:
            self._left[direction], self._cuts = after, True

    def heal(self) -> None:
        """Let everything pass, also what has waited."""
        with self._changed:
            self._left = dict.fromkeys(Direction)
            self._cuts = False
            self._changed.notify_all()

    def forget_connections(self) -> None:
        """Let nothing pass in the connections that there are, for ever, and not end them either."""
        with self._changed:
            self._forgotten |= self._sockets

    @property
    def is_holding(self) -> bool:
        """True if a stall or a cut has begun: no more bytes pass."""
        return 0 in self._left.values()

    def close(self) -> None:
        """End all connections, and take no more. Idempotent."""
        if self._is_closed:
            return
        with self._changed:
            self._is_closed = True
            self._changed.notify_all()
        self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        self._reset_all()
        for thread in self._threads:
            thread.join()

    def _accept(self) -> None:
        while True:
            try:
                client, _ = self._listener.accept()
            except OSError:
                return
            try:
                server = socket.create_connection(("127.0.0.1", self._target), timeout=5)
            except OSError:
                client.close()
                continue
            server.settimeout(None)
            with self._changed:
                self._sockets |= {client, server}
            for source, sink, direction in (
                (client, server, Direction.TO_SERVER),
                (server, client, Direction.FROM_SERVER),
            ):
                thread = threading.Thread(target=self._pump, args=(source, sink, direction))
                self._threads.append(thread)
                thread.start()

    def _pump(self, source: socket.socket, sink: socket.socket, direction: Direction) -> None:
        with suppress(OSError):
            while data := source.recv(65_536):
                while data:
                    if source in self._forgotten:
                        data = b""
                        break
                    count = self._may_pass(direction, len(data))
                    sink.sendall(data[:count])
                    data = data[count:]
        for each in (source, sink):
            with suppress(OSError):
                each.shutdown(socket.SHUT_RDWR)

    def _may_pass(self, direction: Direction, count: int) -> int:
        """Wait until a byte may pass. Returns how many may."""
        with self._changed:
            while self._left[direction] == 0 and not self._is_closed:
                if self._cuts:
                    self._reset_all()
                    raise ConnectionResetError
                self._changed.wait()
            left = self._left[direction]
            if left is not None and not self._is_closed:
                count = min(count, left)
                self._left[direction] = left - count
            return count

    def _reset_all(self) -> None:
        sockets, self._sockets = self._sockets, set()
        for each in sockets:
            with suppress(OSError):
                each.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _RESET)
                each.shutdown(socket.SHUT_RDWR)
            each.close()


@contextmanager
def proxy_to(port: int) -> Iterator[Proxy]:
    """A proxy that ends with the context."""
    proxy = Proxy(port)
    try:
        yield proxy
    finally:
        proxy.close()
