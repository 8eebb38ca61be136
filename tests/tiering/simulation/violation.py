"""The error of a life in which a promise was broken."""

from __future__ import annotations


class Violation(AssertionError):
    """A promise was broken."""


class Witness:
    """Keeps the first violation, since the manager catches exceptions that are raised inside a
    tier."""

    def __init__(self) -> None:
        self.seen: Violation | None = None

    def saw(self, what: str) -> Violation:
        """A violation, to be raised by the check that found it."""
        violation = Violation(what)
        self.seen = self.seen or violation
        return violation

    def testify(self) -> None:
        """Raise the first violation, if there is one."""
        if self.seen is not None:
            raise self.seen
