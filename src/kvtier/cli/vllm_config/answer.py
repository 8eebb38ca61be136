"""What the command answers, for people and for programs."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from kvtier.cli.vllm_config.findings import Finding, Status
from kvtier.cli.vllm_config.flag import flag_of

__all__ = ["Answer"]

_SHOWN = {Status.OK: "ok", Status.WARNING: "WARNING", Status.PROBLEM: "PROBLEM"}


@dataclass(frozen=True, slots=True)
class Answer:
    config: dict[str, Any]
    findings: list[Finding]

    @property
    def is_ok(self) -> bool:
        """Whether an engine could start with the flag, as far as was looked."""
        return all(finding.status is not Status.PROBLEM for finding in self.findings)

    @property
    def flag(self) -> str:
        return flag_of(self.config)

    def as_json(self) -> str:
        document = {
            "flag": self.flag,
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
