"""vLLM's configuration, in kvtier's terms.

vLLM gives an offloading spec only a part of vLLM's configuration, and a connector all of it.
`KVTierConnector` collects the rest that kvtier needs as `EngineFacts`, and passes the facts to the
spec inside the extra configuration, under a key that no user can write because it is not a string.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from kvtier.config import (
    AttentionKind,
    OffloadingCacheConfig,
    OffloadingConfig,
    OffloadingGroupConfig,
    OffloadingModelConfig,
    OffloadingOptions,
    OffloadingParallelConfig,
)
from kvtier.integrations.vllm import vllm_api
from kvtier.integrations.vllm.identity import ModelIdentity, identity_of
from kvtier.integrations.vllm.model_kinds import is_full_attention

__all__ = [
    "EngineFacts",
    "config_from_vllm",
    "engine_facts",
    "facts_in",
    "with_facts",
    "with_spec",
]

_SPEC = {
    "spec_name": "KVTierOffloadingSpec",
    "spec_module_path": "kvtier.integrations.vllm",
}


class _FactsKey:
    """The type of the key under which the facts are stored. It equals no other key."""

    def __repr__(self) -> str:
        return "kvtier's engine facts"


_KEY = _FactsKey()


@dataclass(frozen=True, slots=True)
class EngineFacts:
    """What `KVTierConnector` adds to the configuration that vLLM gives a spec. Connector and spec
    are in the same process, so the fields may hold any objects."""

    identity: ModelIdentity | None = None
    """The model that the engine has loaded; None in a worker's process, which does not need it."""
    full_attention_groups: frozenset[int] = frozenset()
    """Groups whose blocks are of use only together with all blocks before them."""
    has_random_hashes: bool = False
    """True if no other process will compute the same block hashes."""
    hash_root: str = ""
    """What the block hashes start from (`HashRoot.title`). Empty if it is random or not known."""
    longest_prompt: int | None = None
    """`--max-model-len`, in tokens; None in a worker's process."""
    may_sleep: bool = True
    """True if vLLM may unmap its device caches (sleep mode)."""
    fatal_because: str | None = None
    """Why a load that fails after all retries stops the engine. None: it does not, because vLLM
    computes the blocks."""
    engine: vllm_api.VllmConfig | None = field(default=None, repr=False, compare=False)
    """vLLM's whole configuration, for tiers that want it; None in a worker's process."""


def engine_facts(
    vllm_config: vllm_api.VllmConfig, kv_cache_config: vllm_api.KVCacheConfig
) -> EngineFacts:
    """Collect the facts. Called once, in the scheduler's process.

    If there are secondary tiers and the user has given no `cache_namespace`, reads the weight files
    of a local model in full, except files whose digest `DigestMemory` has.
    """
    options = OffloadingOptions.from_extra_config(
        vllm_config.kv_transfer_config.kv_connector_extra_config
    )
    algorithm = vllm_config.cache_config.prefix_caching_hash_algo
    root = vllm_api.expected_hash_root(algorithm)
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
        has_random_hashes=vllm_api.draws_hash_root(algorithm),
        hash_root="" if root is None else root.title,
        engine=vllm_config,
    )


def with_facts(vllm_config: vllm_api.VllmConfig, facts: EngineFacts) -> vllm_api.VllmConfig:
    """A copy of the configuration that names kvtier's spec and carries the facts to it."""
    return _with_extra_config(vllm_config, {_KEY: facts})


def with_spec(vllm_config: vllm_api.VllmConfig) -> vllm_api.VllmConfig:
    """A copy of the configuration that names kvtier's spec, so that vLLM asks it for metrics."""
    return _with_extra_config(vllm_config, {})


def facts_in(extra_config: Mapping[Any, Any]) -> tuple[EngineFacts | None, dict[str, Any]]:
    """The facts (None without `KVTierConnector`), and the user's own keys."""
    users = dict(extra_config)
    facts: EngineFacts | None = users.pop(_KEY, None)
    return facts, users


def _with_extra_config(
    vllm_config: vllm_api.VllmConfig, added: Mapping[Any, Any]
) -> vllm_api.VllmConfig:
    # Make a copy, because other objects in this process share the original, workers included.
    changed, transfer = copy.copy(vllm_config), copy.copy(vllm_config.kv_transfer_config)
    transfer.kv_connector_extra_config = _SPEC | transfer.kv_connector_extra_config | dict(added)
    changed.kv_transfer_config = transfer
    return changed


def config_from_vllm(
    config: vllm_api.OffloadingConfig, users_keys: Mapping[str, Any], facts: EngineFacts | None
) -> OffloadingConfig:
    """The configuration of kvtier for this engine. Raises `ConfigError`. Called while the engine
    starts, on the scheduler's side and on every rank.

    Without `facts`, the weights and the attention kind of a group are unknown. So a tier that
    outlives the process requires `cache_namespace`, and a block that a tier lacks does not end the
    search for other blocks of the same group. Host memory needs neither the weights nor the kind.
    """
    parallel = config.parallel
    return OffloadingConfig(
        groups=tuple(
            _group_from_vllm(group, vllm_api.group_id(group, place), facts)
            for place, group in enumerate(config.groups)
        ),
        worker_kv_bytes_per_block=config.worker_kv_bytes_per_block,
        engine_id=config.engine_id,
        model=_model_from_vllm(config, facts),
        cache=OffloadingCacheConfig(
            tokens_per_hash=config.cache.tokens_per_hash,
            blocks_per_chunk=config.cache.blocks_per_chunk,
            hash_root="" if facts is None else facts.hash_root,
        ),
        parallel=OffloadingParallelConfig(
            rank=parallel.rank,
            world_size=parallel.world_size,
            tp_size=parallel.tp_size,
            pp_size=parallel.pp_size,
            pcp_size=parallel.pcp_size,
            dcp_size=parallel.dcp_size,
            data_parallel_index=parallel.data_parallel_index,
            data_parallel_size=vllm_api.data_parallel_size(config),
        ),
        extra_config=users_keys,
        kv_cache_layout=getattr(config, "kv_cache_layout", None),
        enable_kv_cache_events=config.enable_kv_cache_events,
    )


def _group_from_vllm(
    group: vllm_api.OffloadingGroupConfig, number: int, facts: EngineFacts | None
) -> OffloadingGroupConfig:
    # Declare a sliding window as UNKNOWN, so that kvtier does not limit how far vLLM searches: for
    # some prompt lengths, vLLM needs more blocks than the window has.
    is_full = facts is not None and number in facts.full_attention_groups
    return OffloadingGroupConfig(
        tokens_per_block=group.tokens_per_block,
        layer_names=group.layer_names,
        group_id=number,
        kind=AttentionKind.FULL if is_full else AttentionKind.UNKNOWN,
    )


def _model_from_vllm(
    config: vllm_api.OffloadingConfig, facts: EngineFacts | None
) -> OffloadingModelConfig:
    identity = None if facts is None else facts.identity
    if identity is None:
        return OffloadingModelConfig(
            name=config.model.name,
            dtype=config.model.dtype,
            unknown_because="vLLM does not tell it to an offloading spec; use KVTierConnector",
        )
    # Revision and namespace identify weights better than a name or a path, which may differ
    # between engines with the same weights.
    name = identity.revision or config.extra_config.get("cache_namespace") or config.model.name
    return OffloadingModelConfig(
        name=name,
        served_name=identity.title or config.model.name,
        dtype=config.model.dtype,
        weights_revision=identity.revision,
        unknown_because=identity.unknown_because,
        variant=identity.variant,
        settings=identity.settings,
    )
