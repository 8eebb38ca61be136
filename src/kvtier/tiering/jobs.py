"""What the orchestrator remembers of a job that a tier has not reported yet."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from kvtier.tiering.base import TransferJob
    from kvtier.tiering.request import TierRequest


class JobCount(NamedTuple):
    """Of the jobs of all tiers. Another one whenever one has begun, ended or become late."""

    last_id: int
    """The newest number that was given to a job."""
    num_open: int
    """Those that a tier has not reported."""
    num_late: int
    """Of their blocks and stores, those that are late."""


class Job:
    """One job at one tier."""

    __slots__ = (
        "deadline",
        "is_awaited",
        "is_done",
        "is_late",
        "num_beside",
        "submitted",
        "transfer",
        "wanters",
    )

    def __init__(self, transfer: TransferJob, submitted: float, deadline: float) -> None:
        self.transfer = transfer
        self.submitted = submitted
        self.deadline = deadline
        self.is_awaited = True
        """Whether requests may wait for it; not for what only explores a tier."""
        self.is_late = False
        """Whether it has missed its deadline: nobody waits for it any more."""
        self.is_done = False
        self.num_beside = 0
        """Blocks that the tier had when it got this job: of a promotion, those of other promotions;
        of a store, those of all stores, this one's included."""
        self.wanters: dict[TierRequest, None] = {}
        """A promotion: the requests that wait for it."""
