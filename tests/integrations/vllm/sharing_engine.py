"""Stock vLLM with an fs tier, in a process of its own that does what it is told.

    PYTHON-WITH-VLLM -m tests.integrations.vllm.sharing_engine FOLDER

Every line of standard input is a JSON object with one call: `{"start": {...}}`. Every one is
answered by a line of JSON. The end of the input ends the process. FOLDER has the model and the
root, which processes share.
"""

from __future__ import annotations

import json
import logging
import os
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Any

from kvtier.integrations.vllm.comparison import random_prompts, run_plain
from kvtier.integrations.vllm.demo import stdout_for_the_result_alone
from kvtier.integrations.vllm.in_process import (
    BLOCK_TOKENS,
    InProcessEngine,
    contained_environment,
)
from kvtier.integrations.vllm.tiny_model import LLAMA

BLOCKS_PER_PROMPT = 16
PROMPTS = random_prompts(4, BLOCKS_PER_PROMPT * BLOCK_TOKENS, "shared by engines")
_ENGINE_ARGS: dict[str, Any] = {"device_blocks": 256, "max_model_len": 1024}
# Nothing is to depend on how fast this machine is.
_TIMEOUTS = {f"{kind}_timeout_ms": 60_000 for kind in ("lookup", "load", "store")}


def fs_options(folder: Path) -> dict[str, Any]:
    """Host memory for a prompt and a half, and an fs tier for all of them and more."""
    return {
        "cpu_bytes_to_use": BLOCKS_PER_PROMPT * 3 // 2 * LLAMA.bytes_per_block(BLOCK_TOKENS),
        "cache_namespace": "random weights, seed 0",
        "prefill_tokens_per_s": 0,
        "secondary_tiers": [
            {
                "type": "fs",
                "root_dir": str(folder / "root"),
                "max_bytes": "64MiB",
                "max_pinned_share": 1,
                **_TIMEOUTS,
            }
        ],
    }


class _Told(logging.Handler):
    """What kvtier's plug-in says to the operator."""

    def __init__(self) -> None:
        super().__init__()
        self.lines: list[tuple[str, str]] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.lines.append((record.levelname, record.getMessage()))


class Calls:
    """What this process can be told to do; at most one engine at a time."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._engine: InProcessEngine | None = None
        self._told = _Told()
        said = logging.getLogger("kvtier.integrations.vllm")
        said.setLevel(logging.INFO)
        said.addHandler(self._told)

    def plain(self) -> dict[str, Any]:
        """All prompts without kvtier: computed, and from the device cache."""
        return asdict(run_plain(self._folder / "model", PROMPTS, **_ENGINE_ARGS))

    def start(self, hash_seed: str | None = None, **engine_args: Any) -> None:
        """Start an engine. `hash_seed`: what PYTHONHASHSEED is for it; None: not set."""
        os.environ.pop("PYTHONHASHSEED", None)
        if hash_seed is not None:
            os.environ["PYTHONHASHSEED"] = hash_seed
        self._told.lines.clear()
        self._engine = InProcessEngine(
            self._folder / "model",
            fs_options(self._folder),
            disable_log_stats=False,
            **_ENGINE_ARGS,
            **engine_args,
        )

    def generate(self, prompts: list[int]) -> list[dict[str, Any]]:
        """The answers to some of the prompts, one after the other."""
        assert self._engine is not None
        answers = []
        for index in prompts:
            answers.append(asdict(self._engine.generate(f"prompt-{index}", PROMPTS[index])))
            self._engine.settle()
        return answers

    def stop(self) -> dict[str, Any]:
        """End the engine. Answers its figures, and what it has said to the operator."""
        assert self._engine is not None
        shown = self._engine.metrics()
        self._engine.close()
        return {
            # Some counters are there only once they have counted something.
            "figures": {
                metric.name.removeprefix("vllm:kvtier_"): metric.value
                for metric in shown
                if metric.name.startswith("vllm:kvtier_") and hasattr(metric, "value")
            },
            "told": self._told.lines,
        }


def main() -> None:
    """Do what the lines say."""
    folder = Path(sys.argv[1])
    answers = os.fdopen(os.dup(1), "w")
    with contained_environment(), stdout_for_the_result_alone():
        calls = Calls(folder)
        for line in sys.stdin:
            ((name, arguments),) = json.loads(line).items()
            print(json.dumps(getattr(calls, name)(**arguments)), file=answers, flush=True)


if __name__ == "__main__":
    main()
