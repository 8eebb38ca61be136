"""Standard output and standard error of the commands."""

from __future__ import annotations

import errno
import os
import signal
import socket
import sys
from collections.abc import Callable
from contextlib import suppress

from kvtier.config.errors import printable

__all__ = [
    "CannotServe",
    "CannotWrite",
    "NobodyReads",
    "end_of_output",
    "finish",
    "note",
    "run_to_exit_code",
    "write",
    "write_line",
]


def run_to_exit_code(
    command: str, work: Callable[[], int], problems: tuple[type[Exception], ...] = ()
) -> int:
    """Run the work of a command, and return its exit code. For `problems`, and for a result that
    cannot be written, prints one sentence and returns 2."""
    expected: tuple[type[Exception], ...] = (*problems, CannotWrite)
    try:
        return work()
    except expected as problem:
        note(f"kvtier {command}: {problem}")
        return 2
    except NobodyReads:
        return 128 + signal.SIGPIPE
    except KeyboardInterrupt:
        return 128 + signal.SIGINT


class NobodyReads(Exception):
    """The reader of standard output has closed it."""


class CannotWrite(Exception):
    """The result could not be written. The message says why."""


class CannotServe(Exception):
    """Nothing can be served at this address. The message has the remedy."""

    @classmethod
    def at(cls, host: str, port: int, error: OSError | UnicodeError) -> CannotServe:
        """The address of a server, from --host and --port, cannot be found or listened on."""
        if isinstance(error, (socket.gaierror, UnicodeError)):
            reason = error.strerror if isinstance(error, socket.gaierror) else "not a name"
            return cls(f"--host {host}: {reason}: give an address of this machine")
        if error.errno == errno.EADDRINUSE:
            in_use = f"port {port} of {host} is in use"
            return cls(f"{in_use}: give another --port, or 0 for any free one")
        if error.errno == errno.EACCES:
            return cls(f"port {port} is only for root: give a --port from 1024")
        if error.errno == errno.EADDRNOTAVAIL:
            return cls(f"--host {host} is not an address of this machine: give one that is")
        return cls(f"{host}, port {port}: {error.strerror or error}")


def write(text: str) -> None:
    """Write a part of the result."""
    try:
        if sys.stdout is None:  # closed before the command was started
            raise OSError(errno.EBADF, os.strerror(errno.EBADF))
        # A path may contain bytes that no encoding can write.
        encoding = sys.stdout.encoding or "utf-8"
        sys.stdout.write(text.encode(encoding, "backslashreplace").decode(encoding))
    except OSError as error:
        raise end_of_output(error) from None


def write_line(line: str) -> None:
    """Write one line of the result. Control characters in names are escaped."""
    write(f"{printable(line)}\n")


def finish() -> None:
    """Flush the result."""
    try:
        if sys.stdout is not None:
            sys.stdout.flush()
    except OSError as error:
        raise end_of_output(error) from None


def note(text: str) -> None:
    """Print one line on standard error. Control characters in names are escaped."""
    if sys.stderr is not None:
        with suppress(OSError):
            print(printable(text), file=sys.stderr, flush=True)


def end_of_output(error: OSError) -> Exception:
    """Return the exception to raise after standard output has failed with `error`. Discards what is
    still buffered."""
    if sys.stdout is not None:
        # Otherwise the interpreter's flush at exit would fail, too.
        with suppress(OSError), open(os.devnull, "w") as nowhere:
            os.dup2(nowhere.fileno(), sys.stdout.fileno())
    if isinstance(error, BrokenPipeError):
        return NobodyReads()
    return CannotWrite(f"the result could not be written: {error.strerror or error}")
