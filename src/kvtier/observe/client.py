"""Finds the running engines of this user, and asks them."""

from __future__ import annotations

import json
import os
import socket
import time
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kvtier.observe.status_socket import (
    credentials_of,
    require_private,
    socket_directory,
    sockets_in,
)

__all__ = [
    "FOREIGN",
    "EngineNotFound",
    "EngineSocket",
    "NoAnswer",
    "ask",
    "find_engine",
    "find_engines",
    "process_of",
]

FOREIGN = "the engine answers in an unknown form: it may run another version of kvtier"
_TIMEOUT_S = 10.0
_RETRY_S = 0.05
_MAX_ANSWER_BYTES = 64 << 20


class EngineNotFound(Exception):
    """No engine, or more than one, fits. The text has the remedy."""


class NoAnswer(Exception):
    """The engine has not answered, or has refused the question. The text says why."""


@dataclass(frozen=True, slots=True)
class EngineSocket:
    """The socket of a running engine."""

    path: Path
    pid: int


def find_engines() -> list[EngineSocket]:
    """The engines of this user that run on this machine, and in this container. Raises
    `EngineNotFound` if another user may have made the sockets."""
    directory = socket_directory()
    try:
        is_named_by_root = os.getuid() == 0 and bool(os.environ.get("KVTIER_RUN_DIR"))
        require_private(directory, of_any_user=is_named_by_root)
    except FileNotFoundError:
        return []
    except OSError as error:
        raise EngineNotFound(
            f"{directory}: {error}. Engines of this user have no sockets there; remove it, or set "
            "KVTIER_RUN_DIR to another directory for them and for this command"
        ) from None
    return [
        EngineSocket(path, pid)
        for path, pid in sockets_in(directory).items()
        if _why_silent(path) is None
    ]


def find_engine(name: str | None = None) -> EngineSocket:
    """The engine with this process id or socket path; None: the only one that runs. Raises
    `EngineNotFound`."""
    if name is not None and not name.isdecimal():
        path = Path(name)
        if (reason := _why_silent(path)) is not None:
            raise EngineNotFound(f"{name}: no engine answers there: {reason}")
        return EngineSocket(path, 0)
    engines = find_engines()
    fitting = [its for its in engines if name is None or its.pid == int(name)]
    if len(fitting) == 1:
        return fitting[0]
    where = f"in {socket_directory()}"
    if not engines:
        raise EngineNotFound(
            f"no engine of this user runs here (none answers {where}). Run the command as the "
            "engine's user and in its container, or give the path of its socket. An engine with "
            '"status_socket": "off" cannot be asked'
        )
    others = ", ".join(f"{its.pid} ({its.path})" for its in fitting or engines)
    if not fitting:
        raise EngineNotFound(f"process {name} is not an engine {where}. There are: {others}")
    raise EngineNotFound(
        f"{len(fitting)} engines run here: {others}. Give a process id, or the path of a "
        "socket (top, page and explain also take --all)"
    )


def process_of(engine: EngineSocket) -> int | None:
    """The engine's process id as this process sees it. In a container of its own, an engine knows
    another one. None: it cannot be seen from here."""
    try:
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as connection:
            connection.settimeout(_TIMEOUT_S)
            connection.connect(str(engine.path))
            pid, _, _ = credentials_of(connection)
    except OSError:
        return None
    return pid or None


def ask(
    engine: EngineSocket | Path, question: str, *, needs: Collection[str] = (), **arguments: Any
) -> dict[str, Any]:
    """Ask a running engine. `needs`: what the answer must have. Raises `NoAnswer`."""
    path = engine.path if isinstance(engine, EngineSocket) else engine
    try:
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as connection:
            connection.settimeout(_TIMEOUT_S)
            _connect(connection, path)
            connection.sendall(json.dumps({"ask": question, **arguments}).encode() + b"\n")
            answer = _read_all(connection)
    except TimeoutError:
        raise NoAnswer(
            f"{path}: no answer within {_TIMEOUT_S:g} s. The engine may be stopped or very busy"
        ) from None
    except OSError as error:
        raise NoAnswer(f"{path}: {error.strerror or error}") from None
    try:
        decoded = json.loads(answer)
    except ValueError:
        raise NoAnswer(f"{path}: the connection was closed without an answer") from None
    if not isinstance(decoded, Mapping):
        raise NoAnswer(f"{path}: the answer is not an object")
    if "error" in decoded:
        problem = str(decoded["error"])
        if problem.startswith("not a question"):
            problem = f'the engine does not answer "{question}": it runs another version of kvtier'
        raise NoAnswer(f"{path}: {problem}")
    if not decoded.keys() >= set(needs):
        raise NoAnswer(f"{path}: {FOREIGN}")
    return dict(decoded)


def _read_all(connection: socket.socket) -> bytes:
    parts = []
    num_bytes = 0
    while part := connection.recv(1 << 16):
        parts.append(part)
        num_bytes += len(part)
        if num_bytes > _MAX_ANSWER_BYTES:
            raise OSError("the answer is too long")
    return b"".join(parts)


def _connect(connection: socket.socket, path: Path) -> None:
    """Waits if as many clients wait as the engine's socket admits: it is stopped or very busy."""
    deadline = time.monotonic() + _TIMEOUT_S
    while True:
        try:
            return connection.connect(str(path))
        except BlockingIOError:
            if time.monotonic() > deadline:
                raise TimeoutError from None
            time.sleep(_RETRY_S)


def _why_silent(path: Path) -> str | None:
    """Why no engine answers at the path. None: one does, or it is stopped or too busy now."""
    try:
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
            probe.settimeout(_TIMEOUT_S)
            probe.connect(str(path))
    except BlockingIOError:
        return None
    except FileNotFoundError:
        return "there is no such socket. Give the path, or the process id, of an engine"
    except ConnectionRefusedError:
        return "the engine has ended" if path.is_socket() else "it is no socket"
    except PermissionError:
        return "it is another user's. Run the command as the engine's user"
    except OSError as error:
        return error.strerror or str(error)
    return None
