"""The part of an oracle that is the same for every tier: it dispatches reports and counts."""

from __future__ import annotations

from collections import Counter

from tests.tiering.crash.processes import Report

__all__ = ["ReportFollower", "Violation"]


class Violation(Exception):
    """The tier did something that must not happen."""


class ReportFollower:
    """Follows the reports of the lives of one run.

    The report `[number, "index ends", ...]` is passed to the method `on_index_ends(number, ...)`;
    reports without a method are ignored.
    """

    def __init__(self) -> None:
        self.tally: Counter[str] = Counter()
        """What happened in the run, and how often."""

    def follow(self, report: Report) -> None:
        """Process one report. Raises `Violation`."""
        number, what, *details = report
        handler = getattr(self, f"on_{what.replace(' ', '_')}", None)
        if handler is not None:
            handler(number, *details)

    def on_at(self, number: int, point: str) -> None:
        """A life is about to be killed at this point."""
        self.tally[f"killed: {point}"] += 1

    def on_shut_down(self, number: int) -> None:
        self.tally["clean ends"] += 1

    def on_wrong(self, number: int, text: str) -> None:
        """A life has seen for itself that something is wrong."""
        raise Violation(f"life {number}: {text}")

    def on_ended(self, number: int, status: int) -> None:
        if status not in (0, -9):
            raise Violation(f"life {number} has ended with status {status}")
        self.tally["kills"] += status == -9
