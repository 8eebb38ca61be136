"""Records callers' violations of the contract: counted and logged, or raised in strict mode.

In production a violation does not raise: the first of each kind is logged with its key, all are
counted, and the method that was called returns the safe answer. In strict mode, which the tests
use, a violation raises `ContractViolation`.
"""

from __future__ import annotations

import logging
import os
from collections import Counter

logger = logging.getLogger(__name__)

STRICT_ENV = "KVTIER_STRICT"


class ContractViolation(RuntimeError):
    """A caller did something that the contract forbids. Raised in strict mode only."""


def strict_by_default() -> bool:
    """True if the environment sets strict mode (`KVTIER_STRICT=1`)."""
    return os.environ.get(STRICT_ENV, "") not in ("", "0")


class MisuseLog:
    """Counts contract violations of one component by kind. Scheduler thread only."""

    def __init__(self, component: str, strict: bool | None = None) -> None:
        self._component = component
        self._strict = strict_by_default() if strict is None else strict
        self.counts: Counter[str] = Counter()

    @property
    def total(self) -> int:
        """All violations so far, of every kind."""
        return self.counts.total()

    def record(self, kind: str, key: object, req_id: str, remedy: str) -> None:
        """Count one violation. Raises `ContractViolation` in strict mode; otherwise logs the first
        violation of each kind.

        `key`: the key of the block; None if the violation does not concern a block. `remedy`: what
        the caller should do instead.
        """
        self.counts[kind] += 1
        if not self._strict and self.counts[kind] > 1:
            return
        name = key.hex() if isinstance(key, bytes) else repr(key)
        where = "" if key is None else f"key {name}, "
        message = f"{self._component}: {kind} ({where}request {req_id!r}): {remedy}"
        if self._strict:
            raise ContractViolation(message)
        logger.warning("%s. Further violations of this kind are counted, not logged.", message)
