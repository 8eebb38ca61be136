"""This engine's membership in a Mooncake pool: the client, and when it may be called.

The client is a C++ library in this process. Four of its properties decide what is written here:

- A call cannot be interrupted. `Pool.ask` lets a thread of its own make the call, so that the
  caller waits for a bounded time; lanes that hang are replaced (`kvtier.tiering.remote.lane`).
- A transfer that fails by the library's own time limit of 60 s goes on: a host that wakes up later
  still writes into the slots. `Pool.replace_if_in_doubt` then replaces the client, and only when
  the old one is closed, which ends its transfers, does the call count as ended.
- A call of a closed client ends the process. So a client is closed when all calls of it have ended.
- `setup` and `close` let no other Python thread run. While the master is silent or gone, they take
  up to 15 s. So they are called only after the master has answered. If etcd has named the master,
  `close` takes 30 s always, and is not called at all.
"""

from __future__ import annotations

import atexit
import ctypes
import importlib
import ipaddress
import logging
import os
import re
import socket
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from itertools import pairwise
from pathlib import Path
from queue import SimpleQueue
from typing import Any, Generic, TypeVar
from typing import Protocol as Interface
from urllib.parse import urlsplit

import numpy as np

from kvtier.config.errors import printable
from kvtier.config.sizes import as_size
from kvtier.cpu.host_memory import memory_limits
from kvtier.tiering.base import TierRefused
from kvtier.tiering.mooncake.options import P2P, MooncakeOptions, Protocol, master_address
from kvtier.tiering.remote.errors import FailureKind, ServerFailure, TierHasEnded
from kvtier.tiering.remote.lane import Pause

__all__ = [
    "INSTALL",
    "Client",
    "Pool",
    "load_library",
    "new_client",
    "public_addresses",
    "require_devices",
    "require_master",
    "require_memory",
    "require_private_network",
]

logger = logging.getLogger(__name__)

T = TypeVar("T")

INSTALL = "pip install 'kvtier[mooncake]'"
_LIBRARIES = "apt-get install libibverbs1 libnuma1 libcurl4"
_ENVIRONMENT = {
    # A host that has stopped holds up a transfer for so long, in seconds.
    "MC_TCP_STATUS_TIMEOUT_SEC": "2",
    "MC_TCP_PROGRESS_TIMEOUT_SEC": "2",
    # A master that has stopped holds up a question for so long.
    "MC_RPC_TIMEOUT_MS": "2000",
    "MC_RPC_CONNECT_TIMEOUT_MS": "1000",
    "MC_STORE_CLIENT_SETUP_RETRIES": "2",
    # Nothing about what works.
    "MC_LOG_LEVEL": "ERROR",
}
"""Settings of the library, unless the operator has set them. It reads them once in a process."""

_FATAL = 3
"""Level of glog. A fatal error ends the process, and its line says why."""

_RDMA_DEVICES = Path("/sys/class/infiniband")
_CONNECT_TIMEOUT_S = 1.0
_IS_ANYBODY_THERE = b"GET /health HTTP/1.0\r\n\r\n"
"""A metadata server answers. A master, whose protocol this is not, hangs up."""
_PORTS = {"http": 80, "https": 443, "redis": 6379}
_LONGEST_PAUSE_IF_REFUSED_S = 300.0
"""Each client that a pool refuses leaves two file descriptors open, until the process ends."""
_FIRST_TRY_S = 5.0
"""How long the start of an engine waits for the pool."""
_ASK_TIMEOUT_S = 3.0
_MOST_ASKING = 8
"""Threads whose calls hang. While there are so many, no question is asked."""
_IN_DOUBT_AFTER_S = 50.0
"""A failed transfer that took so long may go on. The library gives up after 60 s."""
_CLOSE_PATIENCE_S = 3.0
_BUFFER_BYTES = 1 << 20
"""Size of the library's own buffer, through which descriptions of namespaces are read. Blocks do
not need it."""


