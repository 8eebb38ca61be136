"""A model under test."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from kvtier.testing.vllm.in_process import BLOCK_TOKENS
from kvtier.testing.vllm.tiny_model import TinyModel
from tests.e2e.vllm.reference import Reference


@dataclass(frozen=True, slots=True)
class Subject:
    """A model, its reference answers and its sizes."""

    tiny: TinyModel
    path: Path
    alone: Reference
    """The answers of vLLM without kvtier."""

    def slot_bytes(self, blocks_per_chunk: int = 1) -> int:
        """Bytes of one offloaded block in host memory."""
        return self.tiny.bytes_per_block(BLOCK_TOKENS) * blocks_per_chunk
