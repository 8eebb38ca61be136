"""An example tier that misbehaves in the way that a test chooses, while it runs."""

from __future__ import annotations

import time
from collections.abc import Iterable, Sequence
from typing import Any

from kvtier.base import LookupResult, OffloadKey, ReqContext
from kvtier.tiering.base import JobResult, TransferJob
from kvtier.tiering.example.io_thread import ExampleTransfer
from kvtier.tiering.example.manager import ExampleSecondaryTierManager

MOODY = {"type": "MoodyTier", "module_path": __name__, "max_blocks": 1000, "simulate_async": True}


class MoodyTier(ExampleSecondaryTierManager):
    """A tier that is good until it is told otherwise."""

    def __init__(self, *args: Any, **keys: Any) -> None:
        super().__init__(*args, **keys)
        self.answers_later = False
        """It does not know yet whether it has a block."""
        self.raises = False
        self.refuses_stores = False
        self.loses = False
        """It says that it has blocks, and cannot load them."""
        self.block_s = 0.0
        """Seconds that it takes to load a block."""
        self._stuck: list[JobResult] = []
        self.is_stuck = False
        """It reports no job."""

    def lookup(self, key: OffloadKey, req_context: ReqContext) -> LookupResult:
        if self.raises:
            raise OSError("the tier is moody")
        return LookupResult.RETRY if self.answers_later else super().lookup(key, req_context)

    def lookup_batch(
        self, keys: Sequence[OffloadKey], req_context: ReqContext
    ) -> Sequence[LookupResult]:
        if self.raises or self.answers_later:
            return [self.lookup(key, req_context) for key in keys]
        return super().lookup_batch(keys, req_context)

    def submit_store(self, job: TransferJob) -> None:
        if self.refuses_stores:
            self._results.append(JobResult(job.job_id, False, ()))
        else:
            super().submit_store(job)

    def get_finished_jobs(self) -> Iterable[JobResult]:
        self._stuck += super().get_finished_jobs()
        if self.is_stuck:
            return []
        finished, self._stuck = self._stuck, []
        return finished

    def _load_block(self, transfer: ExampleTransfer, key: OffloadKey, slot: int) -> bool:
        time.sleep(self.block_s)
        return not self.loses and super()._load_block(transfer, key, slot)