class Client(Interface):
    """What is used of `mooncake.store.MooncakeDistributedStore`. Results are 0 or a size, or the
    negative number of an error."""

    def setup(
        self,
        local_hostname: str,
        metadata_server: str,
        global_segment_size: int,
        local_buffer_size: int,
        protocol: str,
        rdma_devices: str,
        master_server_addr: str,
    ) -> int: ...

    def register_buffer(self, pointer: int, size: int) -> int: ...
    def unregister_buffer(self, pointer: int) -> int: ...
    def get_hostname(self) -> str: ...
    def close(self) -> int: ...
    def batch_is_exist(self, keys: Sequence[str]) -> list[int]: ...
    def batch_remove(self, keys: Sequence[str], force: bool) -> list[int]: ...
    def batch_get_replica_desc(self, keys: Sequence[str]) -> dict[str, list[Any]]: ...
    def get(self, key: str) -> bytes: ...
    def upsert(self, key: str, value: bytes, config: Any) -> int: ...

    def batch_get_into(
        self, keys: Sequence[str], buffer_ptrs: Sequence[int], sizes: Sequence[int]
    ) -> list[int]: ...

    def batch_put_from_multi_buffers(
        self,
        keys: Sequence[str],
        all_buffer_ptrs: Sequence[Sequence[int]],
        all_sizes: Sequence[Sequence[int]],
        config: Any,
    ) -> list[int]: ...

    def batch_get_into_multi_buffers(
        self,
        keys: Sequence[str],
        all_buffer_ptrs: Sequence[Sequence[int]],
        all_sizes: Sequence[Sequence[int]],
    ) -> list[int]: ...


def load_library() -> Any:
    """The module `mooncake.store`. Raises `TierRefused` with the remedy."""
    for name, value in _ENVIRONMENT.items():
        os.environ.setdefault(name, value)
    try:
        library = importlib.import_module("mooncake.store")
    except ModuleNotFoundError:
        raise TierRefused(
            "the mooncake tier needs the Python package mooncake-transfer-engine-non-cuda (or "
            f"mooncake-transfer-engine), which is not installed. Install it: {INSTALL}"
        ) from None
    except ImportError as error:
        raise TierRefused(
            f"Mooncake's library cannot be loaded: {printable(str(error))}. Install what it "
            f"needs: {_LIBRARIES}"
        ) from None
    _silence_library()
    return library


def _silence_library() -> None:
    """Stop the library's log, four lines for each block that it cannot load: kvtier counts
    failures, and logs each kind once a minute. An operator who has set `MC_LOG_LEVEL` to another
    level gets the lines. Called before `setup`, which logs an error even if it succeeds, and leaves
    the level as it is."""
    if os.environ.get("MC_LOG_LEVEL") != _ENVIRONMENT["MC_LOG_LEVEL"]:
        return
    with suppress(OSError, ValueError):
        mapped = Path("/proc/self/maps").read_text(encoding="utf-8", errors="replace")
        paths = set(re.findall(r"(?m)/\S*mooncake\S*/libglog\S*$", mapped))
        for path in paths:
            level = ctypes.c_int.in_dll(ctypes.CDLL(path), "_ZN3fLI17FLAGS_minloglevelE")
            level.value = _FATAL


def public_addresses() -> list[str]:
    """This machine's addresses that the whole internet may reach. Mooncake listens on all."""
    found = []
    with suppress(OSError):
        lines = Path("/proc/net/fib_trie").read_text(encoding="ascii").splitlines()
        found += [line.split()[-1] for line, kind in pairwise(lines) if "/32 host LOCAL" in kind]
    with suppress(OSError):
        lines = Path("/proc/net/if_inet6").read_text(encoding="ascii").splitlines()
        found += [str(ipaddress.IPv6Address(bytes.fromhex(line.split()[0]))) for line in lines]
    return sorted({each for each in found if ipaddress.ip_address(each).is_global})


