"""`python -m kvtier.cli` is `kvtier`."""

from __future__ import annotations

from kvtier.cli import main

if __name__ == "__main__":
    raise SystemExit(main())
