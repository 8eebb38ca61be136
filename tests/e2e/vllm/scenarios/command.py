"""The `vllm` command in a process that has imported vLLM already."""

from __future__ import annotations

import sys
import traceback


def run(package: str, *arguments: str) -> None:
    """Run the command as a shell would, and exit with its code. `package`: folder of the
    metadata."""
    sys.path.append(package)
    sys.argv = ["vllm", *arguments]
    try:
        from vllm.entrypoints.cli.main import main

        sys.exit(main())
    except Exception:
        # Ends the process, which would otherwise continue to serve calls.
        traceback.print_exc()
        sys.exit(1)
