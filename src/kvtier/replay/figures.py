"""What a replay has counted and timed."""

from __future__ import annotations

from dataclasses import dataclass, field, fields
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from kvtier.replay.settings import FleetSettings

__all__ = [
    "EngineFigures",
    "Figures",
    "FleetFigures",
    "GpuFigures",
    "PlaceFigures",
    "PoolFigures",
    "Timing",
]


@dataclass(slots=True)
class PlaceFigures:
    """Host memory, or one tier below it."""

    name: str
    policy: str
    capacity_blocks: int
    write_policy: str | None = None
    """The name of a tier's write policy; None for host memory."""
    hit_blocks: int = 0
    """Blocks of prompts that were found here, and in no place above."""
    written_blocks: int = 0
    """Blocks written: into host memory by the engine, into a tier from host memory."""
    promoted_blocks: int = 0
    """Blocks that tiers have written into host memory."""
    read_blocks: int = 0
    """Blocks read back: from host memory by the engine, from a tier into host memory."""
    evicted_blocks: int = 0
    refused_blocks: int = 0
    """Blocks that were not written, because there was no room or the place was too slow."""
    left_out_blocks: int = 0
    """Blocks that left host memory unwritten, because the write policy decided so."""
    unwritten_blocks: int = 0
    """Blocks that left host memory before the write policy could write them."""
    over_budget_blocks: int = 0
    """Blocks that were not written, because the write budget was used up."""
    declined_blocks: int = 0
    """Blocks found here that were computed, because that was expected to be faster."""

    def add(self, other: PlaceFigures) -> None:
        """Add the counts of the same place of another engine."""
        for name in _COUNTS:
            setattr(self, name, getattr(self, name) + getattr(other, name))

    def document(self, num_references: int, block_bytes: int) -> dict[str, Any]:
        return {
            "name": self.name,
            "policy": self.policy,
            "write_policy": self.write_policy,
            "capacity_blocks": self.capacity_blocks,
            "capacity_bytes": self.capacity_blocks * block_bytes,
            "hit_blocks": self.hit_blocks,
            "hit_percent": _percent(self.hit_blocks, num_references),
            "written_bytes": self.written_blocks * block_bytes,
            "promoted_bytes": self.promoted_blocks * block_bytes,
            "read_bytes": self.read_blocks * block_bytes,
            "written_per_read": self.written_per_read,
            "evicted_blocks": self.evicted_blocks,
            "refused_blocks": self.refused_blocks,
            "left_out_blocks": self.left_out_blocks,
            "unwritten_blocks": self.unwritten_blocks,
            "over_budget_blocks": self.over_budget_blocks,
            "declined_blocks": self.declined_blocks,
        }

    @property
    def written_per_read(self) -> float | None:
        """Bytes written per byte read back; None if nothing was read back."""
        return round(self.written_blocks / self.read_blocks, 4) if self.read_blocks else None


_COUNTS = [field.name for field in fields(PlaceFigures) if field.default == 0]


@dataclass(slots=True)
class GpuFigures:
    """The engine's own cache in device memory."""

    capacity_blocks: int
    hit_blocks: int = 0
    """Blocks of prompts that were found here, and not asked of tiers."""
    evicted_blocks: int = 0


@dataclass(slots=True)
class Timing:
    """Times by the cost model. Virtual seconds."""

    first_token_s: list[float] = field(default_factory=list)
    """From the arrival of each request to its first token."""
    seconds: float = 0.0
    """From the first arrival to the last token."""
    busy_s: float = 0.0
    """Of these, the seconds in which the engine computed or decoded."""
    prompt_tokens: int = 0
    output_tokens: int = 0
    """Tokens of requests that have ended."""

    @property
    def p90_s(self) -> float:
        """The time to first token that nine of ten requests stay below."""
        return float(np.percentile(self.first_token_s or [0.0], 90))

    def document(self) -> dict[str, Any]:
        ttft = np.array(self.first_token_s or [0.0])
        p50, p99 = np.percentile(ttft, [50, 99]).tolist()
        seconds = self.seconds or 1.0
        return {
            "answered": len(self.first_token_s),
            "ttft_s": {
                "mean": round(float(ttft.mean()), 6),
                "p50": round(p50, 6),
                "p90": round(self.p90_s, 6),
                "p99": round(p99, 6),
            },
            "virtual_seconds": round(self.seconds, 3),
            "busy_percent": _percent(self.busy_s, self.seconds),
            "requests_per_s": round(len(self.first_token_s) / seconds, 4),
            "prompt_tokens_per_s": round(self.prompt_tokens / seconds, 1),
            "output_tokens_per_s": round(self.output_tokens / seconds, 1),
        }


