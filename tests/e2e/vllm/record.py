"""Records the calls of stock vLLM to a kvtier manager, scenario by scenario.

    PYTHON-WITH-VLLM -m tests.e2e.vllm.record [SCENARIO ...]

Writes `tests/data/vllm_calls/*.jsonl`, the same bytes at every run with the same vLLM and kvtier;
the README there says what each scenario shows.
"""

from __future__ import annotations

import argparse
import os
import random
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from kvtier.testing.vllm.in_process import (
    BLOCK_TOKENS,
    InProcessEngine,
    contained_environment,
)
from kvtier.testing.vllm.tiny_model import GEMMA3_HYBRID, LLAMA, VOCABULARY, TinyModel
from tests import vllm_calls
from tests.arguments import one_of

POLICY = "lru"


@dataclass(frozen=True, slots=True)
class Scenario:
    """One engine and its requests."""

    drive: Callable[[InProcessEngine], None]
    num_blocks: int = 256
    """Slots of the primary tier."""
    late_by: int = 1
    """Polls before the worker reports the end of a transfer."""
    blocks_per_chunk: int = 1
    model: TinyModel = LLAMA
    offload_prompt_only: bool = True
    engine_args: dict[str, Any] = field(default_factory=dict)


class Prompts:
    """Random prompts, counted in blocks; the same at every run."""

    def __init__(self) -> None:
        self._source = random.Random(0)

    def new(self, blocks: float, prefix: Sequence[int] = ()) -> list[int]:
        """`prefix`, followed by the given number of blocks."""
        length = int(blocks * BLOCK_TOKENS)
        return [*prefix, *(self._source.randrange(3, VOCABULARY) for _ in range(length))]


def _steps(engine: InProcessEngine, count: int) -> None:
    for _ in range(count):
        engine.step()


def plain(engine: InProcessEngine) -> None:
    """Computed; from the device cache; after a device reset from host memory, whole and in part."""
    prompts = Prompts()
    texts = [prompts.new(20.3) for _ in range(3)]
    for index, text in enumerate(texts):
        engine.generate(f"cold-{index}", text)
    engine.settle()
    engine.generate("from-device", texts[0])
    engine.settle()
    engine.reset_device_cache()
    for index, text in enumerate(texts):
        engine.generate(f"warm-{index}", text)
    engine.settle()
    engine.reset_device_cache()
    engine.generate("longer", prompts.new(9.5, prefix=texts[1]))
    engine.generate("branch", prompts.new(8, prefix=texts[2][: 10 * BLOCK_TOKENS]))
    engine.settle()


def aborts(engine: InProcessEngine) -> None:
    """Aborted by the client: in the queue, while computing, while generating, while loading."""
    prompts = Prompts()
    texts = [prompts.new(24.5) for _ in range(4)]
    for index, text in enumerate(texts):
        engine.add(f"cold-{index}", text, max_tokens=8)
    _steps(engine, 1)
    engine.abort("cold-3")  # in the queue
    _steps(engine, 1)
    engine.abort("cold-0")  # half computed
    _steps(engine, 4)
    engine.abort("cold-1")  # generating, or about to
    engine.run()
    engine.settle()
    for index, text in enumerate(texts):
        engine.generate(f"again-{index}", text)
    engine.settle()
    engine.reset_device_cache()
    for index, text in enumerate(texts):
        engine.add(f"warm-{index}", text, max_tokens=4)
    _steps(engine, 1)
    engine.abort("warm-0")  # loading, and reported only later
    _steps(engine, 1)
    engine.abort("warm-1")
    engine.run()
    engine.settle()
    engine.reset_device_cache()
    engine.add("last", texts[0], max_tokens=4)
    _steps(engine, 1)
    engine.abort("last")
    engine.settle()


def preemption(engine: InProcessEngine) -> None:
    """The device is too small for all requests; generated tokens are offloaded too."""
    prompts = Prompts()
    texts = [prompts.new(8.5) for _ in range(5)]
    for index, text in enumerate(texts):
        engine.add(f"cold-{index}", text, max_tokens=5 * BLOCK_TOKENS)
    engine.run()
    engine.settle()
    engine.reset_device_cache()
    for index, text in enumerate(texts):
        answer = engine.answer(f"cold-{index}").tokens
        engine.add(
            f"second-turn-{index}", [*text, *answer, *prompts.new(1)], max_tokens=BLOCK_TOKENS
        )
    engine.run()
    engine.settle()


