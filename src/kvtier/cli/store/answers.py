"""Asking the user, and answering."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from typing import Any, Protocol

from kvtier.cli.output import finish, note, write, write_line
from kvtier.cli.store.refusal import StoreRefused

__all__ = ["is_confirmed", "require_terminal", "write_result"]


class _Result(Protocol):
    def as_json(self) -> dict[str, Any]: ...

    def lines(self) -> Iterator[str]: ...


def write_result(result: _Result, *, as_json: bool) -> None:
    """On standard output: one document, or lines."""
    if as_json:
        write(json.dumps(result.as_json(), indent=2) + "\n")
    else:
        for line in result.lines():
            write_line(line)
    finish()


def require_terminal(remedy: str) -> None:
    """Raises `StoreRefused` if there is nobody to ask."""
    if sys.stdin is None or not sys.stdin.isatty():
        raise StoreRefused(f"there is no terminal to ask whether you are sure: add {remedy}")


def is_confirmed(question: str) -> bool:
    note(f"{question} [y/N]")
    return sys.stdin.readline().strip().lower() in ("y", "yes")
