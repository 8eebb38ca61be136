"""Finds the server of a block, and connects to it.

The client library reads the URL and connects: TCP, TLS or a unix socket. Users, clusters and
Sentinel are asked on the same wire as blocks, so no answer of a server takes much memory.
"""

from __future__ import annotations

import os
import ssl
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, Protocol
from weakref import WeakSet

from kvtier.base import OffloadKey
from kvtier.config import ConfigError, Problem
from kvtier.config.errors import describe
from kvtier.tiering.remote.errors import FailureKind, NotAllowed, ServerFailure
from kvtier.tiering.valkey.wire import Answer, Refusal, Wire, command

if TYPE_CHECKING:
    from kvtier.tiering.valkey.options import ValkeyOptions

__all__ = [
    "Node",
    "Servers",
    "block_key",
    "connect_to",
    "credentials",
    "description_key",
    "explained_failures",
    "failure_of",
    "tls_settings",
]

_CONNECT_TIMEOUT_S = 2.0
"""For each step of a connection, and of the handshake of TLS."""
_REFRESH_EVERY_S = 1.0
"""The topology of a cluster is read at most this often."""
_PREFIX = b"kvtier:1:"
"""The version of the stored format is part of each key, so that releases with another one neither
find nor touch these blocks."""

_NUM_SLOTS = 16_384
_ELSEWHERE = ("MOVED", "ASK", "CLUSTERDOWN", "READONLY", "LOADING", "TRYAGAIN", "MASTERDOWN")
"""The server cannot answer for this key now, but it, or another one, will."""

_OTHER_USER = "Give username and password of a user that may use the keys kvtier:*"

Node = str
"""A server's HOST:PORT; empty if there is only one."""


def block_key(namespace: str, key: OffloadKey) -> bytes:
    """The key of a block on the server."""
    return b"%b%b:%b" % (_PREFIX, namespace.encode(), key)


def description_key(namespace: str) -> bytes:
    """The key of what a namespace is made of."""
    return b"%bmade-of:%b" % (_PREFIX, namespace.encode())


class Servers(Protocol):
    """Where the blocks are. Any thread."""

    def node_of(self, server_key: bytes) -> Node:
        """The server of a key. Raises `ServerFailure`."""

    def connect(self, node: Node) -> Wire:
        """A new connection, logged in. Raises `ServerFailure`."""

    def refresh(self) -> None:
        """A server has said that a key is elsewhere, or has failed: look again where keys are."""

    def nodes(self) -> Iterable[Node]:
        """All servers that have keys. Raises `ServerFailure`."""

    def interrupt(self) -> None:
        """Let calls of all connections that wait fail now, and make no more connections."""


def connect_to(options: ValkeyOptions) -> Servers:
    """Make a `Servers` for these options. Does not connect. Raises `ImportError` without the
    client library, and `ConfigError` for a URL whose query it does not know."""
    dialer = _Dialer(options)
    if options.cluster:
        return _Cluster(dialer)
    if options.sentinel_service is not None:
        return _Sentinel(dialer, options.sentinel_service)
    return _Single(dialer)


def _settings(options: ValkeyOptions) -> dict[str, Any]:
    """What the client library gets besides the URL."""
    given: dict[str, Any] = {"socket_timeout": _CONNECT_TIMEOUT_S}
    if not options.url.startswith("unix:"):
        given |= {"socket_connect_timeout": _CONNECT_TIMEOUT_S, "socket_keepalive": True}
    return given | credentials(options) | tls_settings(options)


def tls_settings(options: ValkeyOptions) -> dict[str, Any]:
    """What the client library gets for TLS. It would accept any server's certificate; the URL may
    ask for that."""
    if not options.uses_tls:
        return {}
    given: dict[str, Any] = {"ssl_check_hostname": True}
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
    try:
        yield
    except (ServerFailure, ImportError):
        raise
    except Exception as error:
        raise _explained(error) from None


