"""The properties of a simulated tier, and the spec it is made with."""

from __future__ import annotations

from dataclasses import dataclass
from typing import cast

from kvtier.base import Locality, OffloadingSpec
from kvtier.config import OffloadingOptions
from kvtier.tiering.health import TierSettings
from tests.tiering.simulation.faults import Faults


@dataclass(frozen=True, slots=True, kw_only=True)
class TierTraits:
    """The properties of one tier."""

    character: str
    faults: Faults
    settings: TierSettings
    capacity: int
    """The most blocks that it keeps."""
    latency: float
    """The longest time of a sound job or answer, as a share of its deadline."""
    answers_at_once: bool = True
    remembers_answers: bool = True
    """False: it forgets an answer after the step in which it gave it."""
    is_shared: bool = False
    """True if other engines with the same weights store here too."""
    wants_whole_requests: bool = False
    has_own_batch: bool = False
    reports_lazily: bool = False
    """True if its report is an iterator, which may raise in the middle."""
    locality: Locality | None = None


class _Config:
    engine_id = "simulated"
    options = OffloadingOptions(cpu_bytes_to_use=1)

    def __init__(self, fingerprint: bytes) -> None:
        self._fingerprint = fingerprint

    def fingerprint(self) -> bytes:
        return self._fingerprint


class _Spec:
    def __init__(self, fingerprint: bytes) -> None:
        self.config = _Config(fingerprint)


def spec_of(fingerprint: bytes) -> OffloadingSpec:
    """The parts of a spec that a tier uses."""
    return cast(OffloadingSpec, _Spec(fingerprint))
