"""The `vllm` command in a process that has imported vLLM already."""

from __future__ import annotations

import sys
import traceback


def run(package: str, *arguments: str) -> None:
    """What a shell would have run, up to its exit code. `package`: where the metadata is."""
    sys.path.append(package)
    sys.argv = ["vllm", *arguments]
    try:
        from vllm.entrypoints.cli.main import main

        sys.exit(main())
    except Exception:
        # Whoever serves calls would live on.
        traceback.print_exc()
        sys.exit(1)
