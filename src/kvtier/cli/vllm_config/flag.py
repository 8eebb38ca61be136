"""What a shell is given: the flags for vLLM, or the whole command."""

from __future__ import annotations

import json
import math
import shlex
from collections.abc import Mapping
from typing import Any

__all__ = ["command_of", "flags_of", "shutdown_seconds", "transfer_config"]

_MODULE = "kvtier.integrations.vllm"
_SECONDS_FOR_VLLM = 5
"""To end an engine, besides what its tiers may take."""


def transfer_config(extra_config: Mapping[str, Any], *, is_plain: bool) -> dict[str, Any]:
    """What vLLM calls its KV transfer config. `is_plain`: through vLLM's own connector."""
    if is_plain:
        spec = {"spec_name": "KVTierOffloadingSpec", "spec_module_path": _MODULE}
        return {
            "kv_connector": "OffloadingConnector",
            "kv_role": "kv_both",
            "kv_connector_extra_config": spec | dict(extra_config),
        }
    return {
        "kv_connector": "KVTierConnector",
        "kv_connector_module_path": _MODULE,
        "kv_role": "kv_both",
        "kv_connector_extra_config": dict(extra_config),
    }


def shutdown_seconds(shutdown_timeout_ms: float) -> int:
    """What vLLM's `--shutdown-timeout` has to be, for tiers that may take so long to end.

    vLLM's default is 0: it ends the engine's process at once, and what its last requests have
    computed is not stored.
    """
    return math.ceil(shutdown_timeout_ms / 1000) + _SECONDS_FOR_VLLM


def flags_of(config: Mapping[str, Any], shutdown_timeout_s: int | None) -> str:
    """Quoted for a POSIX shell. All of it is ASCII, so that no terminal or locale changes it.

    `shutdown_timeout_s`: None where nothing outlives the process.
    """
    flag = f"--kv-transfer-config {shlex.quote(json.dumps(config))}"
    return flag if shutdown_timeout_s is None else f"--shutdown-timeout {shutdown_timeout_s} {flag}"


def command_of(model: str, flags: str, environment: Mapping[str, str], python: str | None) -> str:
    """The command that serves the model. `python`: the interpreter to start vLLM's module with,
    where the command `vllm` does not work."""
    variables = [f"{name}={shlex.quote(value)}" for name, value in environment.items()]
    if python is None:
        start = f"vllm serve {shlex.quote(model)}"
    else:
        module = "vllm.entrypoints.openai.api_server"
        start = f"{shlex.quote(python)} -m {module} --model {shlex.quote(model)}"
    return " ".join([*variables, start, flags])
