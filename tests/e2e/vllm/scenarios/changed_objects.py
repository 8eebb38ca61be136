"""What kvtier changes in a running vLLM."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from kvtier.testing.vllm.in_process import InProcessEngine, PlugIn


def changed(model: str, plug_in: PlugIn) -> dict[str, list[str]]:
    """`methods`: of vLLM's half of the connector that were replaced on this object.
    `elsewhere`: kvtier's functions and classes in vLLM's modules and their classes."""
    options = {"cpu_bytes_to_use": "8MiB", "secondary_tiers": [{"type": "example"}]}
    with InProcessEngine(Path(model), options, plug_in=plug_in, max_model_len=128) as engine:
        engine.generate("any", range(3, 40))
        scheduler = engine._scheduler.connector.connector_scheduler
        methods = [name for name in vars(scheduler) if callable(getattr(type(scheduler), name, 0))]
        return {"methods": methods, "elsewhere": sorted(set(_ours_among_theirs()))}


def _ours_among_theirs() -> Iterator[str]:
    modules = [module for name, module in sys.modules.items() if name.partition(".")[0] == "vllm"]
    for module in modules:
        for name, value in list(vars(module).items()):
            if _is_ours(value):
                yield f"{module.__name__}.{name}"
            if isinstance(value, type) and value.__module__ == module.__name__:
                for attribute, inner in list(vars(value).items()):
                    if _is_ours(getattr(inner, "__func__", inner)):
                        yield f"{module.__name__}.{name}.{attribute}"


def _is_ours(value: Any) -> bool:
    return callable(value) and str(getattr(value, "__module__", "")).startswith("kvtier.")