@dataclass(frozen=True, slots=True)
class EngineFigures:
    """One engine of a fleet."""

    num_requests: int
    hit_percent: float
    busy_s: float | None
    received_bytes: int
    sent_bytes: int
    """Over its link to shared tiers, by direction."""


@dataclass(frozen=True, slots=True)
class PoolFigures:
    """A tier that the engines of a fleet share. Blocks, with all their copies where not said."""

    name: str
    sharing: str
    replicas: int
    room_blocks: int
    read_blocks: int
    foreign_blocks: int
    """Of the blocks read, those that another engine had stored."""
    local_blocks: int
    """Of the blocks read, those that were in memory which the reader itself lends."""
    lost_blocks: int
    """Blocks whose last copy was lost when an engine died."""

    def document(self, block_bytes: int) -> dict[str, Any]:
        return {
            "name": self.name,
            "sharing": self.sharing,
            "replicas": self.replicas,
            "room_bytes": self.room_blocks * block_bytes,
            "read_bytes": self.read_blocks * block_bytes,
            "foreign_bytes": self.foreign_blocks * block_bytes,
            "local_bytes": self.local_blocks * block_bytes,
            "lost_blocks": self.lost_blocks,
        }


@dataclass(frozen=True, slots=True)
class FleetFigures:
    """What `Figures` do not say of several engines."""

    settings: FleetSettings
    common_references_percent: float
    """The share of the blocks of prompts that are the same in all copies of the trace."""
    num_rerouted: int
    """Requests that were under way on an engine that died, and began anew on another."""
    seconds: float | None
    """Virtual seconds from the first arrival to the last token; None without time."""
    engines: list[EngineFigures]
    pools: list[PoolFigures]
    kept_blocks: int
    """At the end, in all host memories and tiers, with all copies."""
    distinct_blocks: int
    """How many different ones these are."""
    host_blocks: int
    distinct_host_blocks: int
    """The same for host memories alone."""

    @property
    def link_bytes(self) -> int:
        """Bytes that engines have received or sent over their links. What goes from one to another
        counts twice, once on each link."""
        return sum(engine.received_bytes + engine.sent_bytes for engine in self.engines)

    @property
    def busiest_link_bytes(self) -> int:
        """The most bytes over one link in one direction."""
        return max(max(engine.received_bytes, engine.sent_bytes) for engine in self.engines)

    def per_second(self, num_bytes: float) -> float | None:
        return num_bytes / self.seconds if self.seconds else None

    def document(self, block_bytes: int) -> dict[str, Any]:
        settings, count = self.settings, len(self.engines)
        rates = {
            "link_bytes_per_s": self.per_second(self.link_bytes),
            "link_bytes_per_s_per_engine": self.per_second(self.link_bytes / count),
            "busiest_link_bytes_per_s": self.per_second(self.busiest_link_bytes),
        }
        return {
            "engines": count,
            "router": str(settings.router),
            "copies": settings.copies,
            "common_percent": settings.common_percent,
            "common_references_percent": round(self.common_references_percent, 4),
            "failures": len(settings.failures),
            "rerouted_requests": self.num_rerouted,
            "link_bytes": self.link_bytes,
            **{name: None if rate is None else round(rate, 1) for name, rate in rates.items()},
            "kept_bytes": self.kept_blocks * block_bytes,
            "duplicate_bytes": (self.kept_blocks - self.distinct_blocks) * block_bytes,
            "duplicate_host_bytes": (self.host_blocks - self.distinct_host_blocks) * block_bytes,
            "pools": [pool.document(block_bytes) for pool in self.pools],
            "by_engine": [
                {
                    "requests": engine.num_requests,
                    "hit_percent": engine.hit_percent,
                    "busy_percent": None
                    if engine.busy_s is None
                    else _percent(engine.busy_s, self.seconds or 0.0),
                    "received_bytes": engine.received_bytes,
                    "sent_bytes": engine.sent_bytes,
                }
                for engine in self.engines
            ],
        }


