"""An engine over a tier that can be made to stop answering, or to block its callers."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, Literal

from kvtier.base import LookupResult, MetricDefinition, OffloadKey, ReqContext
from kvtier.testing import FaultyTier
from kvtier.tiering.base import TransferJob
from kvtier.tiering.example.manager import ExampleSecondaryTierManager
from tests.e2e.vllm.scenarios.engine import Engine

if TYPE_CHECKING:
    from kvtier.base import OffloadingSpec

FAILING_TIER = {"type": "FailingTier", "module_path": "tests.e2e.vllm.scenarios.failing_tier"}
"""Keys of such a tier."""

Trouble = Literal["answers nothing", "moves nothing", "blocks its callers"]

_BLOCKED_S = 0.15
"""Seconds: longer than a tier may block the scheduler."""


class FailingTier(FaultyTier):
    """The example tier with a switch for its faults."""

    last: FailingTier
    """The tier of the engine in this process."""
    trouble: Trouble | None = None

    def __init__(
        self, offloading_spec: OffloadingSpec, primary_kv_view: memoryview, tier_type: str
    ) -> None:
        super().__init__(ExampleSecondaryTierManager(offloading_spec, primary_kv_view, tier_type))
        FailingTier.last = self

    @classmethod
    def build_metric_definitions(
        cls, tier_options: Mapping[str, Any]
    ) -> dict[str, MetricDefinition]:
        return ExampleSecondaryTierManager.build_metric_definitions(tier_options)

    def lookup(self, key: OffloadKey, req_context: ReqContext) -> LookupResult:
        self._block_if_told()
        return super().lookup(key, req_context)

    def lookup_batch(
        self, keys: Sequence[OffloadKey], req_context: ReqContext
    ) -> Sequence[LookupResult]:
        self._block_if_told()
        return super().lookup_batch(keys, req_context)

    def _block_if_told(self) -> None:
        if self.trouble == "blocks its callers":
            time.sleep(_BLOCKED_S)

    def submit_store(self, job: TransferJob) -> None:
        if self.trouble == "moves nothing":
            self._jobs.hang(job)
        else:
            super().submit_store(job)

    def submit_load(self, job: TransferJob) -> None:
        if self.trouble == "moves nothing":
            self._jobs.hang(job)
        else:
            super().submit_load(job)


class EngineOverFailingTier(Engine):
    """An engine with such a tier."""

    def get_into(self, trouble: Trouble) -> None:
        FailingTier.last.trouble = trouble
        if trouble == "answers nothing":
            FailingTier.last.go_dark()

    def recover(self) -> None:
        """Carry out the calls that hung, long after their deadlines."""
        FailingTier.last.trouble = None
        FailingTier.last.recover()
