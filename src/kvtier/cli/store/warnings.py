"""What the tier's own code has to say while a command uses it."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager

from kvtier.cli.output import note

__all__ = ["warnings_as_notes"]


class _Notes(logging.Handler):
    def emit(self, record: logging.LogRecord) -> None:
        note(f"kvtier store: {record.getMessage()}")


@contextmanager
def warnings_as_notes() -> Iterator[None]:
    """Show warnings of kvtier like every other remark of the command."""
    handler = _Notes(logging.WARNING)
    logger = logging.getLogger("kvtier")
    logger.addHandler(handler)
    try:
        yield
    finally:
        logger.removeHandler(handler)