@dataclass(slots=True)
class Figures:
    """All figures of one replay."""

    block_tokens: int
    block_bytes: int
    places: list[PlaceFigures]
    """Host memory, then the tiers in the order in which they are asked."""
    gpu: GpuFigures | None = None
    """The engine's own cache, if it is simulated."""
    num_requests: int = 0
    num_references: int = 0
    """Blocks of all prompts."""
    prompt_tokens: int = 0
    trace_s: float = 0.0
    """From the first arrival to the last, in seconds of the replay."""
    timing: Timing | None = None
    fleet: FleetFigures | None = None
    """None: there was one engine only. Otherwise, all other figures are those of all engines."""
    is_complete: bool = True
    """False if the user has ended the replay early."""

    @property
    def hit_blocks(self) -> int:
        in_tiers = sum(place.hit_blocks for place in self.places)
        return in_tiers + (0 if self.gpu is None else self.gpu.hit_blocks)

    @property
    def hit_percent(self) -> float:
        return _percent(self.hit_blocks, self.num_references)

    @property
    def saved_tokens(self) -> int:
        """Prompt tokens that were not computed."""
        return self.hit_blocks * self.block_tokens

    def note_lookup(
        self, num_blocks: int, prompt_tokens: int, hits: list[int], num_gpu_hits: int = 0
    ) -> None:
        """A request was looked up. `hits`: by place."""
        if self.gpu is not None:
            self.gpu.hit_blocks += num_gpu_hits
        self.num_requests += 1
        self.num_references += num_blocks
        self.prompt_tokens += prompt_tokens
        for place, count in zip(self.places, hits, strict=True):
            place.hit_blocks += count

    def document(self) -> dict[str, Any]:
        """Everything, for JSON."""
        computed = self.num_references - self.hit_blocks
        return {
            "complete": self.is_complete,
            "requests": self.num_requests,
            "trace_seconds": round(self.trace_s, 3),
            "block_references": self.num_references,
            "block_tokens": self.block_tokens,
            "block_bytes": self.block_bytes,
            "hit_blocks": self.hit_blocks,
            "hit_percent": self.hit_percent,
            "computed_blocks": computed,
            "computed_percent": _percent(computed, self.num_references),
            "prompt_tokens": self.prompt_tokens,
            "saved_tokens": self.saved_tokens,
            "saved_tokens_percent": _percent(self.saved_tokens, self.prompt_tokens),
            "gpu": self._gpu_document(),
            "tiers": [
                place.document(self.num_references, self.block_bytes) for place in self.places
            ],
            "timing": None if self.timing is None else self.timing.document(),
            "fleet": None if self.fleet is None else self.fleet.document(self.block_bytes),
        }

    def _gpu_document(self) -> dict[str, Any] | None:
        gpu = self.gpu
        if gpu is None:
            return None
        return {
            "capacity_blocks": gpu.capacity_blocks,
            "capacity_bytes": gpu.capacity_blocks * self.block_bytes,
            "hit_blocks": gpu.hit_blocks,
            "hit_percent": _percent(gpu.hit_blocks, self.num_references),
            "evicted_blocks": gpu.evicted_blocks,
        }


def _percent(part: float, whole: float) -> float:
    return round(100 * part / whole, 4) if whole else 0.0
