"""The HTTP server of the commands that answer over HTTP: a thread for each connection."""

from __future__ import annotations

import threading
from http.server import ThreadingHTTPServer
from typing import Any

__all__ = ["BoundedHTTPServer"]


class BoundedHTTPServer(ThreadingHTTPServer):
    """Refuses connections above a number, so that clients that send nothing cannot take all memory.
    A client that goes away in the middle of an answer is not worth a line."""

    daemon_threads = True
    block_on_close = False
    max_connections = 32
    request_queue_size = max_connections

    def __init__(self, address: Any, handler: Any) -> None:
        self._room = threading.BoundedSemaphore(self.max_connections)
        super().__init__(address, handler)

    def process_request(self, request: Any, client_address: Any) -> None:
        if self._room.acquire(blocking=False):
            super().process_request(request, client_address)
        else:
            self.shutdown_request(request)

    def process_request_thread(self, request: Any, client_address: Any) -> None:
        try:
            super().process_request_thread(request, client_address)
        finally:
            self._room.release()

    def handle_error(self, request: Any, client_address: Any) -> None:
        """No traceback."""