def resets(engine: InProcessEngine) -> None:
    """`reset_cache` with stores under way, with loads under way, with preemption, and when idle."""
    prompts = Prompts()
    texts = [prompts.new(16.3) for _ in range(4)]
    for index, text in enumerate(texts[:3]):
        engine.add(f"stores-{index}", text, max_tokens=12)
    _steps(engine, 4)
    engine.reset_all()
    _steps(engine, 2)
    engine.reset_all(running=True)
    engine.run()
    engine.settle()

    engine.reset_device_cache()
    for index, text in enumerate(texts):
        engine.add(f"loads-{index}", text, max_tokens=4)
    _steps(engine, 1)
    engine.reset_all()
    engine.run()
    engine.settle()

    engine.generate("ended", texts[3])
    engine.reset_all()  # its last store has not left yet
    engine.generate("after", texts[3])
    engine.settle()
    engine.reset_all()
    engine.reset_all()
    engine.generate("last", texts[0])
    engine.settle()


def shared_prefix(engine: InProcessEngine) -> None:
    """Requests with a common prefix: computed, stored and loaded together."""
    prompts = Prompts()
    beginning = prompts.new(16)
    texts = [prompts.new(4.5, prefix=beginning) for _ in range(5)]
    for index, text in enumerate(texts):
        engine.add(f"cold-{index}", text, max_tokens=4)
    engine.run()
    engine.settle()
    for turn in range(2):
        engine.reset_device_cache()
        for index, text in enumerate(texts):
            engine.add(f"warm-{turn}-{index}", prompts.new(2, prefix=text), max_tokens=4)
        engine.run()
        engine.settle()


def still_writing(engine: InProcessEngine) -> None:
    """Repeated before the store has ended, with an empty device cache."""
    prompts = Prompts()
    texts = [prompts.new(12.5) for _ in range(3)]
    for index, text in enumerate(texts):
        engine.generate(f"cold-{index}", text, max_tokens=2)
        engine.reset_device_cache()
        engine.add(f"same-{index}", text, max_tokens=2)
        engine.add(f"longer-{index}", prompts.new(3, prefix=text), max_tokens=2)
        engine.run()
        engine.reset_device_cache()
    engine.settle()


def small_tier(engine: InProcessEngine) -> None:
    """More is computed at once than the tier holds: stores are refused and offered again."""
    prompts = Prompts()
    texts = [prompts.new(blocks) for blocks in (20.5, 18.5, 22.5, 40.5)]
    for turn in range(2):
        for index, text in enumerate(texts):
            engine.add(f"cold-{turn}-{index}", text, max_tokens=6)
        engine.run()
        engine.reset_device_cache()
    engine.settle()


