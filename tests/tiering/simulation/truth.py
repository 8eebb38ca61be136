"""What one tier has really answered, stored and loaded, to compare with the manager's metrics."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any

from kvtier.base import LookupResult, OffloadKey
from kvtier.tiering.base import TransferJob

__all__ = ["Truth"]

_ANSWERS = {
    LookupResult.HIT: "lookup_hits",
    LookupResult.MISS: "lookup_misses",
    LookupResult.RETRY: "lookup_unknowns",
    LookupResult.HIT_PENDING: "lookup_unknowns",
}


class Truth:
    """The tier writes it; `counted` is what the manager has counted, by the names of
    `kvtier.tiering.metrics.COUNTED`."""

    def __init__(self, block_bytes: int) -> None:
        self.counted: Counter[str] = Counter()
        self._block_bytes = block_bytes
        self._real: Counter[str] = Counter()
        self._loaded_since: set[OffloadKey] = set()
        """Blocks that were loaded since they were stored."""

    def answered(self, answers: Any, num_keys: int) -> None:
        """The tier answers lookups of so many keys. The manager ignores what is no answer."""
        if (
            isinstance(answers, list)
            and len(answers) <= num_keys
            and all(isinstance(answer, LookupResult) for answer in answers)
        ):
            self._real.update(_ANSWERS[answer] for answer in answers)

    def refused(self, job: TransferJob) -> None:
        """The tier does not begin a job."""
        self.ended(job, ())

    def ended(self, job: TransferJob, moved: Sequence[OffloadKey]) -> None:
        """The manager learns that a job has ended, with these blocks."""
        real, direction = self._real, "load" if job.is_promotion else "store"
        done = "loaded" if job.is_promotion else "stored"
        real[f"{done}_blocks"] += len(moved)
        real[f"{done}_bytes"] += len(moved) * self._block_bytes
        real[f"failed_{direction}s"] += len(job.keys) - len(moved)
        real[f"failed_{direction}_jobs"] += len(moved) < len(job.keys)
        if job.is_promotion:
            num_first = len(set(moved) - self._loaded_since)
            self._loaded_since.update(moved)
            real["read_back_blocks"] += num_first
            real["read_back_bytes"] += num_first * self._block_bytes
        else:
            self._loaded_since.difference_update(moved)

    @property
    def num_compared(self) -> int:
        """How much there is to compare."""
        return self._real.total()

    def differences(self) -> dict[str, tuple[int, int]]:
        """Where the metrics are wrong: what was counted, and what is true."""
        names = {*self._real, *_ANSWERS.values()}
        return {
            name: (self.counted[name], self._real[name])
            for name in sorted(names)
            if self.counted[name] != self._real[name]
        }
