"""An independent model of host memory over one tier: plain LRU, everything written through.

It keeps two ordered dictionaries, and follows the rules of docs/replay.md. It is exact while no
prompt has more than a quarter of host memory's blocks: beyond that, the orchestrator promotes only
as much of a prompt as leaves room for others.
"""

from __future__ import annotations

import json
import random
from collections import OrderedDict
from collections.abc import Collection, Iterable, Sequence
from pathlib import Path
from typing import Any

from kvtier.base import OffloadKey
from kvtier.replay.settings import ReplaySettings, TierSettings
from kvtier.replay.trace import Request
from tests.trace_replay import key_of

BLOCK_TOKENS = 512


class Lru:
    """A cache of keys. A prompt's last block is evicted before its first."""

    def __init__(self, capacity: int) -> None:
        self.capacity = capacity
        self.keys: OrderedDict[OffloadKey, None] = OrderedDict()
        self.num_written = 0

    def write(self, keys: Iterable[OffloadKey], protected: Collection[OffloadKey]) -> None:
        """Write the missing ones, and evict the oldest that are not protected."""
        for key in keys:
            if key not in self.keys:
                if len(self.keys) == self.capacity:
                    oldest = next(old for old in self.keys if old not in protected)
                    del self.keys[oldest]
                self.keys[key] = None
                self.num_written += 1

    def use(self, prompt: Sequence[OffloadKey]) -> None:
        for key in reversed(prompt):
            if key in self.keys:
                self.keys.move_to_end(key)


class Oracle:
    def __init__(self, host_blocks: int, tier_blocks: int) -> None:
        self.host, self.tier = Lru(host_blocks), Lru(tier_blocks)
        self.num_promoted = 0

    def serve(self, prompt: Sequence[OffloadKey]) -> tuple[int, int]:
        """The hits in host memory, and in the tier."""
        found: list[OffloadKey] = []
        promoted: list[OffloadKey] = []
        for key in prompt:
            if key not in self.host.keys:
                if key not in self.tier.keys:
                    break
                promoted.append(key)
            found.append(key)
        num_before = self.host.num_written
        self.host.write(promoted, found)
        self.num_promoted += self.host.num_written - num_before
        new = [key for key in prompt if key not in self.host.keys]
        self.host.write(new, prompt)
        self.host.use(prompt)
        self.tier.write(new, {*promoted, *new})
        self.tier.write(prompt, prompt)
        self.tier.use(prompt)
        return len(found) - len(promoted), len(promoted)


def some_requests(seed: int, count: int, longest: int) -> list[Request]:
    """Conversations that grow from turn to turn; some begin alike, and some are forgotten."""
    rng = random.Random(seed)
    new_block = iter(range(1 << 30))
    conversations: list[list[OffloadKey]] = [[]]
    requests = []
    now = 0.0
    for _ in range(count):
        now += rng.expovariate(1.0)
        prompt = rng.choice(conversations)
        if rng.random() < 0.3 or len(prompt) >= longest:
            prompt = prompt[: rng.randrange(len(prompt) + 1) // 2]
        grown = [*prompt, *(key_of(next(new_block)) for _ in range(rng.randint(0, 3)))][:longest]
        conversations.append(grown)
        del conversations[1 : -rng.randint(10, 40)]
        num_tokens = len(grown) * BLOCK_TOKENS + rng.randrange(BLOCK_TOKENS)
        requests.append(Request(now, num_tokens, rng.randint(0, 50), grown))
    return requests


def settings_for(host_blocks: int, *tier_blocks: int, **changes: Any) -> ReplaySettings:
    """Sizes in blocks, because each token has one byte."""
    policy = changes.pop("policy", "lru")
    given = {"kv_bytes_per_token": 1, "is_timed": False} | changes
    names = ["host", *(f"tier{n}" for n in range(len(tier_blocks)))]
    host, *tiers = (
        TierSettings(
            name=name,
            num_bytes=n * BLOCK_TOKENS,
            policy=policy,
            read_bytes_per_s=1e6,
            write_bytes_per_s=1e6,
        )
        for name, n in zip(names, (host_blocks, *tier_blocks), strict=True)
    )
    return ReplaySettings(host=host, tiers=tuple(tiers), **given)


def write_jsonl(path: Path, requests: Iterable[Request]) -> Path:
    """Write a trace in Mooncake's form."""
    with path.open("w") as lines:
        for request in requests:
            ids = [int.from_bytes(key[:8], "big") for key in request.keys]
            ids += [1 << 40] * (request.prompt_tokens % BLOCK_TOKENS > 0)
            record = {
                "timestamp": round(request.arrives_s * 1000),
                "input_length": request.prompt_tokens,
                "output_length": request.output_tokens,
                "hash_ids": ids,
            }
            lines.write(json.dumps(record) + "\n")
    return path
