"""vLLM's example tier, for measurements."""

from __future__ import annotations

from typing import Any

from vllm.v1.kv_offload.tiering.example.manager import ExampleSecondaryTierManager


class WithholdingTier(ExampleSecondaryTierManager):  # type: ignore[misc]
    """Can keep to itself that a job has ended."""

    withholds = False

    def submit_store(self, job_metadata: Any) -> None:
        super().submit_store(job_metadata)
        if self.withholds:
            self.completed_jobs.pop()
