"""Standard output: written as it comes, whoever reads it or stops reading."""

from __future__ import annotations

import errno
import os
import sys
from contextlib import suppress

from kvtier.config.redaction import printable

__all__ = ["CannotWrite", "NobodyReads", "end_of_output", "finish", "note", "write", "write_line"]


class NobodyReads(Exception):
    """Whoever was reading has seen enough."""


class CannotWrite(Exception):
    """The result could not be written; says why."""


def write(text: str) -> None:
    """Write a part of the result."""
    try:
        if sys.stdout is None:  # closed before the command was started
            raise OSError(errno.EBADF, os.strerror(errno.EBADF))
        # A path may be no text in any encoding.
        encoding = sys.stdout.encoding or "utf-8"
        sys.stdout.write(text.encode(encoding, "backslashreplace").decode(encoding))
    except OSError as error:
        raise end_of_output(error) from None


def write_line(line: str) -> None:
    """Write a part of the result that is one line, whatever names are in it."""
    write(f"{printable(line)}\n")


def finish() -> None:
    """See to it that all of the result is written."""
    try:
        if sys.stdout is not None:
            sys.stdout.flush()
    except OSError as error:
        raise end_of_output(error) from None


def note(text: str) -> None:
    """Tell whoever is there, beside the result: one line, whatever names are in it."""
    if sys.stderr is not None:
        with suppress(OSError):
            print(printable(text), file=sys.stderr, flush=True)


def end_of_output(error: OSError) -> Exception:
    """What to raise, or say, when standard output takes no more. Nothing is written to it then."""
    if sys.stdout is not None:
        # What is still in the buffer would fail once more when the interpreter ends.
        with suppress(OSError), open(os.devnull, "w") as nowhere:
            os.dup2(nowhere.fileno(), sys.stdout.fileno())
    if isinstance(error, BrokenPipeError):
        return NobodyReads()
    return CannotWrite(f"the result could not be written: {error.strerror or error}")
