"""A unix socket on which a running engine answers questions of its own user.

One connection is one question: a line of JSON, `{"ask": "status", ...}`, answered by one line of
JSON. The socket has mode 0600 in a directory of mode 0700, and the kernel's word for who is at the
other end is checked, too.
"""

from __future__ import annotations

import json
import logging
import os
import select
import socket
import stat
import struct
import tempfile
import threading
import time
import weakref
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, TypeAlias

__all__ = [
    "Answer",
    "SocketUnavailable",
    "StatusSocket",
    "credentials_of",
    "require_private",
    "socket_directory",
    "sockets_in",
]

logger = logging.getLogger(__name__)

Answer: TypeAlias = Callable[[Mapping[str, Any]], Mapping[str, Any]]
"""Answers a question. Raises `ValueError` with a text for the asker if the question is wrong."""

_MAX_QUESTION_BYTES = 1 << 16
_QUESTION_TIMEOUT_S, _ANSWER_TIMEOUT_S = 1.0, 5.0
_TICK_S = 1.0
_CLOSE_S = 1.0
_MAX_OF_A_PROCESS = 64
_UCRED = struct.Struct("3i")


class SocketUnavailable(Exception):
    """No socket could be made. The text says why."""


def socket_directory() -> Path:
    """Where the engines of this user have their sockets: `$KVTIER_RUN_DIR`, `kvtier` in
    `$XDG_RUNTIME_DIR`, or `kvtier-<user id>` in the directory for temporary files."""
    chosen = os.environ.get("KVTIER_RUN_DIR")
    if chosen:
        return Path(chosen)
    runtime = os.environ.get("XDG_RUNTIME_DIR")
    if runtime:
        return Path(runtime) / "kvtier"
    return Path(tempfile.gettempdir()) / f"kvtier-{os.getuid()}"


def require_private(directory: Path, *, of_any_user: bool = False) -> None:
    """Raise `OSError` if another user could have put sockets into this directory, or with
    `of_any_user` one who does not own it."""
    found = os.lstat(directory)
    is_owned = of_any_user or found.st_uid == os.getuid()
    if not stat.S_ISDIR(found.st_mode) or not is_owned:
        raise OSError("it is not a directory of this user")
    if found.st_mode & 0o077:
        raise OSError("other users may enter it; its mode must be 0700")


def sockets_in(directory: Path) -> dict[Path, int]:
    """The sockets of engines in a directory, each with the process id in its name. They may be left
    over from engines that were killed."""
    found = {}
    try:
        names = sorted(os.listdir(directory))
    except OSError:
        return {}
    for name in names:
        pid = name.removesuffix(".sock").partition("-")[0]
        if name.endswith(".sock") and pid.isdecimal():
            found[directory / name] = int(pid)
    return found


_of_this_process: weakref.WeakSet[StatusSocket] = weakref.WeakSet()


def _stop_listening_in_child() -> None:
    # A child of `fork` has no thread that answers. If it outlived the engine, its copy would make
    # the engine look busy, and not gone.
    for its in _of_this_process:
        its.stop_listening()


os.register_at_fork(after_in_child=_stop_listening_in_child)


