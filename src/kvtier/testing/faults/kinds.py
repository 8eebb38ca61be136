"""Which faults there are, and which method of a tier can have which."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import TypeVar

from kvtier.testing.damage import Damage

__all__ = ["FAULTS_OF", "Fault", "FaultKind", "InjectedFault"]


Name = TypeVar("Name", bound=StrEnum)


class InjectedFault(Exception):
    """What a faulty tier raises."""


class FaultKind(StrEnum):
    """What goes wrong. A tier with none but the first two still keeps the contract."""

    DELAY = "delay"
    """A job is carried out at once and reported late; a lookup is answered RETRY."""
    REORDER = "reorder"
    """The results of one poll come in another order."""
    DROP = "drop"
    """A job is carried out (late, if the fault has a time) and never reported."""
    DUPLICATE = "duplicate"
    """A job is reported twice, the second time late if the fault has a time."""
    FAIL = "fail"
    """A job is carried out and reported as failed. A load leaves rubbish in its slots."""
    PARTIAL = "partial"
    """The same for a part of the job's blocks. One block has no part: it fails."""
    LATE_WRITE = "late_write"
    """A job is accepted, carried out long after it was submitted, and reported then."""
    HANG = "hang"
    """A job is accepted and neither carried out nor reported before `FaultyTier.recover`.
    `drain_jobs` and `shutdown` do not return before it."""
    RAISE = "raise"
    """The call raises and has no effect; only `shutdown` has."""
    RAISE_AFTER = "raise_after"
    """The job is accepted, carried out and reported, but its submission raised."""
    UNKNOWN_JOB = "unknown_job"
    """A job is reported that nobody submitted."""
    GARBAGE = "garbage"
    """The call answers with something of another type. Nothing that it had to say is lost."""
    CORRUPT = "corrupt"
    """A kept block of the load is damaged before it is read."""


_JOB_FAULTS = frozenset(
    {
        FaultKind.DELAY,
        FaultKind.DROP,
        FaultKind.DUPLICATE,
        FaultKind.FAIL,
        FaultKind.PARTIAL,
        FaultKind.LATE_WRITE,
        FaultKind.HANG,
        FaultKind.RAISE,
        FaultKind.RAISE_AFTER,
    }
)
_LOOKUP_FAULTS = frozenset({FaultKind.DELAY, FaultKind.RAISE, FaultKind.GARBAGE})
_ANSWER_FAULTS = frozenset({FaultKind.RAISE, FaultKind.GARBAGE})
_RAISE = frozenset({FaultKind.RAISE})
_END_FAULTS = frozenset({FaultKind.RAISE, FaultKind.HANG})

FAULTS_OF: dict[str, frozenset[FaultKind]] = {
    "lookup": _LOOKUP_FAULTS,
    "lookup_batch": _LOOKUP_FAULTS,
    "submit_store": _JOB_FAULTS,
    "submit_load": _JOB_FAULTS | {FaultKind.CORRUPT},
    "get_finished_jobs": _ANSWER_FAULTS | {FaultKind.REORDER, FaultKind.UNKNOWN_JOB},
    "drain_jobs": _END_FAULTS,
    "touch": _RAISE,
    "missing": _ANSWER_FAULTS,
    "on_new_request": _ANSWER_FAULTS,
    "on_request_finished": _RAISE,
    "on_schedule_end": _RAISE,
    "has_pending_work": _ANSWER_FAULTS,
    "take_events": _ANSWER_FAULTS,
    "get_stats": _ANSWER_FAULTS,
    "begin_epoch": _RAISE,
    "take_seal_failures": _ANSWER_FAULTS,
    "shutdown": _END_FAULTS,
}
"""Every method of a tier that can go wrong, and how."""


@dataclass(frozen=True, slots=True)
class Fault:
    """One fault: at which call of which method, and what."""

    method: str
    call: int
    """The number of the call of this method, from 0."""
    kind: FaultKind
    """Or its name."""
    polls: int = 0
    """What comes late comes after so many calls of `get_finished_jobs` ..."""
    seconds: float = 0.0
    """... and after so much time by the schedule's clock."""
    damage: Damage = Damage.FLIP
    """For CORRUPT."""

    def __post_init__(self) -> None:
        # By name they compare equal, but are not the same: such a fault would never happen.
        object.__setattr__(self, "kind", _member(FaultKind, "kind", self.kind))
        object.__setattr__(self, "damage", _member(Damage, "damage", self.damage))
        allowed = FAULTS_OF.get(self.method)
        if allowed is None:
            raise ValueError(f"method {self.method!r}: choose one of {', '.join(FAULTS_OF)}")
        if self.kind not in allowed:
            raise ValueError(
                f"a fault {str(self.kind)!r} of {self.method}: it can have "
                f"{', '.join(sorted(allowed))}"
            )


def _member(names: type[Name], what: str, given: str) -> Name:
    try:
        return names(given)
    except ValueError:
        raise ValueError(f"{what} {given!r}: choose one of {', '.join(names)}") from None
