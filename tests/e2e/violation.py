"""What a life must not show."""

from __future__ import annotations

__all__ = ["Violation", "require"]


class Violation(AssertionError):
    """Something happened that must not, whatever the seed."""


def require(holds: bool, otherwise: str) -> None:
    """Raise `Violation` unless it holds."""
    if not holds:
        raise Violation(otherwise)
