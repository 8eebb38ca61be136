"""The identities of models, in a process with stock vLLM.

    PYTHON-WITH-VLLM -m tests.integrations.vllm.identity_probe HUB < CASES

CASES is a JSON object with the fields of a `Case` for each name. Prints one JSON document with the
identity for each name. HUB is a hub cache.
"""

from __future__ import annotations

import json
import multiprocessing
import os
import sys
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any
from unittest.mock import patch

from kvtier.testing.vllm.demo import stdout_for_the_result_alone
from kvtier.testing.vllm.in_process import BLOCK_TOKENS, contained_environment
from tests.e2e.vllm.zygote import register_models


@dataclass(frozen=True, slots=True)
class Case:
    """How one engine is configured."""

    args: Mapping[str, Any]
    """Arguments of `vllm.EngineArgs`."""
    environment: Mapping[str, str] = field(default_factory=dict)
    model_config: Mapping[str, Any] = field(default_factory=dict)
    """Attributes to set afterwards: offline, vLLM replaces the name of a model by its folder."""
    hf_config: Mapping[str, Any] = field(default_factory=dict)
    """Attributes of the model's own configuration to set afterwards."""
    digest_files: bool = True
    odd_values: bool = False
    """True: the configuration holds values that JSON cannot represent."""
    changed_after_start: str | None = None
    """A file that is written to after the engine's process has started."""


class _Odd:
    """An object with an address, a set and a reference to itself."""

    def __init__(self) -> None:
        self.words = {"alpha", "beta", "gamma", "delta"}
        self.self = self


def identity(case: Case) -> dict[str, Any]:
    from vllm import EngineArgs

    from kvtier.integrations.vllm.identity import identity_of

    args = {"skip_tokenizer_init": True, "dtype": "float32", "block_size": BLOCK_TOKENS}
    args |= case.args
    if case.odd_values:
        args["additional_config"] = {
            "odd": _Odd(),
            "function": lambda: None,
            3: {1, "one", None},
            "nan": float("nan"),
            "bytes": b"\xff",
            "lone surrogate": "\udcff",
        }
    config = EngineArgs(**args).create_engine_config()
    for name, value in case.model_config.items():
        setattr(config.model_config, name, value)
    for name, value in case.hf_config.items():
        setattr(config.model_config.hf_config, name, value)
    with patch.dict(os.environ, case.environment):
        if case.changed_after_start is None:
            return asdict(identity_of(config, digest_files=case.digest_files))
        return _in_an_engine_process(config, Path(case.changed_after_start))


def _in_an_engine_process(config: Any, changed: Path) -> dict[str, Any]:
    from kvtier.integrations.vllm.identity import identity_of

    def run() -> None:
        changed.write_bytes(changed.read_bytes())
        answers.put(asdict(identity_of(config, digest_files=True)))

    context = multiprocessing.get_context("fork")
    answers = context.SimpleQueue()
    process = context.Process(target=run)
    process.start()
    answer: dict[str, Any] = answers.get()
    process.join()
    return answer


def main() -> None:
    cases = {name: Case(**case) for name, case in json.load(sys.stdin).items()}
    with stdout_for_the_result_alone(), contained_environment():
        Path(os.environ["HF_HOME"], "hub").symlink_to(sys.argv[1])
        register_models()
        report = {name: identity(case) for name, case in cases.items()}
    print(json.dumps(report))


if __name__ == "__main__":
    main()
