"""The state that the engine and the tiers of one life share."""

from __future__ import annotations

import random
import zlib
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field

from xxhash import xxh3_128_digest

from kvtier.base import OffloadKey, ReqContext
from tests.tiering.simulation.memory import Memory, SlotUses, Truth
from tests.tiering.simulation.violation import Witness
from tests.tiering.simulation.virtual_time import VirtualTime


@dataclass(slots=True)
class Promotion:
    """A load of one block that a tier has not reported yet."""

    job_id: int
    overdue_at: float
    num_resets: int


@dataclass(slots=True)
class GivenUp:
    """Blocks that came too late for a request: it must not be kept waiting for them."""

    keys: set[OffloadKey] = field(default_factory=set)
    step: int | None = None
    """The step in which it first asked again."""


@dataclass(slots=True)
class World:
    """One life: its randomness, its time, its memory, and what has happened so far."""

    rng: random.Random
    memory: Memory
    witness: Witness
    uses: SlotUses
    truth: Truth
    resets_change_weights: bool = True
    keeps_trace: bool = False
    scale: float = 1.0
    """The scale of the deadlines, in seconds."""
    time: VirtualTime = field(default_factory=VirtualTime)
    tally: Counter[str] = field(default_factory=Counter)
    version: int = 0
    """The version of the weights. Blocks of another version are wrong."""
    num_resets: int = 0
    step: int = 0
    step_began: float = 0.0
    last_submission: float = 0.0
    """When a tier was last given a job."""
    last_report: float = 0.0
    """When a tier last reported a job."""
    is_ending: bool = False
    """True while the manager shuts down."""
    is_offering_store: bool = False
    """True while the engine asks for slots to store blocks."""
    promoting: dict[OffloadKey, Promotion] = field(default_factory=dict)
    leases: dict[tuple[ReqContext, OffloadKey], float] = field(default_factory=dict)
    """Blocks brought up for a request in time, and until when they must stay there for it."""
    given_up: dict[ReqContext, GivenUp] = field(default_factory=dict)
    last_waits: dict[tuple[ReqContext, OffloadKey], int] = field(default_factory=dict)
    """The step in which a request last had to wait for a block."""
    num_waits: Counter[ReqContext] = field(default_factory=Counter)
    """How many waits each request has begun."""
    being_stored: Counter[OffloadKey] = field(default_factory=Counter)
    """Blocks on their way from the device: a wait for them is not a wait for a tier."""
    trace: list[str] = field(default_factory=list)
    digest: int = 0
    """A digest of all events. Equal lives have equal digests."""
    _versions: dict[bytes, int] = field(default_factory=dict)

    def fingerprint(self) -> bytes:
        """The fingerprint of the current weights."""
        made = xxh3_128_digest(b"weights" + self.version.to_bytes(4, "big"))
        self._versions[made] = self.version
        return made

    def version_of(self, fingerprint: bytes) -> int:
        """The version of the weights that a fingerprint stands for."""
        return self._versions[fingerprint]

    def expected(self, key: OffloadKey) -> bytes:
        """The bytes that a readable block must have now."""
        return self.truth.payload(key, self.version)

    def end_wait(self, context: ReqContext) -> None:
        """A request has loaded its blocks, or does not want them any more."""
        for lease in [lease for lease in self.leases if lease[0] is context]:
            del self.leases[lease]
        self.given_up.pop(context, None)
        self.num_waits[context] += 1

    def give_up(self, keys: Sequence[OffloadKey], context: ReqContext) -> None:
        """Blocks that a request waits for are late."""
        awaited = {k for k in keys if self.last_waits.get((context, k), -1) >= self.step - 1}
        self.given_up.setdefault(context, GivenUp()).keys.update(awaited)

    def must_not_wait(self, keys: Sequence[OffloadKey], context: ReqContext) -> bool:
        """True if a request asks again for a block that has missed its deadline."""
        late = self.given_up.get(context)
        if late is None:
            return False
        late.step = late.step or self.step
        if late.step < self.step:
            del self.given_up[context]
            return False
        return not late.keys.isdisjoint(keys) and not any(self.being_stored[key] for key in keys)

    def note(self, what: str) -> None:
        """Remember what happened."""
        self.digest = zlib.crc32(what.encode(), self.digest)
        if self.keeps_trace:
            self.trace.append(f"{self.time.now:12.6f} {what}")

    def happens(self, rate: float) -> bool:
        """True with this probability."""
        return rate > 0 and self.rng.random() < rate


def name(key: OffloadKey) -> str:
    """A key, short enough to be read."""
    return f"{key[:4].hex()}.{key[-1]}"
