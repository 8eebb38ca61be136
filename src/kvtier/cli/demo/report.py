"""The report of the demo: its rows, and the checks of answers."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum
from statistics import median
from types import TracebackType
from typing import Protocol

from kvtier.cli.demo.server import Served
from kvtier.cli.demo.settings import DemoSettings, Prompt, reusable
from kvtier.engine import RequestResult

__all__ = [
    "LengthRow",
    "Moved",
    "Offloader",
    "OperatorLog",
    "PhaseRow",
    "References",
    "Report",
    "Source",
    "is_identical",
    "problem_of",
    "row_of",
]

References = Mapping[Prompt, Served]
"""The answers without offloading, by prompt."""
_LOGGER = logging.getLogger("kvtier")


@dataclass(frozen=True, slots=True)
class Moved:
    """Blocks that came from one place."""

    place: str
    blocks: int
    bytes: int


@dataclass(slots=True, kw_only=True)
class PhaseRow:
    """One phase: some prompts, all served in the same way."""

    name: str
    title: str
    prompts: int
    cold_s: float
    """Median time to the first token of the same prompts without offloading."""
    first_token_s: float
    """Median time to the first token in this phase."""
    is_warm: bool
    """False if every prompt had to be computed."""
    device: Moved
    host: Moved
    tiers: list[Moved]
    identical: bool
    """True if every token and logit equals that of a run without offloading."""
    problems: list[str] = field(default_factory=list)
    """One sentence for each different way in which a prompt's tokens came from a wrong place."""
    notes: list[str] = field(default_factory=list)

    @property
    def speed_up(self) -> float | None:
        """Cold time divided by warm time. None if nothing was reused."""
        return self.cold_s / self.first_token_s if self.is_warm else None


@dataclass(slots=True, kw_only=True)
class LengthRow:
    """Seconds to the first token of a prompt of one length, if the prompt is computed, loaded from
    host memory, or loaded from the disk tier. `host_s` and `tier_s` are medians."""

    tokens: int
    cold_s: float
    """Without offloading."""
    host_s: float
    tier_s: float
    identical: bool
    problems: list[str] = field(default_factory=list)

    @property
    def host_speed_up(self) -> float:
        """Cold time divided by the time from host memory."""
        return self.cold_s / self.host_s

    @property
    def tier_speed_up(self) -> float:
        """Cold time divided by the time from the disk tier."""
        return self.cold_s / self.tier_s


@dataclass(slots=True)
class Report:
    """The result of the demo."""

    settings: DemoSettings
    phases: list[PhaseRow] = field(default_factory=list)
    lengths: list[LengthRow] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)
    """Failures that ended the demo or a phase early."""
    seconds: float = 0.0

    @property
    def rows(self) -> list[PhaseRow | LengthRow]:
        """All rows whose answers were compared."""
        return [*self.phases, *self.lengths]

    @property
    def identical(self) -> bool:
        """True if every token and logit equals that of a run without offloading."""
        return all(row.identical for row in self.rows)

    @property
    def all_problems(self) -> list[str]:
        """The problems of all rows, each with its row's title, then those of the whole demo."""
        found = [f"{row.title}: {problem}" for row in self.phases for problem in row.problems]
        found += [f"{row.tokens} tokens: {text}" for row in self.lengths for text in row.problems]
        return found + self.problems

    @property
    def ok(self) -> bool:
        """True if the exit code is 0."""
        return self.identical and not self.all_problems

    @property
    def slow_lengths(self) -> list[int]:
        """Lengths at which loading from host memory, or loading from the disk tier, was not faster
        than computing. The speed depends on the machine, so a slow length is not a failure."""
        return [r.tokens for r in self.lengths if min(r.host_speed_up, r.tier_speed_up) <= 1]

    def as_json(self) -> dict[str, object]:
        """Return the report as plain data for JSON, with times in seconds."""
        return {
            "ok": self.ok,
            "identical": self.identical,
            "problems": self.all_problems,
            "seconds": round(self.seconds, 3),
            "settings": {
                "tokens": self.settings.tokens,
                "requests": self.settings.requests,
                "lengths": list(self.settings.lengths),
                "seed": self.settings.seed,
            },
            "phases": [
                {
                    "name": row.name,
                    "title": row.title,
                    "prompts": row.prompts,
                    "cold_s": row.cold_s,
                    "first_token_s": row.first_token_s,
                    "speed_up": row.speed_up,
                    "device": _moved(row.device),
                    "host": _moved(row.host),
                    "tiers": [{"tier": tier.place, **_moved(tier)} for tier in row.tiers],
                    "identical": row.identical,
                    "notes": row.notes,
                }
                for row in self.phases
            ],
            "lengths": [
                {
                    "tokens": row.tokens,
                    "cold_s": row.cold_s,
                    "host_s": row.host_s,
                    "tier_s": row.tier_s,
                    "host_speed_up": row.host_speed_up,
                    "tier_speed_up": row.tier_speed_up,
                    "identical": row.identical,
                }
                for row in self.lengths
            ],
        }


