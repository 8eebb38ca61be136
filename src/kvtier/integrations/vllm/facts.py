"""What only a connector can tell kvtier: vLLM keeps it from a spec.

The connector puts it into the extra configuration from which vLLM makes the spec, under a key that
no user can write, since its name is no text that JSON or a shell gives.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from kvtier.config import OffloadingOptions
from kvtier.integrations.vllm import differences, vllm_api
from kvtier.integrations.vllm.identity import ModelIdentity, identity_of

__all__ = ["EngineFacts", "engine_facts", "facts_in", "is_full_attention", "told", "with_spec"]

_SPEC = {
    "spec_name": "KVTierOffloadingSpec",
    "spec_module_path": "kvtier.integrations.vllm",
}


class _FactsKey:
    """The key, equal to nothing else."""

    def __repr__(self) -> str:
        return "kvtier's engine facts"


_KEY = _FactsKey()


@dataclass(frozen=True, slots=True)
class EngineFacts:
    """What the connector knows of the engine, in the process that it is in."""

    identity: ModelIdentity | None = None
    """Which model this is; None in a rank's process, where nobody asks."""
    full_attention_groups: frozenset[int] = frozenset()
    """Groups in which a block is of use only with all blocks before it."""
    has_random_hashes: bool = False
    """Whether no other process will arrive at the same block hashes."""
    longest_prompt: int | None = None
    """`--max-model-len`; None where nobody asks."""
    may_sleep: bool = True
    """Whether vLLM may unmap its caches."""
    cannot_tell: str | None = None
    """Why vLLM cannot be told of loads that failed, so that it would compute those blocks."""
    engine: vllm_api.VllmConfig | None = field(default=None, repr=False, compare=False)
    """vLLM's whole configuration, for tiers that want it; None in a rank's process."""


def engine_facts(
    vllm_config: vllm_api.VllmConfig, kv_cache_config: vllm_api.KVCacheConfig
) -> EngineFacts:
    """Ask vLLM's whole configuration. Called once, in the scheduler's process.

    Reads all weight files of a local model, unless nothing outlives the process or the user has
    given a `cache_namespace`.
    """
    options = OffloadingOptions.from_extra_config(
        vllm_config.kv_transfer_config.kv_connector_extra_config
    )
    return EngineFacts(
        identity=identity_of(
            vllm_config,
            digest_files=bool(options.secondary_tiers) and options.cache_namespace is None,
        ),
        full_attention_groups=frozenset(
            number
            for number, group in enumerate(kv_cache_config.kv_cache_groups)
            if is_full_attention(group.kv_cache_spec)
        ),
        longest_prompt=getattr(vllm_config.model_config, "max_model_len", None),
        has_random_hashes=differences.draws_hash_root(
            vllm_config.cache_config.prefix_caching_hash_algo
        ),
        engine=vllm_config,
    )


def told(vllm_config: vllm_api.VllmConfig, facts: EngineFacts) -> vllm_api.VllmConfig:
    """A configuration from which vLLM makes kvtier's spec, and that tells it the facts."""
    return _with_extra_config(vllm_config, {_KEY: facts})


def with_spec(vllm_config: vllm_api.VllmConfig) -> vllm_api.VllmConfig:
    """The same without the facts, for those who only ask what the spec's figures are called."""
    return _with_extra_config(vllm_config, {})


def facts_in(extra_config: Mapping[Any, Any]) -> tuple[EngineFacts | None, dict[str, Any]]:
    """The facts, if a connector has left them, and the user's own keys."""
    users = dict(extra_config)
    facts: EngineFacts | None = users.pop(_KEY, None)
    return facts, users


def _with_extra_config(
    vllm_config: vllm_api.VllmConfig, added: Mapping[Any, Any]
) -> vllm_api.VllmConfig:
    # Copied, because others in this process, ranks among them, share the original.
    changed, transfer = copy.copy(vllm_config), copy.copy(vllm_config.kv_transfer_config)
    transfer.kv_connector_extra_config = _SPEC | transfer.kv_connector_extra_config | dict(added)
    changed.kv_transfer_config = transfer
    return changed


def is_full_attention(spec: vllm_api.KVCacheSpec) -> bool:
    """Whether a block is of use only with all blocks before it."""
    if isinstance(spec, vllm_api.UniformTypeKVCacheSpecs):
        return all(is_full_attention(layer) for layer in spec.kv_cache_specs.values())
    return isinstance(spec, vllm_api.FullAttentionSpec)
