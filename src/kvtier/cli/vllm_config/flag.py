"""The flag itself."""

from __future__ import annotations

import json
import shlex
from collections.abc import Mapping
from typing import Any

__all__ = ["flag_of", "transfer_config"]

_MODULE = "kvtier.integrations.vllm"


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


def flag_of(config: Mapping[str, Any]) -> str:
    """Quoted for a POSIX shell. All of it is ASCII, so that no terminal or locale changes it."""
    return f"--kv-transfer-config {shlex.quote(json.dumps(config))}"
