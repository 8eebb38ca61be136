"""kvtier as a plug-in for stock vLLM: an out-of-tree offloading spec, loaded by name.

    vllm serve MODEL --kv-transfer-config '{
      "kv_connector": "OffloadingConnector", "kv_role": "kv_both",
      "kv_connector_extra_config": {
        "spec_name": "KVTierOffloadingSpec",
        "spec_module_path": "kvtier.integrations.vllm",
        "cpu_bytes_to_use": 8589934592}}'

The spec is loaded when it is asked for: the demo, which lives in this package, has to set the
environment before torch and vLLM are imported.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from kvtier.integrations.vllm.spec import KVTierOffloadingSpec

__all__ = ["KVTierOffloadingSpec"]

# Hidden from type checkers: with it in sight, they would accept any misspelt name.
if not TYPE_CHECKING:

    def __getattr__(name: str) -> object:
        if name != "KVTierOffloadingSpec":
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        from kvtier.integrations.vllm.spec import KVTierOffloadingSpec

        return KVTierOffloadingSpec
