"""The `vllm` command in a process that has imported vLLM already."""

from __future__ import annotations

import sys


def run(package: str, *arguments: str) -> None:
    """What a shell would have run, up to its exit code. `package`: where the metadata is."""
    sys.path.append(package)
    sys.argv = ["vllm", *arguments]
    from vllm.entrypoints.cli.main import main

    sys.exit(main())
