"""Makes the jobs that tiers are given."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from kvtier.tiering.base import TransferJob

if TYPE_CHECKING:
    from kvtier.base import OffloadKey, ReqContext
    from kvtier.cpu.common import CPULoadStoreSpec


class TransferFactory:
    """Numbers jobs, and gives each the namespace of its time. Scheduler thread only."""

    def __init__(self, fingerprint: bytes) -> None:
        self.fingerprint = fingerprint
        self.last_id = 0
        """The newest number."""

    def new_id(self) -> int:
        """A number that no other job has."""
        self.last_id += 1
        return self.last_id

    def make(
        self,
        job_id: int,
        keys: Sequence[OffloadKey],
        spec: CPULoadStoreSpec,
        is_promotion: bool,
        context: ReqContext,
    ) -> TransferJob:
        """The job, as a tier gets it."""
        block_ids = spec.block_ids
        block_ids.flags.writeable = False
        return TransferJob(job_id, keys, block_ids, is_promotion, context, self.fingerprint)
