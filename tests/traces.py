"""Real request traces, as lists of block numbers in prompt order."""

from __future__ import annotations

import io
import json
import lzma
from collections.abc import Iterator
from pathlib import Path

import numpy as np

TRACES = Path(__file__).parent / "data" / "traces"
TOKENS_PER_BLOCK = 512


def conversation() -> list[list[int]]:
    """Chat requests. Most blocks are used once; the rest within minutes."""
    requests = []
    with lzma.open(TRACES / "mooncake_conversation.jsonl.xz", "rt") as lines:
        for line in lines:
            record = json.loads(line)
            num_full_blocks = record["input_length"] // TOKENS_PER_BLOCK
            requests.append(record["hash_ids"][:num_full_blocks])
    return requests


def coding_agents() -> Iterator[list[int]]:
    """Requests of coding agents. Long, and nearly all of it was sent before."""
    with lzma.open(TRACES / "weka_claudecode_64slots_512.npz.xz") as archive:
        arrays = np.load(io.BytesIO(archive.read()))
    to_parent = arrays["dparent"].astype(np.int64)
    parent = (np.arange(len(to_parent)) - to_parent).tolist()
    is_root = (to_parent == 0).tolist()
    for leaf in arrays["leaf"].tolist():
        block = leaf
        prompt = [block]
        while not is_root[block]:
            block = parent[block]
            prompt.append(block)
        prompt.reverse()
        yield prompt


def num_unique(requests: list[list[int]]) -> int:
    """How many different blocks there are."""
    return len(set().union(*requests))