def long_prompts(engine: InProcessEngine) -> None:
    """Prompts of several windows and chunks, whole, shortened and continued."""
    prompts = Prompts()
    texts = [prompts.new(blocks) for blocks in (40.3, 33, 8.5)]
    for index, text in enumerate(texts):
        engine.generate(f"cold-{index}", text, max_tokens=40)
    engine.settle()
    for turn in range(2):
        engine.reset_device_cache()
        for index, text in enumerate(texts):
            engine.add(f"whole-{turn}-{index}", text, max_tokens=4)
            engine.add(f"short-{turn}-{index}", text[: len(text) * 2 // 3], max_tokens=4)
        engine.run()
        engine.settle()
    engine.reset_device_cache()
    engine.add("longer", prompts.new(10, prefix=texts[0]), max_tokens=4)
    engine.add("branch", prompts.new(10, prefix=texts[1][: 12 * BLOCK_TOKENS]), max_tokens=4)
    engine.run()
    engine.settle()


_CHUNKED_PREFILL = {"max_num_batched_tokens": 12 * BLOCK_TOKENS}

SCENARIOS: dict[str, Scenario] = {
    "plain": Scenario(plain, late_by=0),
    "aborts": Scenario(aborts, late_by=3, engine_args=_CHUNKED_PREFILL | {"max_requests": 2}),
    "preemption": Scenario(
        preemption,
        num_blocks=64,
        offload_prompt_only=False,
        engine_args={"device_blocks": 44, "max_model_len": 20 * BLOCK_TOKENS},
    ),
    "resets": Scenario(resets, late_by=3, engine_args=_CHUNKED_PREFILL),
    "shared_prefix": Scenario(shared_prefix, late_by=2, engine_args=_CHUNKED_PREFILL),
    "still_writing": Scenario(still_writing, late_by=4),
    "small_tier": Scenario(small_tier, num_blocks=32, late_by=3, engine_args=_CHUNKED_PREFILL),
    "sliding_window": Scenario(
        long_prompts, num_blocks=512, model=GEMMA3_HYBRID, engine_args=_CHUNKED_PREFILL
    ),
    "sliding_window_chunks": Scenario(
        long_prompts,
        num_blocks=128,
        model=GEMMA3_HYBRID,
        blocks_per_chunk=4,
        engine_args=_CHUNKED_PREFILL,
    ),
    "chunks": Scenario(
        long_prompts, num_blocks=64, blocks_per_chunk=4, engine_args=_CHUNKED_PREFILL
    ),
}


def record(name: str, folder: Path) -> vllm_calls.Recording:
    """Run one scenario in an engine of its own and return what was recorded."""
    from vllm.config import KVEventsConfig

    from tests.e2e.vllm import recording_spec

    scenario = SCENARIOS[name]
    model = scenario.model.write(folder / name)
    block_bytes = scenario.model.bytes_per_block(BLOCK_TOKENS) * scenario.blocks_per_chunk
    extra_config = {
        "spec_name": "RecordingSpec",
        "spec_module_path": recording_spec.__name__,
        "cpu_bytes_to_use": scenario.num_blocks * block_bytes,
        "eviction_policy": POLICY,
        "blocks_per_chunk": scenario.blocks_per_chunk,
        "offload_prompt_only": scenario.offload_prompt_only,
        "engine_config": {"late_by": scenario.late_by},
    }
    engine_args: dict[str, Any] = {
        "plug_in": "spec",
        "device_blocks": 512,
        "max_model_len": 64 * BLOCK_TOKENS,
        "kv_events_config": KVEventsConfig(enable_kv_cache_events=True, publisher="null"),
    }
    with InProcessEngine(model, extra_config, **engine_args | scenario.engine_args) as engine:
        scenario.drive(engine)
    (recording,) = recording_spec.last_recording
    assert recording.num_blocks == scenario.num_blocks
    recording.scenario = name
    return recording


# vLLM iterates over sets of keys and request ids. Their order depends on the hash seed, which
# is fixed when Python starts, and on a random part that vLLM adds to request ids.
_REPEATABLE = {
    "PYTHONHASHSEED": "0",
    "VLLM_DISABLE_REQUEST_ID_RANDOMIZATION": "1",
    "KVTIER_STRICT": "1",
}


def main(arguments: Sequence[str]) -> None:
    """Record the named scenarios, or all."""
    parser = argparse.ArgumentParser(prog="python -m tests.e2e.vllm.record", description=__doc__)
    parser.add_argument(
        "names",
        nargs="*",
        type=one_of("scenario", SCENARIOS),
        metavar="scenario",
        help="all, if none is named",
    )
    names: list[str] = parser.parse_args(arguments).names
    if not os.environ.items() >= _REPEATABLE.items():
        command = [sys.executable, "-m", "tests.e2e.vllm.record", *names]
        os.execve(sys.executable, command, os.environ | _REPEATABLE)
    with contained_environment() as folder:
        for name in names or SCENARIOS:
            recording = record(name, folder)
            path = vllm_calls.save(recording)
            print(f"{path.name}: {len(recording.calls)} calls, {path.stat().st_size} bytes")


if __name__ == "__main__":
    main(sys.argv[1:])
