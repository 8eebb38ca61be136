"""kvtier as a plug-in for stock vLLM. There are two ways to plug in; vLLM loads both by name.

The recommended way is a connector:

    vllm serve MODEL --kv-transfer-config '{
      "kv_connector": "KVTierConnector", "kv_role": "kv_both",
      "kv_connector_module_path": "kvtier.integrations.vllm",
      "kv_connector_extra_config": {"cpu_bytes_to_use": "8GiB"}}'

The other way is a spec for vLLM's own `OffloadingConnector` (`spec_name`, `spec_module_path`).

In both cases, vLLM's own connector decides which blocks a request loads and stores, and when device
blocks may be reused. kvtier answers the lookups of vLLM's connector and moves the blocks. For
engines without a connector, `kvtier.connector` makes these decisions; this package uses only the
code of `kvtier.connector` that reads a request's hints and measures prefill.

Importing this package does not import vLLM: the classes load on first use. Commands that run
without vLLM use the constants and functions below.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from kvtier.integrations.vllm.connector import KVTierConnector
    from kvtier.integrations.vllm.spec import KVTierOffloadingSpec

__all__ = [
    "FIRST_WITH_FIXED_HASHES",
    "SUPPORTED",
    "KVTierConnector",
    "KVTierOffloadingSpec",
    "is_supported",
    "release_of",
    "supported_in_words",
]

# Hidden from type checkers, which would otherwise accept any misspelt name.
if not TYPE_CHECKING:

    def __getattr__(name: str) -> object:
        if name == "KVTierConnector":
            from kvtier.integrations.vllm.connector import KVTierConnector

            return KVTierConnector
        if name == "KVTierOffloadingSpec":
            from kvtier.integrations.vllm.spec import KVTierOffloadingSpec

            return KVTierOffloadingSpec
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


SUPPORTED = ((0, 26), (0, 28), (0, 32))
"""Major and minor version of the releases of vLLM that kvtier is tested with. Other releases run
with one warning; a release that lacks a name that kvtier needs is refused (`vllm_api`)."""

FIRST_WITH_FIXED_HASHES = (0, 32)
"""Before this release, block hashes are random unless `PYTHONHASHSEED` is set. Used for advice
where no vLLM runs; the plug-in inspects the running vLLM instead (`vllm_api.draws_hash_root`)."""


def release_of(version: str) -> tuple[int, ...]:
    """Major and minor version of a version text; fewer numbers if the text has fewer."""
    release: list[int] = []
    for part in version.split(".")[:2]:
        if not part.isdecimal():
            break
        release.append(int(part))
    return tuple(release)


def is_supported(version: str) -> bool:
    """True if kvtier is tested with this version of vLLM."""
    return release_of(version) in SUPPORTED


def supported_in_words() -> str:
    """All supported releases, for a message."""
    return ", ".join(".".join(map(str, release)) for release in SUPPORTED)