class StatusSocket:
    """Listens on a unix socket, with a thread of its own.

    `answer`, `start` and `close` are for the engine's thread. One question is answered at a time; a
    client that sends or reads too slowly is cut off.
    """

    def __init__(self, path: Path | None = None) -> None:
        """`path`: of the socket; None: a name in `socket_directory`. Raises `SocketUnavailable`."""
        self._answers: dict[str, Answer] = {}
        self.every_second: list[Callable[[], None]] = []
        """Called on the thread, about once in a second."""
        self._closing = threading.Event()
        try:
            self._socket, self.path = _listen(path)
        except OSError as error:
            raise SocketUnavailable(f"{path or socket_directory()}: {error}") from error
        self._inode = os.stat(self.path).st_ino
        self._owner = os.getpid()
        _of_this_process.add(self)
        self._failed: set[str] = set()
        """The questions whose failure is in the log: a client may ask every second."""
        self._wake = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        self._thread = threading.Thread(target=self._run, name="kvtier-status", daemon=True)

    def answer(self, question: str, answer: Answer) -> None:
        """Answer questions of this kind from now on."""
        self._answers[question] = answer

    def start(self) -> None:
        """Begin to answer."""
        self._thread.start()

    def close(self) -> None:
        """End the thread and remove the socket. Waits for at most a second. Idempotent."""
        if self._closing.is_set():
            return
        self._closing.set()
        if os.getpid() == self._owner:  # a forked child has a copy, and the engine still answers
            with suppress(OSError):  # somebody else may have removed it
                if os.stat(self.path).st_ino == self._inode:
                    os.unlink(self.path)
            os.eventfd_write(self._wake, 1)
        if self._thread.ident is not None:
            self._thread.join(_CLOSE_S)
        self._socket.close()
        if not self._thread.is_alive():  # otherwise it would wait for another file's number
            os.close(self._wake)

    def stop_listening(self) -> None:
        """Close this process's copy of the socket. For a child of `fork`."""
        self._socket.close()

    # --- the socket's thread ----------------------------------------------------------------------

    def _run(self) -> None:
        tick_at = time.monotonic() + _TICK_S
        has_failed = False
        waiting = select.poll()
        waiting.register(self._socket, select.POLLIN)
        waiting.register(self._wake, select.POLLIN)
        while not self._closing.is_set():
            waiting.poll(1000 * max(0.0, tick_at - time.monotonic()))
            try:
                client, _ = self._socket.accept()
            except BlockingIOError:
                pass
            except OSError as error:
                if self._closing.is_set():
                    return
                # Too many open files, for example. The engine may close some.
                if not has_failed:
                    has_failed = True
                    logger.warning("%s cannot answer now: %s", self.path, error)
                self._closing.wait(_TICK_S)
            else:
                with client:
                    self._serve(client)
            if time.monotonic() >= tick_at:
                tick_at = time.monotonic() + _TICK_S
                self._tick()

    def _tick(self) -> None:
        for call in list(self.every_second):
            try:
                call()
            except Exception:
                self.every_second.remove(call)
                logger.exception("a status function has failed and is not called again")

    def _serve(self, client: socket.socket) -> None:
        try:
            if not _is_of_our_user(client):
                return
            client.settimeout(_QUESTION_TIMEOUT_S)
            line = _read_line(client, time.monotonic() + _QUESTION_TIMEOUT_S)
            reply = self._reply(line)
            client.settimeout(_ANSWER_TIMEOUT_S)
            client.sendall(reply)
        except OSError:
            pass  # the client has gone, or is too slow

    def _reply(self, line: bytes) -> bytes:
        try:
            question = json.loads(line)
            name = question["ask"]
            answer = self._answers[name]
        except (ValueError, TypeError, KeyError, RecursionError):
            known = ", ".join(sorted(self._answers))
            return _encoded(
                {"error": f'not a question: give {{"ask": NAME}} with NAME one of {known}'}
            )
        try:
            return _encoded(answer(question))
        except ValueError as error:
            return _encoded({"error": str(error)})
        except Exception:
            if name not in self._failed:
                self._failed.add(name)
                logger.exception("the question %r could not be answered", name)
            return _encoded({"error": "the engine could not answer; its log says why"})


def _encoded(reply: Mapping[str, Any]) -> bytes:
    return json.dumps(reply, separators=(",", ":")).encode() + b"\n"


def _listen(path: Path | None) -> tuple[socket.socket, Path]:
    if path is not None:
        _remove_if_dead(path)
        return _bind(path), path
    directory = socket_directory()
    directory.mkdir(mode=0o700, parents=True, exist_ok=True)
    require_private(directory)
    for left in sockets_in(directory):
        _remove_if_dead(left)
    for number in range(_MAX_OF_A_PROCESS):
        name = f"{os.getpid()}-{number}.sock" if number else f"{os.getpid()}.sock"
        try:
            return _bind(directory / name), directory / name
        except FileExistsError:
            continue
        except OSError as error:
            if not (directory / name).exists():
                raise error
    raise OSError(f"this process has {_MAX_OF_A_PROCESS} sockets already")


def _bind(path: Path) -> socket.socket:
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_CLOEXEC)
    try:
        # The mode of the socket file follows from that of the descriptor, so nobody can connect
        # between `bind` and a later `chmod`.
        os.fchmod(listener.fileno(), 0o600)
        listener.bind(str(path))
        os.chmod(path, 0o600)
        listener.listen(8)
        listener.setblocking(False)  # the thread polls it
    except BaseException:
        listener.close()
        raise
    return listener


def _remove_if_dead(path: Path) -> None:
    """Remove a socket that nobody listens on: its engine was killed."""
    try:
        if not stat.S_ISSOCK(os.lstat(path).st_mode):
            return
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
            probe.settimeout(0.2)
            try:
                probe.connect(str(path))
            except ConnectionRefusedError:
                os.unlink(path)
    except OSError:
        pass  # it has gone meanwhile, or is busy


def credentials_of(connection: socket.socket) -> tuple[int, int, int]:
    """The process, user and group at the other end, as the kernel knows them."""
    credentials = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _UCRED.size)
    pid, uid, gid = _UCRED.unpack(credentials)
    return pid, uid, gid


def _is_of_our_user(client: socket.socket) -> bool:
    _, uid, _ = credentials_of(client)
    return uid in {os.getuid(), 0}


def _read_line(client: socket.socket, deadline: float) -> bytes:
    line = b""
    while not line.endswith(b"\n"):
        if len(line) > _MAX_QUESTION_BYTES or time.monotonic() > deadline:
            raise OSError("the question is too long, or came too slowly")
        part = client.recv(4096)
        if not part:
            break
        line += part
    return line
