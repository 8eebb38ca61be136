"""The demo, as a user runs it."""

from __future__ import annotations

from kvtier.integrations.vllm import demo


def exit_code_of(*options: str) -> int:
    """What it prints is on this process's standard output."""
    return demo.main(options)
