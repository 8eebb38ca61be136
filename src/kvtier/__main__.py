"""`python -m kvtier`: the `kvtier` command, where it is not on the path."""

from __future__ import annotations

from kvtier.cli import main

if __name__ == "__main__":
    raise SystemExit(main())
