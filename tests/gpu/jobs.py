"""Jobs, and their effect, page by page."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from tests.cpu.jobs import Part, SubmittedJob
from tests.gpu.cache_layout import Bytes, CacheLayout


@dataclass(frozen=True)
class Job(SubmittedJob):
    """A job, with its effect on the bytes."""

    def apply(self, layout: CacheLayout, rank: int, rows: Bytes, memory: Sequence[Bytes]) -> None:
        """Apply the job to these rows and allocations, as a worker should."""
        cell = rank * layout.cell_bytes
        for part in self.parts:
            if self.is_store:
                rows[part.slots, cell : cell + layout.cell_bytes] = 0
            head = part.first_index % layout.blocks_per_chunk
            for offset, block in enumerate(part.blocks, head):
                chunk, place = divmod(offset, layout.blocks_per_chunk)
                for tensor_idx, data_bytes in layout.groups[part.group_idx].items():
                    start = cell + layout.cell_offset(tensor_idx, place)
                    host = rows[part.slots[chunk], start : start + data_bytes]
                    device = layout.page(memory, tensor_idx, block)[:data_bytes]
                    if self.is_store:
                        host[:] = device
                    else:
                        device[:] = host


def store(blocks: Sequence[int], slots: Sequence[int]) -> Job:
    """A job of the only group of a layout."""
    return Job(True, [Part(0, 0, list(blocks), list(slots))])


def load(slots: Sequence[int], blocks: Sequence[int]) -> Job:
    return Job(False, [Part(0, 0, list(blocks), list(slots))])
