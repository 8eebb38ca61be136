"""What kvtier's parts say to an operator while the demo runs."""

from __future__ import annotations

import logging
from types import TracebackType

__all__ = ["OperatorLog"]

_LOGGER = logging.getLogger("kvtier")


class OperatorLog(logging.Handler):
    """Inside of it, warnings are kept for the report instead of being written over the display."""

    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self._messages: list[str] = []
        self._propagated = True

    def __enter__(self) -> OperatorLog:
        self._propagated = _LOGGER.propagate
        _LOGGER.propagate = False
        _LOGGER.addHandler(self)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        _LOGGER.removeHandler(self)
        _LOGGER.propagate = self._propagated

    def emit(self, record: logging.LogRecord) -> None:
        """Any thread."""
        self._messages.append(record.getMessage())

    def take(self) -> list[str]:
        """What was said since the last call."""
        messages, self._messages = self._messages, []
        return messages
