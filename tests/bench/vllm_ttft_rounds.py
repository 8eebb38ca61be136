"""Runs stock vLLM with prompts from every source in turn, in a process that has vLLM.

Started by `tests.bench.vllm_ttft`, which asks for one engine after the other.
"""

from __future__ import annotations

import random
import shutil
import sys
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from kvtier.testing.vllm.in_process import BLOCK_TOKENS, InProcessEngine, contained_environment
from kvtier.testing.vllm.tiny_model import LLAMA, VOCABULARY
from tests.bench.worker import answer

DISK = "disk"
FS = "fs"
RECOMPUTED = "recomputed"
DEVICE = "device"
HOST = "host"
BELOW = "below"
"""The tier below host memory."""
SOURCES = (RECOMPUTED, DEVICE, HOST, BELOW)

PROMPT_TOKENS = 2_000
PROMPT_BLOCKS = PROMPT_TOKENS // BLOCK_TOKENS
"""Whole blocks of a prompt. The rest of the prompt is always computed."""
_SLOTS = PROMPT_BLOCKS * 3 // 2
_FILLERS = 2
"""Other prompts that displace one from host memory."""
_ANSWER_TOKENS = 4
_PATIENT = {"load_timeout_ms": 60_000, "store_timeout_ms": 60_000, "lookup_timeout_ms": 60_000}
"""Timeouts for engines without the guard: they measure how long a load takes, so no load may time
out."""


class Rounds:
    """Executes the commands of `tests.bench.vllm_ttft`."""

    def __init__(self, scratch: str) -> None:
        self._resources = ExitStack()
        folder = self._resources.enter_context(contained_environment())
        self._model = LLAMA.write(folder / "model")
        self._folder = Path(scratch) / "tier"
        self._prompts = _new_prompts()

    def run(self, what: dict[str, Any]) -> list[dict[str, Any]]:
        """Run one engine with an empty tier: some prompts, each from every source in turn."""
        shutil.rmtree(self._folder, ignore_errors=True)
        self._folder.mkdir()
        tier = self._tier(what["tier"])
        kvtier: dict[str, Any] = {
            "cpu_bytes_to_use": _SLOTS * LLAMA.bytes_per_block(BLOCK_TOKENS),
            "secondary_tiers": [tier if what["guard"] else tier | _PATIENT],
        }
        if not what["guard"]:
            kvtier["prefill_tokens_per_s"] = 0
        with InProcessEngine(
            self._model,
            kvtier,
            device_blocks=4 * PROMPT_BLOCKS,
            max_model_len=PROMPT_TOKENS + BLOCK_TOKENS,
        ) as engine:
            engine.generate("warm-up", next(self._prompts), _ANSWER_TOKENS)
            engine.settle()
            return [
                measured
                for number in range(what["prompts"])
                for measured in self._from_everywhere(engine, number)
            ]

    def _tier(self, kind: str) -> dict[str, Any]:
        place = (
            {"type": DISK, "path": str(self._folder / "kv.slab")}
            if kind == DISK
            else {"type": FS, "root_dir": str(self._folder)}
        )
        return place | {"max_bytes": "512MiB", "max_pinned_share": 1}

    def _from_everywhere(self, engine: InProcessEngine, number: int) -> Iterator[dict[str, Any]]:
        prompt = next(self._prompts)
        for source in SOURCES:
            if source == BELOW:
                for filler in range(_FILLERS):
                    name = f"filler-{number}-{filler}"
                    engine.generate(name, next(self._prompts), _ANSWER_TOKENS)
                    engine.settle()
            if source not in {RECOMPUTED, DEVICE}:
                engine.reset_device_cache()
            before = engine.figures()
            got = engine.generate(f"{source}-{number}", prompt, _ANSWER_TOKENS)
            engine.settle()
            after = engine.figures()
            yield {
                "source": source,
                "seconds": got.time_to_first_token,
                "tokens": got.tokens,
                "cached_tokens": got.cached_tokens,
                "blocks_from_host": _increase("cpu_loaded_blocks", before, after),
                "blocks_from_below": _increase("cpu_promoted_blocks", before, after),
            }

    def end(self) -> None:
        self._resources.close()


def _new_prompts() -> Iterator[list[int]]:
    """Prompts without a common prefix, the same in every run."""
    source = random.Random("time to first token")
    while True:
        yield [source.randrange(3, VOCABULARY) for _ in range(PROMPT_TOKENS)]


def _increase(name: str, before: dict[str, float], after: dict[str, float]) -> float:
    return after.get(name, 0) - before.get(name, 0)


if __name__ == "__main__":
    answer(Rounds, [sys.argv[1]], __doc__)
