"""What the checks find, and how it is shown to people."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from enum import StrEnum

__all__ = ["Finding", "Status", "as_lines", "has_problem", "verdict_of"]


class Status(StrEnum):
    """How a finding affects an engine that is started with the checked configuration."""

    OK = "ok"
    WARNING = "warning"
    """The engine starts, but something is probably not intended."""
    PROBLEM = "problem"
    """The engine does not start, or a tier is useless."""


@dataclass(frozen=True, slots=True)
class Finding:
    """The result of one check."""

    name: str
    status: Status
    found: str
    """What the check found, without the remedy."""
    remedy: str = ""
    """What to do. Empty if nothing is to be done."""

    @classmethod
    def of_refusal(cls, name: str, sentence: str) -> Finding:
        """Make a finding from an engine's refusal to start. `sentence`: the refusal, in the form
        "what is wrong: remedy"."""
        found, _, remedy = sentence.rpartition(": ")
        return cls(name, Status.PROBLEM, found or sentence, remedy if found else "")

    def as_json(self) -> dict[str, str]:
        return {
            "name": self.name,
            "status": self.status.value,
            "found": self.found,
            "remedy": self.remedy,
        }


_SHOWN = {Status.OK: "ok", Status.WARNING: "WARNING", Status.PROBLEM: "PROBLEM"}


def as_lines(findings: Iterable[Finding]) -> Iterator[str]:
    """Yield the findings as text: one line for each, and one for its remedy."""
    findings = list(findings)
    width = max((len(finding.name) for finding in findings), default=0)
    for finding in findings:
        yield f"{_SHOWN[finding.status]:7}  {finding.name:{width}}  {finding.found}"
        if finding.remedy:
            yield f"{'':7}  {'':{width}}  -> {finding.remedy}"


def verdict_of(findings: Iterable[Finding]) -> str:
    """One line that names the problems, or else the warnings."""
    findings = list(findings)
    problems = [found.name for found in findings if found.status is Status.PROBLEM]
    warnings = [found.name for found in findings if found.status is Status.WARNING]
    if problems:
        return f"{_counted(problems, 'problem')}: {', '.join(dict.fromkeys(problems))}"
    if warnings:
        names = ", ".join(dict.fromkeys(warnings))
        return f"It works. {_counted(warnings, 'warning')}: {names}"
    return "All is well."


def _counted(names: list[str], what: str) -> str:
    return f"{len(names)} {what}{'s' if len(names) > 1 else ''}"


def has_problem(findings: Iterable[Finding]) -> bool:
    return any(finding.status is Status.PROBLEM for finding in findings)
