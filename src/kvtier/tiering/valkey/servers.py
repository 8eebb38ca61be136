"""Finds the server of a block, and connects to it. A client library does both: it knows clusters,
Sentinel, TLS and users."""

from __future__ import annotations

import os
import socket
import threading
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, Protocol
from urllib.parse import urlsplit

from kvtier.base import OffloadKey
from kvtier.tiering.remote.errors import FailureKind, ServerFailure
from kvtier.tiering.valkey.wire import TIMEOUT_S, Wire

if TYPE_CHECKING:
    from kvtier.tiering.valkey.options import ValkeyOptions

__all__ = [
    "Node",
    "NotAllowed",
    "Servers",
    "block_key",
    "connect_to",
    "credentials",
    "explained_failures",
]

_CONNECT_TIMEOUT_S = 2.0
_REFRESH_EVERY_S = 1.0
"""The topology of a cluster is read at most this often."""
_PREFIX = b"kvtier:1:"
"""The version of the stored format is part of each key, so that releases with another one neither
find nor touch these blocks."""

Node = str
"""A server's address; empty if there is only one."""


class NotAllowed(ServerFailure):
    """The server does not know the user or the password, or the user may not do this."""


def block_key(namespace: str, key: OffloadKey) -> bytes:
    """The key of a block on the server."""
    return b"%b%b:%b" % (_PREFIX, namespace.encode(), key)


class Servers(Protocol):
    """Where the blocks are. Any thread."""

    def node_of(self, server_key: bytes) -> Node:
        """The server of a key."""

    def connect(self, node: Node) -> Wire:
        """A new connection, logged in. Raises `ServerFailure`."""

    def refresh(self) -> None:
        """A server has said that a key is not there, or has failed: look again where keys are."""

    def nodes(self) -> Iterable[Node]:
        """All servers that have keys."""

    def close(self) -> None:
        """Close the library's own connections."""


def connect_to(options: ValkeyOptions) -> Servers:
    """Make a `Servers` for these options. Does not connect."""
    if options.cluster:
        return _Cluster(options)
    if options.sentinel_service is not None:
        return _Sentinel(options, options.sentinel_service)
    return _Single(options)


def _settings(options: ValkeyOptions) -> dict[str, Any]:
    """What the client library gets besides the URL."""
    given: dict[str, Any] = {"socket_timeout": TIMEOUT_S}
    if not options.url.startswith("unix:"):
        given |= {"socket_connect_timeout": _CONNECT_TIMEOUT_S, "socket_keepalive": True}
    given |= credentials(options)
    if options.ca_bundle is not None:
        given["ssl_ca_certs"] = str(options.ca_bundle)
    return given


def credentials(options: ValkeyOptions) -> dict[str, str]:
    """User and password from the options, or else from the environment. The client library
    prefers those in the URL."""
    given = {
        "username": options.username or os.environ.get("VALKEY_USERNAME"),
        "password": options.password or os.environ.get("VALKEY_PASSWORD"),
    }
    return {name: value for name, value in given.items() if value}


@contextmanager
def explained_failures() -> Iterator[None]:
    """Turn the client library's errors into `ServerFailure`, in words of our own: theirs may quote
    what was sent."""
    from valkey import exceptions

    try:
        yield
    except (exceptions.AuthenticationError, exceptions.NoPermissionError):
        raise NotAllowed(
            FailureKind.REFUSED,
            "the server refused the user or the password, or the user may not do this",
        ) from None
    except exceptions.ResponseError as error:
        text = str(error)
        if text.startswith(("WRONGPASS", "NOAUTH", "NOPERM")) or "AUTH" in text:
            raise NotAllowed(
                FailureKind.REFUSED, "the server wants another user or password"
            ) from None
        code = text.partition(" ")[0]
        raise ServerFailure(
            FailureKind.REFUSED, f"the server refused the connection ({code})"
        ) from None
    except (exceptions.TimeoutError, TimeoutError):
        raise ServerFailure(FailureKind.SILENT, "the server did not answer in time") from None
    except (exceptions.ValkeyError, OSError) as error:
        reason = _reason_of(error)
        raise ServerFailure(FailureKind.UNREACHABLE, f"cannot connect{reason}") from None


