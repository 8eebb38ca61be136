"""The `kvtier` command. Needs typer and rich, which the extra `cli` brings."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from importlib.util import find_spec

__all__ = ["main"]

_NEEDED = ("typer", "rich")


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command and return its exit code. `argv`: the arguments without the program's name;
    by default, those of this process."""
    missing = [name for name in _NEEDED if find_spec(name) is None]
    if missing:
        print(
            f"kvtier: the command needs {' and '.join(missing)}, not installed here. "
            f"Run: pip install {' '.join(_NEEDED)}",
            file=sys.stderr,
        )
        return 2
    from kvtier.cli.app import run

    return run(argv)
