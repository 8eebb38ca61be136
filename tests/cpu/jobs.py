"""Jobs for a worker, right ones and wrong ones."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from kvtier.base import GPULoadStoreSpec, OffloadingWorker
from kvtier.cpu.common import CPULoadStoreSpec

BAD_SPECS_SLOTS, BAD_SPECS_BLOCKS = 6, 12
BAD_SPECS = {
    "a slot that does not exist": ([1, 2], [2], [0], [0, -1]),
    "a slot behind the last": ([1, 2], [2], [0], [0, BAD_SPECS_SLOTS]),
    "a block that does not exist": ([1, -1], [2], [0], [0, 1]),
    "a block behind the last": ([1, BAD_SPECS_BLOCKS], [2], [0], [0, 1]),
    "too few slots": ([1, 2], [2], [0], [0]),
    "too many slots": ([1], [1], [0], [0, 1]),
    "a group too many": ([1, 2], [1, 1], [0, 0], [0, 1]),
    "no groups": ([], [], [], []),
}
"""Blocks, group sizes, block indices and slots of jobs of one group, for the given numbers of slots
and blocks."""


class HasGroups(Protocol):
    @property
    def groups(self) -> Sequence[dict[int, int]]:
        """For each group, the tensors it uses and the bytes of data in their pages."""


@dataclass(frozen=True)
class Part:
    """One group's part of a job: consecutive blocks of a request, and their slots."""

    group_idx: int
    first_index: int
    blocks: list[int]
    slots: list[int]


@dataclass(frozen=True)
class SubmittedJob:
    """A job without its effect."""

    is_store: bool
    parts: list[Part]

    def specs(self) -> tuple[GPULoadStoreSpec, CPULoadStoreSpec]:
        device = GPULoadStoreSpec(
            [block for part in self.parts for block in part.blocks],
            [len(part.blocks) for part in self.parts],
            [part.first_index for part in self.parts],
        )
        return device, CPULoadStoreSpec([slot for part in self.parts for slot in part.slots])

    def submit(self, worker: OffloadingWorker, job_id: int) -> bool:
        device, slots = self.specs()
        if self.is_store:
            return worker.submit_store(job_id, device, slots)
        return worker.submit_load(job_id, slots, device)

    def size(self, layout: HasGroups) -> int:
        return sum(
            len(part.blocks) * sum(layout.groups[part.group_idx].values()) for part in self.parts
        )
