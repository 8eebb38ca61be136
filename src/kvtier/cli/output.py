"""Standard output and standard error of the commands."""

from __future__ import annotations

import errno
import os
import sys
from contextlib import suppress

from kvtier.config.errors import printable

__all__ = ["CannotWrite", "NobodyReads", "end_of_output", "finish", "note", "write", "write_line"]


class NobodyReads(Exception):
    """The reader of standard output has closed it."""


class CannotWrite(Exception):
    """The result could not be written. The message says why."""


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
