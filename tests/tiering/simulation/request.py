"""Requests of the simulated engine, and the prompts they share."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import Enum, auto
from hashlib import blake2b

from kvtier.base import OffloadKey, OffloadPolicy, ReqContext, make_offload_key
from kvtier.tiering.manager import GroupShape

TOKENS_PER_CHUNK = 16


@dataclass(frozen=True, slots=True)
class Group:
    """A KV-cache group: the chunks that a block spans, and its window in blocks."""

    index: int
    chunks_per_block: int = 1
    window_blocks: int | None = None
    is_known: bool = True
    """True if the manager knows in which direction it is looked up."""

    def shape(self) -> GroupShape:
        """The shape of the group, for the manager."""
        tokens = TOKENS_PER_CHUNK * self.chunks_per_block
        if not self.is_known:
            return GroupShape(tokens, is_uncertain=True)
        return GroupShape(tokens, self.window_blocks)

    def keys(self, chunks: Sequence[bytes]) -> list[OffloadKey]:
        """The blocks of a prompt, named after the last chunk in each."""
        size = self.chunks_per_block
        return [make_offload_key(chunk, self.index) for chunk in chunks[size - 1 :: size]]


class PromptTree:
    """Prompts are paths from a root, so many share a prefix."""

    def __init__(self, rng: random.Random, num_nodes: int, bushiness: float) -> None:
        """`bushiness`: near 0, the prompts are long; near 1, they are short and many."""
        self._paths: list[list[bytes]] = []
        for number in range(num_nodes):
            parent: list[bytes] = []
            if self._paths and rng.random() > bushiness / 4:
                recent = rng.random() > bushiness
                parent = self._paths[-1] if recent else rng.choice(self._paths)
            self._paths.append([*parent, _chunk(b"shared", number)])
        self._num_own = 0

    def prompt(self, rng: random.Random, num_own: int) -> list[bytes]:
        """One of the paths, followed by chunks of its own."""
        self._num_own += 1
        own = self._num_own * 64
        return [*rng.choice(self._paths), *(_chunk(b"own", own + i) for i in range(num_own))]


def _chunk(kind: bytes, number: int) -> bytes:
    return blake2b(kind + number.to_bytes(4, "big"), digest_size=8).digest()


class Phase(Enum):
    """The state of a request."""

    WAITING = auto()
    """It has no blocks on the device."""
    LOADING = auto()
    READY = auto()
    """It is loaded and can be scheduled."""
    RUNNING = auto()
    GONE = auto()


@dataclass(slots=True, eq=False)
class Request:
    """One request, as the engine knows it."""

    context: ReqContext
    chunks: list[bytes]
    groups: Sequence[Group]
    policy: OffloadPolicy
    keys: list[list[OffloadKey]] = field(init=False)
    """By group, in prompt order."""
    num_offered: list[int] = field(init=False)
    """By group: the number of blocks that were offered for storing."""
    first_on_device: list[int] = field(init=False)
    """By group: the first block that the device has; those before were not loaded."""
    phase: Phase = Phase.WAITING
    is_ending: bool = False
    is_aborted: bool = False
    has_begun: bool = False
    """True once it was scheduled."""
    num_computed: int = 0
    """Chunks that the device has."""
    version: int = -1
    """The version of the weights of the blocks on the device."""
    num_transfers: int = 0
    """Transfers whose end has not been reported."""
    waits_since: float | None = None
    waited: float = 0.0

    def __post_init__(self) -> None:
        self.keys = [group.keys(self.chunks) for group in self.groups]
        self.num_offered = [0] * len(self.groups)
        self.first_on_device = [0] * len(self.groups)

    def all_keys(self) -> list[OffloadKey]:
        """All blocks, in prompt order, group by group."""
        return [key for keys in self.keys for key in keys]

    def lose_device_blocks(self) -> None:
        """It was preempted."""
        self.phase = Phase.WAITING
        self.num_computed = 0
        self.version = -1
        self.first_on_device = [0] * len(self.groups)
        self.waits_since = None
