"""The scheduling step: what all parts of the orchestrator go by."""

from __future__ import annotations


class Step:
    """Which step it is, and the time that counts in it. Set by the orchestrator alone."""

    __slots__ = ("all_in_use", "now", "number")

    def __init__(self, now: float) -> None:
        self.number = 0
        self.now = now
        """Read when tiers were last asked for finished jobs, or when the step ended."""
        self.all_in_use = True
        """Whether no tier was cut off when the step began."""
