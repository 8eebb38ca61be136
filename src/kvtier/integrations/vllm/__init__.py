"""kvtier as a plug-in for stock vLLM: two doors, both loaded by name.

The recommended one is a connector:

    vllm serve MODEL --kv-transfer-config '{
      "kv_connector": "KVTierConnector", "kv_role": "kv_both",
      "kv_connector_module_path": "kvtier.integrations.vllm",
      "kv_connector_extra_config": {"cpu_bytes_to_use": "8GiB"}}'

The plain one is a spec for vLLM's own `OffloadingConnector` (`spec_name`, `spec_module_path`).

Both are loaded when they are asked for: the demo, which lives in this package, has to set the
environment before torch and vLLM are imported.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from kvtier.integrations.vllm.connector import KVTierConnector
    from kvtier.integrations.vllm.spec import KVTierOffloadingSpec

__all__ = ["KVTierConnector", "KVTierOffloadingSpec"]

# Hidden from type checkers: with it in sight, they would accept any misspelt name.
if not TYPE_CHECKING:

    def __getattr__(name: str) -> object:
        if name == "KVTierConnector":
            from kvtier.integrations.vllm.connector import KVTierConnector

            return KVTierConnector
        if name == "KVTierOffloadingSpec":
            from kvtier.integrations.vllm.spec import KVTierOffloadingSpec

            return KVTierOffloadingSpec
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
