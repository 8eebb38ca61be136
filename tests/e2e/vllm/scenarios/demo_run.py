"""The demo, as a user runs it."""

from __future__ import annotations

from kvtier.testing.vllm import demo


def exit_code_of(*options: str) -> int:
    """Run the demo; it prints to this process's standard output."""
    return demo.main(options)