def require_private_network(options: MooncakeOptions) -> None:
    """Raise `TierRefused` if the client would listen on a public address without the operator's
    word."""
    public = public_addresses()
    if public and not options.allow_public:
        raise TierRefused(
            f"this machine has a public address ({', '.join(public)}). Mooncake's client listens "
            "on all addresses, without a password, and whoever reaches it can read and change "
            "host memory. Block its ports from outside (docs/mooncake.md lists them), and set "
            '"allow_public": true (kvtier mooncake: --allow-public)'
        )


def require_devices(options: MooncakeOptions) -> None:
    """Raise `TierRefused` if there is no device for RDMA: the library would use TCP, silently."""
    if options.protocol is Protocol.RDMA and not any(_RDMA_DEVICES.glob("*")):
        raise TierRefused(
            f'"protocol": "rdma", but there is no RDMA device here: {_RDMA_DEVICES} is empty. '
            'Load its driver, or use "protocol": "tcp" on all hosts of the pool'
        )


def require_memory(segment_bytes: int) -> None:
    """Raise `TierRefused` if this machine has no room for a segment."""
    tightest = min(memory_limits(), key=lambda limit: limit.available, default=None)
    if tightest is not None and segment_bytes > tightest.available:
        raise TierRefused(
            f"segment_bytes asks for {as_size(segment_bytes)}, but only "
            f"{as_size(tightest.available)} are available in {tightest.where}. "
            f"{tightest.remedy}, or lower segment_bytes to {tightest.advisable} at most"
        )


def require_master(options: MooncakeOptions) -> str:
    """Return the address from which this machine reaches the master; empty if etcd knows the
    master. Raises `ServerFailure` after two seconds at most (for each address of the name) if no
    master answers there, or no etcd: the client would try for long, and let no other thread run
    meanwhile."""
    address = master_address(options.master)
    if address is not None:
        return _own_address_towards("the master", address, hangs_up=True)
    failures = []
    for etcd in filter(None, map(master_address, options.etcd_servers)):
        try:
            _own_address_towards("etcd", etcd)
        except ServerFailure as failure:
            failures.append(failure)
        else:
            return ""
    raise failures[0] if failures else ServerFailure(FailureKind.UNREACHABLE, "no etcd is known")


def _require_metadata_server(options: MooncakeOptions) -> None:
    parts = urlsplit(options.metadata)
    port = parts.port or _PORTS.get(parts.scheme)
    if parts.hostname is not None and port is not None:
        _own_address_towards("the metadata server", (parts.hostname, port))


def _own_address_towards(what: str, address: tuple[str, int], *, hangs_up: bool = False) -> str:
    """`hangs_up`: it must not answer anything, because HTTP is not its protocol."""
    answer = b""
    try:
        with socket.create_connection(address, _CONNECT_TIMEOUT_S) as connection:
            own_address = str(connection.getsockname()[0])
            with suppress(ConnectionResetError, BrokenPipeError):
                connection.sendall(_IS_ANYBODY_THERE)
                answer = connection.recv(1)
    except TimeoutError:
        raise ServerFailure(FailureKind.SILENT, f"{what} does not answer") from None
    except OSError as error:
        reason = f"no connection to {what}: {error}"
        raise ServerFailure(FailureKind.UNREACHABLE, reason) from None
    if answer and hangs_up:
        raise ServerFailure(
            FailureKind.REFUSED,
            f"another server than {what} answers there. Give the port of mooncake_master's "
            "-rpc_port (50051 by default), not that of its metrics or metadata",
        )
    return own_address


def _require_own(hostname: str) -> None:
    """Raise `ServerFailure` if this is not the name of this machine. Without a metadata server, the
    library takes any, and no other host could read what this one lends."""
    host = hostname.partition(":")[0]
    try:
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
            probe.bind((host, 0))
    except OSError as error:
        raise ServerFailure(
            FailureKind.REFUSED,
            f'hostname "{printable(host)}" is not this machine: {error}. Leave hostname out, or '
            "give an address of this machine that other hosts reach",
        ) from None


