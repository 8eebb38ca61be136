"""Other code in place of the tier's own, in a process that is going to be killed."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any


def plant(owner: Any, **replacements: Callable[..., Any] | object) -> None:
    """Let a class or a module have these, for good. It must have had something there before."""
    for name, replacement in replacements.items():
        if not hasattr(owner, name):
            raise AttributeError(f"{owner} has no {name} any more: plant it where it is now")
        setattr(owner, name, replacement)
