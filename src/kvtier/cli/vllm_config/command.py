"""`kvtier vllm-config`, from checked options to an exit code."""

from __future__ import annotations

import logging
import signal
from collections.abc import Iterator
from contextlib import contextmanager

from kvtier.cli.output import CannotWrite, NobodyReads, finish, note, write
from kvtier.cli.vllm_config.answer import Answer
from kvtier.cli.vllm_config.checks import findings
from kvtier.cli.vllm_config.findings import Finding, Status
from kvtier.cli.vllm_config.flag import transfer_config
from kvtier.cli.vllm_config.machine import Machine
from kvtier.cli.vllm_config.validation import checked
from kvtier.cli.vllm_config.wishes import Wishes, WrongOption
from kvtier.config import ConfigError

__all__ = ["run_vllm_config"]

_NAME = "kvtier vllm-config"


def run_vllm_config(
    wishes: Wishes, *, is_plain: bool, world_size: int, is_checked: bool, as_json: bool
) -> int:
    """Print the flag, and what was found; return the exit code."""
    try:
        answer = _answer(wishes, is_plain, world_size, is_checked)
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
        write((answer.as_json() if as_json else answer.flag) + "\n")
        finish()
    except NobodyReads:
        return 128 + signal.SIGPIPE
    except CannotWrite as error:
        note(f"{_NAME}: {error}")
        return 2
    return 0 if answer.is_ok else 1


def _answer(wishes: Wishes, is_plain: bool, world_size: int, is_checked: bool) -> Answer:
    """Raises `WrongOption` or `ConfigError`."""
    config = transfer_config(wishes.extra_config(), is_plain=is_plain)
    with _warnings_of_kvtier() as said:
        options = checked(config["kv_connector_extra_config"])
        found = findings(options, world_size, Machine(), is_plain=is_plain) if is_checked else ()
        return Answer(config, [*found, *said])


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
