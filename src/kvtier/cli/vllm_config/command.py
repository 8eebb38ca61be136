"""Runs `kvtier vllm-config`: validates the options, checks this machine, and prints the flag."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from kvtier.cli.checks.finding import Finding, as_lines, has_problem
from kvtier.cli.checks.host import Machine
from kvtier.cli.checks.options import checked, findings, warnings_of_kvtier
from kvtier.cli.checks.vllm import interpreter_to_use, missing_variables
from kvtier.cli.output import finish, note, run_to_exit_code, write
from kvtier.cli.vllm_config.flag import (
    RequestedConfig,
    WrongOption,
    command_of,
    flags_of,
    shutdown_seconds,
    transfer_config,
)
from kvtier.config import ConfigError

__all__ = ["Answer", "run_vllm_config"]

_NAME = "kvtier vllm-config"


def run_vllm_config(
    requested: RequestedConfig,
    *,
    model: str | None,
    is_plain: bool,
    world_size: int,
    is_checked: bool,
    as_json: bool,
) -> int:
    """Print the flags, or the command that serves `model`, and the findings. Returns the exit
    code."""
    try:
        answer = _answer(requested, model, is_plain, world_size, is_checked)
    except WrongOption as wrong:
        note(f"{_NAME}: {wrong.option}: {wrong}")
        return 2
    except ConfigError as refused:
        for problem in refused.problems:
            note(f"{_NAME}: {requested.option_of(problem.key)}: {problem}")
        return 2
    if not as_json:  # before the flag, so that a terminal shows the flag last
        for remark in answer.remarks():
            note(remark)

    def print_answer() -> int:
        write((answer.as_json() if as_json else answer.text) + "\n")
        finish()
        return 0 if answer.is_ok else 1

    return run_to_exit_code("vllm-config", print_answer)


def _answer(
    requested: RequestedConfig, model: str | None, is_plain: bool, world_size: int, is_checked: bool
) -> Answer:
    """Run the checks and return what to print. Raises `WrongOption` or `ConfigError`."""
    config = transfer_config(requested.extra_config(), is_plain=is_plain)
    machine = Machine()
    with warnings_of_kvtier() as said:
        options = checked(config["kv_connector_extra_config"])
        found: Iterable[Finding] = ()
        environment: Mapping[str, str] = {}
        if is_checked:
            if options.lasting_tiers:
                environment = missing_variables(machine)
            found = findings(
                options, world_size, machine, is_plain=is_plain, sets_variables=model is not None
            )
        return Answer(
            config,
            [*found, *said],
            shutdown_seconds(options.options.shutdown_timeout_ms)
            if options.lasting_tiers
            else None,
            environment,
            model,
            interpreter_to_use(machine) if is_checked else None,
        )


# --- the answer --------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Answer:
    config: dict[str, Any]
    findings: list[Finding]
    shutdown_timeout_s: int | None = None
    """vLLM's `--shutdown-timeout`. None if no tier outlives the process."""
    environment: Mapping[str, str] = field(default_factory=dict)
    """Environment variables that vLLM needs and that are not set."""
    model: str | None = None
    """The model to serve. None: print flags rather than a command."""
    python: str | None = None
    """The interpreter that runs vLLM, if the command `vllm` does not work. See `command_of`."""

    @property
    def is_ok(self) -> bool:
        """True if no check found a problem."""
        return not has_problem(self.findings)

    @property
    def flag(self) -> str:
        """The flags for vLLM."""
        return flags_of(self.config, self.shutdown_timeout_s)

    @property
    def command(self) -> str | None:
        if self.model is None:
            return None
        return command_of(self.model, self.flag, self.environment, self.python)

    @property
    def text(self) -> str:
        """The output for a shell: the flags, or a script that accepts further flags.

        The script replaces its process with the server, so that a supervisor's signals reach it.
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
        """Yield the findings as text."""
        return as_lines(self.findings)
