"""What a check has found."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

__all__ = ["Finding", "Status"]


class Status(StrEnum):
    """What a finding means for an engine that is started with the flag."""

    OK = "ok"
    WARNING = "warning"
    """It starts, and something is not as the user may think."""
    PROBLEM = "problem"
    """It does not start, or a tier is of no use."""


@dataclass(frozen=True, slots=True)
class Finding:
    """One thing that was looked at."""

    name: str
    status: Status
    found: str
    """As it is, in words that need no others."""
    remedy: str = ""
    """What to do; empty: nothing."""

    @classmethod
    def of_refusal(cls, name: str, sentence: str) -> Finding:
        """What an engine would say when it refuses: what is wrong, a colon, and the remedy."""
        found, _, remedy = sentence.rpartition(": ")
        return cls(name, Status.PROBLEM, found or sentence, remedy if found else "")

    def as_json(self) -> dict[str, str]:
        return {
            "name": self.name,
            "status": self.status.value,
            "found": self.found,
            "remedy": self.remedy,
        }
