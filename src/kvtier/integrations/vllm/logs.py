"""What kvtier says appears where vLLM's own log does."""

from __future__ import annotations

import logging

__all__ = ["speak_through_vllm"]


def speak_through_vllm() -> None:
    """Let kvtier log with vLLM's handlers and level, unless somebody has set it up otherwise.

    vLLM sets up logging for itself alone; of others only warnings would be seen, as bare sentences.
    """
    ours, theirs = logging.getLogger("kvtier"), logging.getLogger("vllm")
    if ours.handlers or ours.level != logging.NOTSET:
        return
    for handler in theirs.handlers:
        ours.addHandler(handler)
        ours.propagate = False
    ours.setLevel(theirs.level)
