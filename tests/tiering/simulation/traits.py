"""What a simulated tier is like, and what it is made with."""

from __future__ import annotations

from dataclasses import dataclass
from typing import cast

from kvtier.base import Locality, OffloadingSpec
from kvtier.tiering.health import TierSettings
from tests.tiering.simulation.faults import Faults


@dataclass(frozen=True, slots=True, kw_only=True)
class TierTraits:
    """One tier's nature."""

    character: str
    faults: Faults
    settings: TierSettings
    capacity: int
    """Blocks that it keeps at most."""
    latency: float
    """What a job or an answer takes at most, as a share of its deadline, if nothing is wrong."""
    answers_at_once: bool = True
    remembers_answers: bool = True
    """Otherwise what it has found out is forgotten after the step in which it told."""
    is_shared: bool = False
    """Whether other engines with the same weights store here too."""
    wants_whole_requests: bool = False
    has_own_batch: bool = False
    reports_lazily: bool = False
    """Whether its report is an iterator, which may raise in the middle."""
    locality: Locality | None = None


class _Config:
    engine_id = "simulated"

    def __init__(self, fingerprint: bytes) -> None:
        self._fingerprint = fingerprint

    def fingerprint(self) -> bytes:
        return self._fingerprint


class _Spec:
    def __init__(self, fingerprint: bytes) -> None:
        self.config = _Config(fingerprint)


def spec_of(fingerprint: bytes) -> OffloadingSpec:
    """As much of a spec as a tier looks at."""
    return cast(OffloadingSpec, _Spec(fingerprint))
