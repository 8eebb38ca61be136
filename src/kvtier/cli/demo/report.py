"""What the demo has found out."""

from __future__ import annotations

from dataclasses import dataclass, field

from kvtier.cli.demo.settings import DemoSettings

__all__ = ["LengthRow", "Moved", "PhaseRow", "Report"]


@dataclass(frozen=True, slots=True)
class Moved:
    """What came from one place."""

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
    """Time to the first token, median, of the same prompts without offloading."""
    first_token_s: float
    """The same, in this phase."""
    is_warm: bool
    """Whether anything was to be reused."""
    device: Moved
    host: Moved
    tiers: list[Moved]
    identical: bool
    """Every token and logit."""
    problems: list[str] = field(default_factory=list)
    """What was not served from where it should have been."""
    notes: list[str] = field(default_factory=list)

    @property
    def speed_up(self) -> float | None:
        """How much sooner the first token was there."""
        return self.cold_s / self.first_token_s if self.is_warm else None


@dataclass(slots=True, kw_only=True)
class LengthRow:
    """Warm and cold at one prompt length. Times to the first token; the median, where several."""

    tokens: int
    cold_s: float
    """Without offloading."""
    host_s: float
    tier_s: float
    identical: bool
    problems: list[str] = field(default_factory=list)

    @property
    def host_speed_up(self) -> float:
        """How much sooner from host memory."""
        return self.cold_s / self.host_s

    @property
    def tier_speed_up(self) -> float:
        """How much sooner from the disk tier."""
        return self.cold_s / self.tier_s


@dataclass(slots=True)
class Report:
    """All of it."""

    settings: DemoSettings
    phases: list[PhaseRow] = field(default_factory=list)
    lengths: list[LengthRow] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)
    """What ended the demo before its time."""
    seconds: float = 0.0

    @property
    def rows(self) -> list[PhaseRow | LengthRow]:
        """Everything that was compared."""
        return [*self.phases, *self.lengths]

    @property
    def identical(self) -> bool:
        """Whether every token and logit was that of a run without offloading."""
        return all(row.identical for row in self.rows)

    @property
    def all_problems(self) -> list[str]:
        """With the row that each belongs to."""
        found = [f"{row.title}: {problem}" for row in self.phases for problem in row.problems]
        found += [f"{row.tokens} tokens: {text}" for row in self.lengths for text in row.problems]
        return found + self.problems

    @property
    def ok(self) -> bool:
        """What the exit code tells."""
        return self.identical and not self.all_problems

    @property
    def slow_lengths(self) -> list[int]:
        """Where warm was not sooner than cold. No failure: time depends on the machine."""
        return [r.tokens for r in self.lengths if min(r.host_speed_up, r.tier_speed_up) <= 1]

    def as_json(self) -> dict[str, object]:
        """Plain data. Times in seconds."""
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