def new_client(
    library: Any, options: MooncakeOptions, hostname: str, segment_bytes: int
) -> tuple[Client, int]:
    """A client that has joined the pool, and the number of the error if the pool does not take it;
    0: none. Lets no other thread run meanwhile. `library`: that of `load_library`."""
    client: Client = library.MooncakeDistributedStore()
    code = client.setup(
        hostname,
        options.metadata,
        segment_bytes,
        _BUFFER_BYTES,
        options.protocol.value,
        options.devices or "",
        options.master,
    )
    return client, code


class Membership:
    """One client. Its calls are counted, so that it is closed when none is under way."""

    def __init__(self, client: Client, hostname: str) -> None:
        self.client = client
        self.hostname = hostname
        """Name of the segment that this engine lends."""
        self.num_calls = 0
        self.is_retired = False
        self.closed = threading.Event()


class Pool:
    """The pool as this engine's threads see it. A thread of its own connects, replaces a client
    that cannot be used any more, and connects again."""

    def __init__(self, options: MooncakeOptions, library: Any, region: memoryview) -> None:
        """`region`: the memory that blocks are moved to and from."""
        self._options = options
        self._library = library
        # Keeps the memory mapped while a client knows its address.
        self._regions: list[np.ndarray[Any, Any]] = [np.frombuffer(region.cast("B"), np.uint8)]
        self._changed = threading.Condition()
        self._membership: Membership | None = None
        self._reason = (
            FailureKind.SILENT,
            f"no connection within {_FIRST_TRY_S:.0f} s; the client still tries",
        )
        """Why there is no membership."""
        self._num_tries = 0
        self._is_closing = False
        self._is_closed = False
        """True when no client is left open."""
        self._askers: list[_Asker] = []
        """Threads that have nothing to ask."""
        self._asked: set[_Question[Any]] = set()
        """Questions under way."""
        self._thread = threading.Thread(target=self._run, name="kvtier-mooncake", daemon=True)

    def share(self, memory: bytearray) -> int:
        """Let blocks be moved to and from this memory, too. Returns its address. Call it before
        `start`."""
        self._regions.append(np.frombuffer(memory, np.uint8))
        return int(self._regions[-1].ctypes.data)

    @property
    def address(self) -> int:
        """Where the region begins."""
        return int(self._regions[0].ctypes.data)

    def start(self) -> None:
        """Connect. Waits some seconds at most: after that, it is tried again in the background.
        Raises `ServerFailure` if the pool cannot be used yet."""
        atexit.register(self._end_with_the_process)
        self._thread.start()
        with self._changed:
            self._changed.wait_for(lambda: self._num_tries, _FIRST_TRY_S)
            if self._membership is None:
                raise ServerFailure(*self._reason)

    # --- calls: any thread ---------------------------------------------------------------------

    @contextmanager
    def use(self) -> Iterator[Membership]:
        """Around calls of the client. Raises `ServerFailure` if there is none now."""
        with self._changed:
            membership = self._membership
            if membership is None or self._is_closing:
                raise self._unavailable()
            membership.num_calls += 1
        try:
            yield membership
        finally:
            with self._changed:
                membership.num_calls -= 1
                if membership.is_retired and not membership.num_calls:
                    self._changed.notify_all()

    def replace_if_in_doubt(self, membership: Membership, seconds: float) -> None:
        """Called after a transfer that failed, outside `use`. If it may still go on, waits until
        its client is closed, which ends it."""
        if seconds < _IN_DOUBT_AFTER_S:
            return
        logger.warning(
            "%s: a transfer failed after %.0f s and may still be under way. The slots are not used "
            "until the connection is closed; then a new one is made",
            self._options.where,
            seconds,
        )
        with self._changed:
            self._retire(membership, "the connection is being replaced")
        membership.closed.wait()

    def ask(self, question: Callable[[Client], T]) -> T:
        """Call the client, and wait some seconds at most. Raises `ServerFailure`."""
        with self._changed:
            if self._membership is None or self._is_closing:
                raise self._unavailable()
            if len(self._asked) >= _MOST_ASKING:
                raise ServerFailure(FailureKind.SILENT, "earlier questions are still not answered")
            asker = self._askers.pop() if self._askers else _Asker(self)
            asked = _Question(question)
            self._asked.add(asked)
        asker.take(asked)
        return asked.answer()

    def _unavailable(self) -> ServerFailure:
        return TierHasEnded() if self._is_closing else ServerFailure(*self._reason)

    def has_answered(self, asker: _Asker, question: _Question[Any]) -> bool:
        """A question's call has ended. True if its thread may take another one. Called by it."""
        with self._changed:
            self._asked.discard(question)
            if not self._is_closing:
                self._askers.append(asker)
            return not self._is_closing

    # --- the end -------------------------------------------------------------------------------

    def interrupt(self) -> None:
        """Let all later calls fail at once, and nobody wait for an answer any more."""
        with self._changed:
            self._is_closing = True
            if self._membership is not None:
                self._retire(self._membership, "the tier has ended")
            questions, askers = list(self._asked), self._askers
            self._askers = []
            self._changed.notify_all()
        for question in questions:
            question.give_up()
        for asker in askers:
            asker.take(None)

    def close(self) -> None:
        """Leave the pool, after `interrupt`. Waits some seconds at most: calls that hang are left
        to themselves, and the memory that they use stays mapped."""
        if self._thread.ident is not None:
            self._thread.join(_CLOSE_PATIENCE_S)
        if self._thread.is_alive():
            logger.warning(
                "%s: calls of the client still hang. Its threads, and the host memory of this "
                "engine, are freed when they return, or when the process ends",
                self._options.where,
            )

    def _end_with_the_process(self) -> None:
        """Called when the interpreter ends. The library would close its clients after that, which
        takes long while the master is silent, and crashes the process while a call is under way.
        So if there is one still, the process ends without the library, with its exit code."""
        if not self._is_closing:
            self.interrupt()
            self.close()
        if not self._is_closed:
            libc = ctypes.CDLL(None)
            libc.on_exit(ctypes.cast(libc._exit, ctypes.c_void_p), None)

    def _retire(self, membership: Membership, reason: str) -> None:
        membership.is_retired = True
        if self._membership is membership:
            self._membership = None
            self._reason = (FailureKind.UNREACHABLE, reason)
        self._changed.notify_all()

    # --- the pool's thread ---------------------------------------------------------------------

    def _run(self) -> None:
        pauses = {False: Pause(), True: Pause(_LONGEST_PAUSE_IF_REFUSED_S)}
        while not self._is_closing:
            membership = self._try_to_join()
            if membership is None:
                is_away = self._reason[0] in (FailureKind.UNREACHABLE, FailureKind.SILENT)
                pause = pauses[not is_away]
                pause.begin()
                with self._changed:
                    self._changed.wait_for(lambda: self._is_closing, pause.seconds_left)
                continue
            for pause in pauses.values():
                pause.forget()
            with self._changed:
                self._changed.wait_for(
                    lambda each=membership: each.is_retired and not each.num_calls  # type: ignore[misc]
                )
            if not self._may_close():
                # When nothing refers to a client any more, it is closed.
                ctypes.pythonapi.Py_IncRef(ctypes.py_object(membership.client))
                return
            membership.client.close()
            membership.closed.set()
        self._regions.clear()
        self._is_closed = True
        atexit.unregister(self._end_with_the_process)

    def _may_close(self) -> bool:
        """Wait until the master answers. False: the tier ends first, and leaves the client to the
        end of the process."""
        if self._options.etcd_servers:
            return self._may_not_close()
        pause = Pause()
        while True:
            try:
                require_master(self._options)
            except ServerFailure:
                if self._is_closing:
                    logger.warning(
                        "%s: the master does not answer. What this engine lends is taken back "
                        "when the process ends",
                        self._options.where,
                    )
                    return False
            else:
                return True
            pause.begin()
            with self._changed:
                self._changed.wait_for(lambda: self._is_closing, pause.seconds_left)

    def _may_not_close(self) -> bool:
        """Wait until the tier ends. Returns False."""
        if not self._is_closing:
            logger.error(
                "%s: with several masters, a connection cannot be closed without stopping this "
                "engine for half a minute. The engine goes on without this tier; restart it to use "
                "the pool again",
                self._options.where,
            )
            with self._changed:
                self._changed.wait_for(lambda: self._is_closing)
        return False

    def _try_to_join(self) -> Membership | None:
        """Connect once. Does not raise: the thread would end, and nobody would try again."""
        membership, reason = None, self._reason
        try:
            membership = self._join()
        except ServerFailure as failure:
            reason = (failure.kind, str(failure))
        except Exception as error:
            reason = (FailureKind.GARBAGE, f"the client cannot be used: {error!r}")
        with self._changed:
            self._num_tries += 1
            if not self._is_closing:
                self._membership, self._reason = membership, reason
            elif membership is not None:
                membership.is_retired = True
            self._changed.notify_all()
        return membership

    def _join(self) -> Membership:
        options = self._options
        own_address = require_master(options)
        _require_metadata_server(options)
        hostname = options.hostname or own_address
        if options.metadata == P2P:
            _require_own(hostname)
        if own_address:
            # With a metadata server, the client tells others this address. Without the variable, it
            # takes any of the machine's.
            os.environ.setdefault("MC_TCP_BIND_ADDRESS", own_address)
        client, code = new_client(self._library, options, hostname, options.segment_bytes)
        if code:
            raise ServerFailure(
                FailureKind.REFUSED,
                f"the pool does not take this engine as {hostname} (error {code} of setup). The "
                "usual reasons: another metadata server than the master's other hosts use, a "
                "hostname that is not this machine's, a master of another release, or an etcd that "
                "names no master. With MC_LOG_LEVEL=INFO, the library says more",
            )
        # TCP needs no registration. It would let every host that reaches this one read and change
        # the memory, because the library asks nobody who they are.
        for region in self._regions if options.protocol is Protocol.RDMA else ():
            code = client.register_buffer(int(region.ctypes.data), region.nbytes)
            if code:
                client.close()
                raise ServerFailure(
                    FailureKind.REFUSED,
                    f"host memory cannot be registered (error {code}). Raise the limit of locked "
                    "memory (ulimit -l unlimited)",
                )
        return Membership(client, client.get_hostname())


