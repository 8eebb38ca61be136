"""`kvtier vllm-config`, from checked options to an exit code."""

from __future__ import annotations

import logging
import signal
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager

from kvtier.cli.output import CannotWrite, NobodyReads, finish, note, write
from kvtier.cli.vllm_config.answer import Answer
from kvtier.cli.vllm_config.checks import findings
from kvtier.cli.vllm_config.findings import Finding, Status
from kvtier.cli.vllm_config.flag import shutdown_seconds, transfer_config
from kvtier.cli.vllm_config.machine import Machine
from kvtier.cli.vllm_config.validation import checked
from kvtier.cli.vllm_config.vllm_checks import interpreter_to_use, missing_variables
from kvtier.cli.vllm_config.wishes import Wishes, WrongOption
from kvtier.config import ConfigError

__all__ = ["run_vllm_config"]

_NAME = "kvtier vllm-config"


def run_vllm_config(
    wishes: Wishes,
    *,
    model: str | None,
    is_plain: bool,
    world_size: int,
    is_checked: bool,
    as_json: bool,
) -> int:
    """Print the flags, or the command that serves `model`, and what was found; return the exit
    code."""
    try:
        answer = _answer(wishes, model, is_plain, world_size, is_checked)
    except WrongOption as wrong:
        note(f"{_NAME}: {wrong.option}: {wrong}")
        return 2
    except ConfigError as refused:
        for problem in refused.problems:
            note(f"{_NAME}: {wishes.option_of(problem.key)}: {problem}")
        return 2
    if not as_json:  # first, so that the flag stands last on a terminal
        for remark in answer.remarks():
            note(remark)
    try:
        write((answer.as_json() if as_json else answer.text) + "\n")
        finish()
    except NobodyReads:
        return 128 + signal.SIGPIPE
    except CannotWrite as error:
        note(f"{_NAME}: {error}")
        return 2
    return 0 if answer.is_ok else 1


def _answer(
    wishes: Wishes, model: str | None, is_plain: bool, world_size: int, is_checked: bool
) -> Answer:
    """Raises `WrongOption` or `ConfigError`."""
    config = transfer_config(wishes.extra_config(), is_plain=is_plain)
    machine = Machine()
    with _warnings_of_kvtier() as said:
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


@contextmanager
def _warnings_of_kvtier() -> Iterator[list[Finding]]:
    """What an engine would write to its log when it starts like this."""
    said: list[Finding] = []

    class Listener(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            said.append(Finding("configuration", Status.WARNING, record.getMessage()))

    logger, listener = logging.getLogger("kvtier"), Listener(logging.WARNING)
    logger.addHandler(listener)
    try:
        yield said
    finally:
        logger.removeHandler(listener)
