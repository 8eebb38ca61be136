"""The HTTP interface of a master: what is in the pool, and how full it is. For commands, not for
engines: each request may wait."""

from __future__ import annotations

import http.client
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from typing import NamedTuple

from kvtier.tiering.mooncake.options import MooncakeOptions, master_address
from kvtier.tiering.remote.errors import FailureKind, ServerFailure

__all__ = ["DEFAULT_PORT", "MasterAdmin", "PoolUse"]

DEFAULT_PORT = 9003
"""Of `mooncake_master -metrics_port`."""
_TIMEOUT_S = 10.0
_MOST_BYTES = 16 << 20
"""Of an answer that is no list of blocks."""
_DIRECTLY = urllib.request.build_opener(urllib.request.ProxyHandler({}))
"""The master is in this network: a proxy for the internet does not reach it."""
_LONGEST_LINE = 4096
_MOST_LINES = 50_000_000
_FIGURES = {
    "master_allocated_bytes": "used_bytes",
    "master_total_capacity_bytes": "capacity_bytes",
    "master_key_count": "num_objects",
}


class PoolUse(NamedTuple):
    """How full a pool is, with the objects of all its users."""

    used_bytes: int
    capacity_bytes: int
    num_objects: int
    num_segments: int
    """Hosts that lend memory, or processes of them."""


class MasterAdmin:
    """The HTTP interface of one master."""

    def __init__(self, address: tuple[str, int], timeout_s: float = _TIMEOUT_S) -> None:
        host, port = address
        self._timeout_s = timeout_s
        self.url = f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"

    @classmethod
    def of(cls, options: MooncakeOptions) -> MasterAdmin | None:
        """That of a tier's master; None if it is not known, because several masters stand by."""
        if options.admin is not None:
            address = master_address(options.admin)
        elif (master := master_address(options.master)) is not None:
            address = master[0], DEFAULT_PORT
        else:
            address = None
        return None if address is None else cls(address)

    def object_names(self) -> Iterator[str]:
        """Names of all objects in the pool, of whatever program. Raises `ServerFailure`."""
        with self._asked("/get_all_keys") as answer:
            yield from _lines_of(answer)

    def use(self) -> PoolUse:
        """How full the pool is now. Raises `ServerFailure`."""
        figures = dict.fromkeys(_FIGURES.values(), 0)
        for line in self._short_answer("/metrics"):
            name, _, value = line.partition(" ")
            if name in _FIGURES:
                figures[_FIGURES[name]] = _whole(value)
        num_segments = sum(1 for line in self._short_answer("/get_all_segments") if line)
        return PoolUse(**figures, num_segments=num_segments)

    def _short_answer(self, path: str) -> list[str]:
        """The lines of an answer that comes as a whole within the time limit."""
        until, content = time.monotonic() + self._timeout_s, b""
        with self._asked(path) as answer:
            while part := answer.read1(_MOST_BYTES):
                content += part
                if len(content) > _MOST_BYTES or time.monotonic() > until:
                    raise OSError("its answer does not end")
        return content.decode("utf-8", "replace").split("\n")

    @contextmanager
    def _asked(self, path: str) -> Iterator[http.client.HTTPResponse]:
        try:
            with _DIRECTLY.open(self.url + path, timeout=self._timeout_s) as answer:
                yield answer
        except (OSError, http.client.HTTPException, urllib.error.URLError) as error:
            raise ServerFailure(
                FailureKind.UNREACHABLE,
                f"the master's HTTP interface at {self.url} does not answer: {error}. It is where "
                "mooncake_master was told to with -metrics_host and -metrics_port",
            ) from None


def _lines_of(answer: http.client.HTTPResponse) -> Iterator[str]:
    for _ in range(_MOST_LINES):
        line = answer.readline(_LONGEST_LINE)
        if not line:
            return
        yield line.decode("utf-8", "replace").strip()


def _whole(value: str) -> int:
    try:
        return max(int(float(value)), 0)
    except (ValueError, OverflowError):
        return 0
