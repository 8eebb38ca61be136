"""A model under test."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from kvtier.integrations.vllm.in_process import BLOCK_TOKENS
from kvtier.integrations.vllm.tiny_model import TinyModel
from tests.e2e.vllm.reference import Reference


@dataclass(frozen=True, slots=True)
class Subject:
    """What tests need to know of it."""

    tiny: TinyModel
    path: Path
    alone: Reference
    """What vLLM makes of it without kvtier."""

    def slot_bytes(self, blocks_per_chunk: int = 1) -> int:
        """Of host memory, for one offloaded block."""
        return self.tiny.bytes_per_block(BLOCK_TOKENS) * blocks_per_chunk