def _explained(error: Exception) -> ServerFailure:
    from valkey import exceptions

    links = list(_chain(error))
    for link in links:
        if isinstance(link, (exceptions.AuthenticationError, exceptions.NoPermissionError)):
            return NotAllowed(
                "the server refused the user or the password, or the user may not do this",
                _OTHER_USER,
            )
        if isinstance(link, ssl.SSLCertVerificationError):
            return NotAllowed(
                f"the server's certificate cannot be trusted ({link.verify_message.rstrip('.')})",
                "Give ca_bundle, and the name in the certificate as the host",
            )
    for link in links:
        if isinstance(link, exceptions.ResponseError):
            return failure_of(Refusal(str(link)))
        if isinstance(link, (exceptions.TimeoutError, TimeoutError)):
            return ServerFailure(FailureKind.SILENT, "the server did not answer in time")
        if isinstance(link, exceptions.ConnectionError | OSError):
            reason = _reason_of(links)
            return ServerFailure(FailureKind.UNREACHABLE, f"cannot connect{reason}")
    return ServerFailure(FailureKind.GARBAGE, "the answer is not that of a Valkey or Redis server")


def _chain(error: BaseException) -> Iterator[BaseException]:
    link: BaseException | None = error
    while link is not None:
        yield link
        link = link.__cause__ or link.__context__


def _reason_of(links: Iterable[BaseException]) -> str:
    """The operating system's words, in parentheses; empty if there are none."""
    for link in links:
        if isinstance(link, OSError) and link.strerror:
            return f" ({link.strerror})"
    return ""


def failure_of(refusal: Refusal) -> ServerFailure:
    """The failure that an answer means which is not about a single block."""
    code = refusal.code
    if code in _ELSEWHERE:
        return ServerFailure(FailureKind.REFUSED, f"the server cannot serve this key now ({code})")
    if code == "NOPERM":
        return NotAllowed(
            "the user may not do this (NOPERM)", "docs/valkey.md lists the rights that a user needs"
        )
    if code in ("NOAUTH", "WRONGPASS"):
        return NotAllowed(f"the server wants another user or password ({code})", _OTHER_USER)
    if code == "DENIED":
        return NotAllowed(
            "the server takes connections of its own machine only (DENIED)",
            "Give its user a password, or set protected-mode no in the server",
        )
    if "max number of clients" in str(refusal):
        return ServerFailure(FailureKind.REFUSED, "the server has too many clients (maxclients)")
    return ServerFailure(FailureKind.REFUSED, f"the server refused a command ({code})")


class _Dialer:
    """Opens connections as the URL says. Any thread."""

    def __init__(self, options: ValkeyOptions) -> None:
        from valkey import ConnectionPool

        try:
            pool: Any = ConnectionPool.from_url(options.url, **_settings(options))
            made = pool.connection_class(**pool.connection_kwargs)
        except ImportError:
            raise
        except Exception:  # whatever the library makes of a value that it does not check
            raise ConfigError(
                Problem(
                    "url",
                    describe(options.shown_url),
                    "a URL without a query, or with keys that the package valkey knows",
                    "Correct what follows the question mark, or remove it",
                )
            ) from None
        self._connection_cls = pool.connection_class
        self._given: dict[str, Any] = pool.connection_kwargs
        self.node: Node = f"{getattr(made, 'host', '')}:{getattr(made, 'port', 0)}"
        """The address in the URL. Of no use for a unix socket."""
        words = (made.username, made.password or "") if made.username else (made.password,)
        self._credentials = [word.encode() for word in words if word is not None]
        self._database = int(made.db or 0)
        self._lock = threading.Lock()
        """Protects what follows."""
        self._wires: WeakSet[Wire] = WeakSet()
        """All connections that are in use."""
        self._is_interrupted = False

    def dial(self, node: Node = "") -> Wire:
        """Connect to this server, or to that of the URL, and log in. Raises `ServerFailure`."""
        wire = self.connect(node)
        try:
            self.authenticate(wire)
            if self._database:
                refusal = _refusal_of(wire, b"SELECT", b"%d" % self._database)
                if refusal is not None:
                    raise NotAllowed(
                        f"the server refused database {self._database} ({refusal.code})",
                        "Give another database in url, or none",
                    )
        except BaseException:
            wire.close()
            raise
        return wire

    def connect(self, node: Node = "") -> Wire:
        """Connect without logging in."""
        given = self._given
        if node:
            host, _, port = node.rpartition(":")
            given = given | {"host": host, "port": int(port)}
        if self._is_interrupted:
            raise ServerFailure(FailureKind.UNREACHABLE, "the tier is closed")
        with explained_failures():
            wire = Wire(self._connection_cls(**given)._connect())
        with self._lock:
            self._wires.add(wire)
            if self._is_interrupted:  # meanwhile, so `interrupt` has not seen this connection
                wire.interrupt()
        return wire

    def interrupt(self) -> None:
        """Let calls of all connections that wait fail now, and make no more."""
        with self._lock:
            self._is_interrupted = True
            for wire in self._wires:
                wire.interrupt()

    def authenticate(self, wire: Wire) -> None:
        """Log in, if there is a user or a password."""
        if self._credentials:
            refusal = _refusal_of(wire, b"AUTH", *self._credentials)
            if refusal is not None:
                if refusal.code in ("ERR", "WRONGPASS"):
                    raise NotAllowed("the server refused the user or the password", _OTHER_USER)
                raise failure_of(refusal)