def _reason_of(error: Exception) -> str:
    """The operating system's words, in parentheses; empty if there are none."""
    link: BaseException | None = error
    while link is not None:
        if isinstance(link, OSError) and link.strerror:
            return f" ({link.strerror})"
        link = link.__cause__ or link.__context__
    return ""


def _wire_of(connection: Any) -> Wire:
    """Connect and log in, and take the socket over from the library's connection."""
    with explained_failures():
        connection.connect()
    connected: socket.socket = connection._sock
    # The library closes the socket of a connection that it still has.
    connection._sock = None
    if connected.family != socket.AF_UNIX:
        connected.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    return Wire(connected)


class _Single:
    def __init__(self, options: ValkeyOptions) -> None:
        from valkey import ConnectionPool

        self._pool = ConnectionPool.from_url(options.url, **_settings(options))

    def node_of(self, server_key: bytes) -> Node:
        return ""

    def connect(self, node: Node) -> Wire:
        return _wire_of(self._pool.make_connection())

    def refresh(self) -> None:
        return

    def nodes(self) -> Iterable[Node]:
        return ("",)

    def close(self) -> None:
        self._pool.disconnect()


class _Sentinel:
    """Asks Sentinel for the primary at each connection: after a failover, lanes connect anew."""

    def __init__(self, options: ValkeyOptions, service: str) -> None:
        from valkey import ConnectionPool
        from valkey.sentinel import Sentinel

        self._service = service
        settings = _settings(options)
        self._pool = ConnectionPool.from_url(options.url, **settings)
        parts = urlsplit(options.url)
        timeouts = {name: settings[name] for name in ("socket_timeout", "socket_connect_timeout")}
        self._sentinel = Sentinel(
            [(parts.hostname or "localhost", parts.port or 26379)], **timeouts
        )

    def node_of(self, server_key: bytes) -> Node:
        return ""

    def connect(self, node: Node) -> Wire:
        with explained_failures():
            host, port = self._sentinel.discover_master(self._service)
        given = self._pool.connection_kwargs | {"host": host, "port": port}
        return _wire_of(self._pool.connection_class(**given))

    def refresh(self) -> None:
        return

    def nodes(self) -> Iterable[Node]:
        return ("",)

    def close(self) -> None:
        self._pool.disconnect()
        for client in self._sentinel.sentinels:
            client.close()


class _Cluster:
    """Reads the topology when it is first needed, and again when a server disagrees."""

    def __init__(self, options: ValkeyOptions) -> None:
        from valkey.crc import key_slot

        self._options = options
        self._slot_of = key_slot
        self._lock = threading.Lock()
        self._client: Any = None
        self._refreshed_at = 0.0

    def node_of(self, server_key: bytes) -> Node:
        manager = self._topology()
        with explained_failures():
            node = manager.get_node_from_slot(self._slot_of(server_key))
        return str(node.name)

    def _topology(self) -> Any:
        with self._lock:
            if self._client is None:
                from valkey.cluster import ValkeyCluster

                with explained_failures():
                    self._client = ValkeyCluster.from_url(
                        self._options.url, **_settings(self._options)
                    )
                self._refreshed_at = time.monotonic()
            return self._client.nodes_manager

    def connect(self, node: Node) -> Wire:
        manager = self._topology()
        known = manager.nodes_cache.get(node)
        if known is None:
            raise ServerFailure(FailureKind.UNREACHABLE, "a server has left the cluster")
        with explained_failures():
            client = self._client.get_valkey_connection(known)
        return _wire_of(client.connection_pool.make_connection())

    def refresh(self) -> None:
        with self._lock:
            if self._client is None or time.monotonic() < self._refreshed_at + _REFRESH_EVERY_S:
                return
            self._refreshed_at = time.monotonic()
            with explained_failures():
                self._client.nodes_manager.initialize()

    def nodes(self) -> Iterable[Node]:
        manager = self._topology()
        return [name for name, node in manager.nodes_cache.items() if node.server_type == "primary"]

    def close(self) -> None:
        with self._lock:
            if self._client is not None:
                self._client.close()