def _moved(moved: Moved) -> dict[str, object]:
    return {"blocks": moved.blocks, "bytes": moved.bytes}


class Source(Enum):
    """Where the reusable part of a prompt should come from."""

    COMPUTED = "computed"
    DEVICE = "the device cache"
    HOST = "host memory"
    TIER = "a tier"


class Offloader(Protocol):
    """The attributes of an offloading engine that `row_of` reads."""

    @property
    def block_bytes(self) -> int: ...

    @property
    def tier_types(self) -> Sequence[str]:
        """In lookup order."""


def is_identical(served: Served, references: References) -> bool:
    """True if the tokens equal those without offloading, and the logits do so to the last bit."""
    right = references[served.prompt].result
    return served.result.token_ids == right.token_ids and _bits(served.result) == _bits(right)


def _bits(result: RequestResult) -> list[bytes]:
    assert result.logits is not None
    return [logits.tobytes() for logits in result.logits]


def problem_of(served: Served, source: Source) -> str | None:
    """Describe where a prompt came from instead of `source`; None if it came from `source`."""
    result = served.result
    wanted = 0 if source is Source.COMPUTED else reusable(served.prompt)
    on_device = wanted if source is Source.DEVICE else 0
    found = (result.num_device_tokens, result.num_loaded_tokens)
    num_other_blocks = {
        Source.COMPUTED: served.host_blocks + sum(served.tier_blocks),
        Source.DEVICE: served.host_blocks + sum(served.tier_blocks),
        Source.HOST: sum(served.tier_blocks),
        Source.TIER: served.host_blocks,
    }[source]
    if found == (on_device, wanted - on_device) and not num_other_blocks:
        return None
    return (
        f"{wanted} tokens should have come from {source.value}"
        if wanted
        else "all tokens should have been computed"
    ) + (
        f", but {found[0]} came from the device cache and {found[1]} were loaded: "
        f"{served.host_blocks} blocks from host memory, {sum(served.tier_blocks)} from tiers"
    )


def row_of(
    name: str,
    title: str,
    all_served: Sequence[Served],
    references: References,
    engine: Offloader,
    source: Source | None,
) -> PhaseRow:
    """Return the row of one phase. `source`: where all prompts should come from; None if the caller
    checks that."""
    problems = []
    if source is not None:
        problems = [p for p in (problem_of(served, source) for served in all_served) if p]
    size = engine.block_bytes
    device, host = (
        sum(served.device_blocks for served in all_served),
        sum(served.host_blocks for served in all_served),
    )
    by_tier = [sum(blocks) for blocks in zip(*(s.tier_blocks for s in all_served), strict=True)]
    return PhaseRow(
        name=name,
        title=title,
        prompts=len(all_served),
        cold_s=median(references[served.prompt].first_token_s for served in all_served),
        first_token_s=median(served.first_token_s for served in all_served),
        is_warm=source is not Source.COMPUTED,
        device=Moved("device cache", device, device * size),
        host=Moved("host memory", host, host * size),
        tiers=[
            Moved(tier_type, blocks, blocks * size)
            for tier_type, blocks in zip(engine.tier_types, by_tier, strict=True)
        ],
        identical=all(is_identical(served, references) for served in all_served),
        problems=list(dict.fromkeys(problems)),
    )


class OperatorLog(logging.Handler):
    """A context that collects the warnings of kvtier for the report, and keeps them off the
    terminal."""

    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self._messages: list[str] = []
        self._propagated = True

    def __enter__(self) -> OperatorLog:
        self._propagated = _LOGGER.propagate
        _LOGGER.propagate = False
        _LOGGER.addHandler(self)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        _LOGGER.removeHandler(self)
        _LOGGER.propagate = self._propagated

    def emit(self, record: logging.LogRecord) -> None:
        """Keep a message. Called on any thread."""
        self._messages.append(record.getMessage())

    def take(self) -> list[str]:
        """Return the warnings since the last call."""
        messages, self._messages = self._messages, []
        return messages