def _refusal_of(wire: Wire, *words: bytes) -> Refusal | None:
    wire.expect_answers()
    wire.send([command(*words)])
    try:
        wire.read()
    except Refusal as refusal:
        return refusal
    return None


def _list_from(wire: Wire, *words: bytes) -> list[Answer]:
    wire.expect_answers()
    wire.send([command(*words)])
    return wire.read_list()


class _Single:
    def __init__(self, dialer: _Dialer) -> None:
        self._dialer = dialer

    def node_of(self, server_key: bytes) -> Node:
        return ""

    def connect(self, node: Node) -> Wire:
        return self._dialer.dial()

    def refresh(self) -> None:
        return

    def nodes(self) -> Iterable[Node]:
        return ("",)

    def interrupt(self) -> None:
        self._dialer.interrupt()


class _Sentinel:
    """Asks a Sentinel for the primary at each connection: after a failover, lanes connect anew. If
    the Sentinel of the URL does not answer, those that it has named before are asked."""

    def __init__(self, dialer: _Dialer, service: str) -> None:
        self._dialer = dialer
        self._service = service.encode()
        self._others: list[Node] = []

    def node_of(self, server_key: bytes) -> Node:
        return ""

    def connect(self, node: Node) -> Wire:
        return self._dialer.dial(self._primary())

    def refresh(self) -> None:
        return

    def nodes(self) -> Iterable[Node]:
        return ("",)

    def interrupt(self) -> None:
        self._dialer.interrupt()

    def _primary(self) -> Node:
        failure: ServerFailure | None = None
        for sentinel in (self._dialer.node, *self._others):
            try:
                return self._primary_named_by(sentinel)
            except ServerFailure as its:
                failure = failure or its
        assert failure is not None
        raise failure

    def _primary_named_by(self, sentinel: Node) -> Node:
        wire = self._dialer.connect(sentinel)
        try:
            address = self._ask(wire, b"GET-MASTER-ADDR-BY-NAME")
            named = filter(None, map(_its, self._ask(wire, b"SENTINELS")))
            self._others = list(dict.fromkeys((sentinel, *named)))
        finally:
            wire.close()
        match address:
            case [bytes(host), bytes(port)] if port.isdigit():
                return _address(host, int(port))
            case []:
                raise NotAllowed(
                    "the Sentinel does not know this service", "Check sentinel_service"
                )
        raise ServerFailure(FailureKind.GARBAGE, "the Sentinel's answer is none")

    def _ask(self, wire: Wire, question: bytes) -> list[Answer]:
        words = (b"SENTINEL", question, self._service)
        try:
            try:
                return _list_from(wire, *words)
            except Refusal as refusal:
                if refusal.code != "NOAUTH":
                    raise
                self._dialer.authenticate(wire)
                return _list_from(wire, *words)
        except Refusal as refusal:
            if refusal.code == "ERR":
                raise NotAllowed(
                    "the server is no Sentinel, or the Sentinel does not know this service",
                    "Check url and sentinel_service",
                ) from None
            raise failure_of(refusal) from None


