"""What the command answers, for people and for programs."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from kvtier.cli.vllm_config.findings import Finding, Status
from kvtier.cli.vllm_config.flag import command_of, flags_of

__all__ = ["Answer"]

_SHOWN = {Status.OK: "ok", Status.WARNING: "WARNING", Status.PROBLEM: "PROBLEM"}


@dataclass(frozen=True, slots=True)
class Answer:
    config: dict[str, Any]
    findings: list[Finding]
    shutdown_timeout_s: int | None = None
    """For vLLM, where tiers outlive the process."""
    environment: Mapping[str, str] = field(default_factory=dict)
    """Variables that vLLM needs, and that are not set."""
    model: str | None = None
    """None: the flags are wanted, not a command."""
    python: str | None = None
    """As for `command_of`."""

    @property
    def is_ok(self) -> bool:
        """Whether an engine could start with the flag, as far as was looked."""
        return all(finding.status is not Status.PROBLEM for finding in self.findings)

    @property
    def flag(self) -> str:
        """What vLLM gets."""
        return flags_of(self.config, self.shutdown_timeout_s)

    @property
    def command(self) -> str | None:
        if self.model is None:
            return None
        return command_of(self.model, self.flag, self.environment, self.python)

    @property
    def text(self) -> str:
        """What is printed for a shell: the flags, or a script that takes further ones.

        The script's process becomes the server's, so that a supervisor's signals reach it.
        """
        if self.command is None:
            return self.flag
        start = "exec env" if self.environment else "exec"
        return f'{start} {self.command} "$@"'

    def as_json(self) -> str:
        document = {
            "flag": self.flag,
            "environment": dict(self.environment),
            "command": self.command,
            "config": self.config,
            "checks": [finding.as_json() for finding in self.findings],
            "ok": self.is_ok,
        }
        return json.dumps(document, indent=2)

    def remarks(self) -> Iterator[str]:
        """For people, beside the flag: one line for each finding, and one for what to do."""
        width = max((len(finding.name) for finding in self.findings), default=0)
        for finding in self.findings:
            yield f"{_SHOWN[finding.status]:7}  {finding.name:{width}}  {finding.found}"
            if finding.remedy:
                yield f"{'':7}  {'':{width}}  -> {finding.remedy}"
