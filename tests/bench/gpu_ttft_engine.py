"""One vLLM engine in a process of its own, driven by `tests.bench.gpu_ttft`.

    python -m tests.bench.gpu_ttft_engine ORDER.json

The file describes the engine; `tests.bench.vllm_process` describes the commands.
"""

from __future__ import annotations

import json
import os
import random
import time
from pathlib import Path
from typing import Any

from kvtier.testing.vllm.in_process import InProcessEngine, contain
from tests.bench.vllm_process import answer_commands

FORGET_NOTHING = "nothing"
FORGET_DEVICE = "device"
FORGET_HOST = "host"
"""Forgets the device cache, too. Blocks on disk stay."""

COUNTERS = (
    "cpu_stored_blocks",
    "cpu_loaded_blocks",
    "cpu_promoted_blocks",
    "failed_loads",
    *(
        f'tier_declined_blocks{{tier="0:disk",reason="{reason}"}}'
        for reason in ("slower", "late", "unmeasured", "trial")
    ),
    'tier_late_jobs{tier="0:disk",kind="load"}',
    "tiering_given_up_requests",
)
"""kvtier's counters that say where the blocks of a request came from."""

LOAD_SECONDS = 'tier_seconds{tier="0:disk",direction="load"}'
"""Seconds that the tier spent on loads, measured by the tier."""

_WARM_UP = "warm-up"
_SHORT_TOKENS = 8
_KEPT_NOWHERE = {"skip": True, "max_offload_tokens": 0}
"""Hints that keep a prompt from being stored: the first is kvtier's, the second vLLM's."""
_SETTLED_WITHIN_S = 60.0
_PAUSE_S = 0.05
_SHARPNESS = 2.0
"""Factor on the weights of queries and keys."""


class Session:
    """Executes the commands of `tests.bench.gpu_ttft_rounds`."""

    def __init__(self, order: dict[str, Any]) -> None:
        self._order = order
        self._num_requests = 0
        self._prompts: dict[tuple[int, object], list[int]] = {}
        folder = Path(order["folder"])
        (folder / "model").mkdir()
        (folder / "model" / "config.json").write_text(json.dumps(order["model_config"]))
        (folder / "tier").mkdir()
        self._tier = folder / "tier"
        _contain(folder / "vllm")
        self._engine = InProcessEngine(
            folder / "model",
            order["kvtier"],
            device_blocks=None,
            max_requests=4,
            **order["engine_args"],
        )
        self._engine.change_model(let_weights_matter)
        for _ in ("computed", "from the device"):
            self._run(order["warm_up_tokens"], _WARM_UP, _KEPT_NOWHERE)
        self._engine.settle(_SETTLED_WITHIN_S)

    def generate(self, what: dict[str, Any]) -> dict[str, Any]:
        """Run a prompt. `forget` names the caches that are emptied before; `wake` runs a short
        request before."""
        self._forget(what["forget"])
        if what["wake"]:
            self._run(_SHORT_TOKENS, _WARM_UP, _KEPT_NOWHERE)
        before = self._figures()
        answer = self._run(what["tokens"], what["number"], what.get("hints"))
        self._engine.settle(_SETTLED_WITHIN_S)
        after = self._figures()
        return {
            "seconds": answer.time_to_first_token,
            "cached_tokens": answer.cached_tokens,
            "answer": answer.tokens,
            "logprobs": answer.logprobs,
            "counted": {
                name: after.get(name, 0) - before.get(name, 0)
                for name in (*COUNTERS, LOAD_SECONDS)
                if name in after
            },
        }

    def stored_blocks(self, what: dict[str, Any]) -> int:
        """Blocks on disk, once there are as many as expected or the time is up."""
        deadline = time.monotonic() + what["seconds"]
        while True:
            self._engine.settle(_SETTLED_WITHIN_S)
            stored = self._num_stored()
            if stored >= what["blocks"] or time.monotonic() > deadline:
                return stored
            # vLLM passes computed blocks on, and collects finished stores, only in further steps.
            self._run(_SHORT_TOKENS, _WARM_UP, None)
            time.sleep(_PAUSE_S)

    def figures(self, _: object) -> dict[str, float]:
        """kvtier's metrics; empty for other engines."""
        return self._engine.figures()

    def end(self) -> None:
        self._engine.close()

    def _figures(self) -> dict[str, float]:
        times = {
            metric.name.removeprefix("vllm:kvtier_"): metric.sum
            for metric in self._engine.metrics()
            if metric.name.endswith(LOAD_SECONDS)
        }
        return self._engine.figures() | times

    def _run(self, tokens: int, number: object, hints: dict[str, Any] | None) -> Any:
        self._num_requests += 1
        prompt = self._prompts.get((tokens, number))
        if prompt is None:
            source = random.Random(f"{tokens} tokens, {number}")
            vocabulary = self._order["vocabulary"]
            prompt = [source.randrange(10, vocabulary) for _ in range(tokens)]
            self._prompts[tokens, number] = prompt
        name = f"request-{self._num_requests}"
        return self._engine.generate(name, prompt, self._order["answer_tokens"], hints)

    def _forget(self, what: str) -> None:
        if what == FORGET_DEVICE:
            self._engine.reset_device_cache()
        elif what == FORGET_HOST and not self._engine.reset_all():
            raise RuntimeError("vLLM could not reset its prefix cache: some blocks are in use")

    def _num_stored(self) -> int:
        if self._order["counts_files"]:
            return sum(
                name.endswith(".bin") for _, _, names in os.walk(self._tier) for name in names
            )
        figures = self._engine.figures()
        return int(figures.get("disk_resident_blocks", 0) - figures.get("disk_queued_blocks", 0))


def _contain(folder: Path) -> None:
    folder.mkdir()
    # vLLM caches its inspection of models, which takes a process that imports vLLM.
    cache = os.environ.get("VLLM_CACHE_ROOT")
    contain(folder)
    if cache is not None:
        os.environ["VLLM_CACHE_ROOT"] = cache


def let_weights_matter(model: Any) -> None:
    """Give the model weights as large as trained ones, the same in every engine of this shape.

    vLLM's dummy weights are so small that attention hardly changes the output, and an fp8 cache
    rounds its contents to zero. Wrong blocks would go unnoticed.
    """
    import torch

    for number, (name, weight) in enumerate(model.named_parameters()):
        if weight.dim() == 0 or not weight.is_floating_point():
            continue
        with torch.no_grad():
            if weight.dim() == 1:
                weight.fill_(1.0 if "norm" in name else 0.0)
                continue
            generator = torch.Generator(device=weight.device)
            generator.manual_seed(number)
            # Keeps the size of activations. Larger queries and keys make attention sharp.
            std = 1.0 if "embed_tokens" in name else weight.shape[1] ** -0.5
            if "qkv_proj" in name:
                std *= _SHARPNESS
            weight.normal_(0.0, std, generator=generator)


if __name__ == "__main__":
    raise SystemExit(answer_commands(Session))