def _its(sentinel: Answer) -> Node | None:
    """The address of a Sentinel that another one describes."""
    if not isinstance(sentinel, list):
        return None
    pairs = zip(sentinel[::2], sentinel[1::2], strict=False)
    its = {name: value for name, value in pairs if isinstance(name, bytes)}
    match its.get(b"ip"), its.get(b"port"):
        case bytes(host), bytes(port) if port.isdigit():
            return _address(host, int(port))
    return None


def _address(host: bytes, port: int) -> Node:
    return f"{host.decode('ascii', 'replace')}:{port}"


class _Cluster:
    """Reads the topology when it is first needed, and again when a server disagrees or fails."""

    def __init__(self, dialer: _Dialer) -> None:
        from valkey.crc import key_slot

        self._dialer = dialer
        self._slot_of: Callable[[bytes], int] = key_slot
        self._slots: list[Node] = []
        """The primary of each slot, empty if there is none. No slots: nothing was read yet."""
        self._known: list[Node] = [dialer.node]
        """Servers to ask, in this order."""
        self._lock = threading.Lock()
        """Held by the thread that reads the topology."""
        self._read_at = 0.0

    def node_of(self, server_key: bytes) -> Node:
        node = self._topology()[self._slot_of(server_key)]
        if not node:
            raise ServerFailure(FailureKind.UNREACHABLE, "a part of the cluster has no server")
        return node

    def connect(self, node: Node) -> Wire:
        return self._dialer.dial(node)

    def nodes(self) -> Iterable[Node]:
        return list(dict.fromkeys(filter(None, self._topology())))

    def interrupt(self) -> None:
        self._dialer.interrupt()

    def _topology(self) -> list[Node]:
        if not self._slots:
            with self._lock:
                if not self._slots:
                    self._read()
        return self._slots

    def refresh(self) -> None:
        if not self._slots or time.monotonic() < self._read_at + _REFRESH_EVERY_S:
            return
        if self._lock.acquire(blocking=False):  # otherwise another thread reads it now
            try:
                self._read()
            finally:
                self._lock.release()

    def _read(self) -> None:
        """Ask one server after the other, until one knows a primary for every slot."""
        self._read_at = time.monotonic()
        best: tuple[list[Node], list[Node]] | None = None
        failure: ServerFailure | None = None
        for node in list(self._known):
            try:
                found = self._read_from(node)
            except ServerFailure as its:
                failure = its
                continue
            if best is None or best[0].count("") > found[0].count(""):
                best = found
            if "" not in found[0]:
                break
        if best is None:
            assert failure is not None
            raise failure
        self._slots, known = best
        # Another one is asked first the next time, in case that this one has lost the others.
        self._known = list(dict.fromkeys((*known[1:], *known[:1], self._dialer.node)))

    def _read_from(self, node: Node) -> tuple[list[Node], list[Node]]:
        wire = self._dialer.dial(node)
        try:
            ranges = _list_from(wire, b"CLUSTER", b"SLOTS")
        except Refusal as refusal:
            if refusal.code == "ERR":
                raise NotAllowed("the server belongs to no cluster", "Remove cluster") from None
            raise failure_of(refusal) from None
        finally:
            wire.close()
        host = node.rpartition(":")[0]
        slots, known = [""] * _NUM_SLOTS, [node]
        for each in ranges:
            match each:
                case [int(first), int(last), _, *_] if 0 <= first <= last < _NUM_SLOTS:
                    named = [_node_in(server, host) for server in each[2:]]
                    slots[first : last + 1] = named[:1] * (last + 1 - first)
                    known += named
                case _:
                    raise ServerFailure(FailureKind.GARBAGE, "the cluster's topology is none")
        return slots, list(dict.fromkeys(known))


def _node_in(server: Answer, asked_host: str) -> Node:
    """The address of a server in an answer to CLUSTER SLOTS. One without a host is where the
    answer came from."""
    match server:
        case [bytes(host), int(port), *_] if host not in (b"", b"?"):
            return _address(host, port)
        case [_, int(port), *_]:
            return f"{asked_host}:{port}"
    raise ServerFailure(FailureKind.GARBAGE, "the cluster's topology is none")
