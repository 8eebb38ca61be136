"""Real request traces, as files and as lists of block numbers in prompt order."""

from __future__ import annotations

import json
import lzma
from collections.abc import Iterator
from pathlib import Path

from kvtier.replay.trace import open_trace

TRACES = Path(__file__).parent / "data" / "traces"
CONVERSATION = TRACES / "mooncake_conversation.jsonl.xz"
"""Chat requests. Most blocks are used once; the rest within minutes."""
CODING_AGENTS = TRACES / "weka_claudecode_64slots_512.npz.xz"
"""Requests of coding agents. Long, and nearly all of it was sent before."""
CHATS = TRACES / "chats.jsonl"
"""A small invented trace."""
TOKENS_PER_BLOCK = 512


def conversation() -> list[list[int]]:
    """Independent of `kvtier.replay`, whose figures are compared with these."""
    requests = []
    with lzma.open(CONVERSATION, "rt") as lines:
        for line in lines:
            record = json.loads(line)
            num_full_blocks = record["input_length"] // TOKENS_PER_BLOCK
            requests.append(record["hash_ids"][:num_full_blocks])
    return requests


def coding_agents() -> Iterator[list[int]]:
    """The prompts of `CODING_AGENTS`."""
    with open_trace(str(CODING_AGENTS)) as trace:
        for request in trace.requests():
            yield [int.from_bytes(key[:8], "big") for key in request.keys]


def num_unique(requests: list[list[int]]) -> int:
    """How many different blocks there are."""
    return len(set().union(*requests))
