"""A refused configuration, told so that an operator can mend it without reading code."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Problem:
    """One thing that is wrong, and what to write instead."""

    key: str
    """Where it stands, as a path such as `secondary_tiers[1].type`."""
    given: str
    """What stands there, as `describe` shows it: without passwords."""
    allowed: str
    remedy: str
    """One sentence, without its full stop; or a question."""

    def __str__(self) -> str:
        end = "" if self.remedy.endswith("?") else "."
        return f"{self.key}: got {self.given}; allowed: {self.allowed}. {self.remedy}{end}"


class ConfigError(ValueError):
    """The configuration cannot work. Raised before anything is allocated or opened.

    Carries every problem that could be found at once, so that mending takes few rounds. Only a
    tier's own word on the values of its keys comes when it is started; nothing stays open then.
    """

    def __init__(self, *problems: Problem) -> None:
        super().__init__(*problems)
        self.problems = problems

    def __str__(self) -> str:
        if len(self.problems) == 1:
            return str(self.problems[0])
        lines = "".join(f"\n- {problem}" for problem in self.problems)
        return f"{len(self.problems)} problems in the configuration:{lines}"
