"""The error of a life that went wrong."""

from __future__ import annotations

__all__ = ["Violation", "require"]


class Violation(AssertionError):
    """Something happened that must not happen with any seed."""


def require(holds: bool, otherwise: str) -> None:
    """Raise `Violation` unless the condition holds."""
    if not holds:
        raise Violation(otherwise)
