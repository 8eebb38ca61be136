"""What a life that went wrong ends with."""

from __future__ import annotations


class Violation(AssertionError):
    """Something happened that must never happen."""


class Witness:
    """Remembers the first violation: what is raised inside a tier, the manager keeps from us."""

    def __init__(self) -> None:
        self.seen: Violation | None = None

    def saw(self, what: str) -> Violation:
        """A violation, to be raised by whoever saw it."""
        violation = Violation(what)
        self.seen = self.seen or violation
        return violation

    def testify(self) -> None:
        """Raise what was seen, if anything."""
        if self.seen is not None:
            raise self.seen