class _Question(Generic[T]):
    """A call of the client that another thread makes."""

    def __init__(self, question: Callable[[Client], T]) -> None:
        self._question = question
        self._ended = threading.Event()
        self._answers: list[T] = []
        self._error: Exception | None = None

    def ask(self, pool: Pool) -> None:
        """Make the call. Does not raise."""
        try:
            with pool.use() as membership:
                self._answers.append(self._question(membership.client))
        except Exception as error:
            self._error = error

    def give_up(self) -> None:
        """Let `answer` return."""
        self._ended.set()

    def answer(self) -> T:
        """Wait for the answer. Raises `ServerFailure`, or what the call has raised."""
        if not self._ended.wait(_ASK_TIMEOUT_S):
            raise ServerFailure(FailureKind.SILENT, "the master does not answer")
        if self._error is not None:
            raise self._error
        if not self._answers:
            raise TierHasEnded
        return self._answers[0]


class _Asker:
    """A thread that asks one question after the other. If a call hangs, it hangs with it."""

    def __init__(self, pool: Pool) -> None:
        self._pool = pool
        self._questions: SimpleQueue[_Question[Any] | None] = SimpleQueue()
        # Raises `RuntimeError` if the machine has no thread left.
        threading.Thread(target=self._run, name="kvtier-mooncake-ask", daemon=True).start()

    def take(self, question: _Question[Any] | None) -> None:
        """Ask this next. None: end."""
        self._questions.put(question)

    def _run(self) -> None:
        may_go_on = True
        while may_go_on and (question := self._questions.get()) is not None:
            question.ask(self._pool)
            may_go_on = self._pool.has_answered(self, question)
            question.give_up()
