"""Decides which kinds of models kvtier serves. It refuses other kinds when the engine starts.

A kind is *proven* if a test has run such a model with kvtier and got the answers of vLLM alone.
Other kinds may work, or may give wrong answers without an error. For example, a block of a
state-space layer holds a state, not tokens. So kvtier refuses them, unless the user sets
`allow_unproven_models`.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from kvtier.config import ConfigError, OffloadingOptions, Problem
from kvtier.integrations.vllm import vllm_api

__all__ = [
    "can_compute_from_any_block",
    "is_full_attention",
    "layer_specs",
    "require_proven",
    "specs_in",
    "unproven_kinds",
]

logger = logging.getLogger(__name__)

_PROVEN_SPECS = (vllm_api.FullAttentionSpec, vllm_api.SlidingWindowSpec)
_PROVEN_SPECULATION = ("ngram",)
"""Methods of speculative decoding that keep no cache."""

_WORDS = {
    "ChunkedLocalAttentionSpec": "chunked local attention",
    "CrossAttentionSpec": "cross attention",
    "EncoderOnlyAttentionSpec": "encoder attention",
    "MLAAttentionSpec": "multi-head latent attention (MLA)",
    "MambaSpec": "state-space layers (Mamba, linear attention)",
    "SinkFullAttentionSpec": "attention sinks with blocks of their own",
    "SlidingWindowMLASpec": "multi-head latent attention (MLA) with a window",
    "UniformTypeKVCacheSpecs": "layers whose caches differ in size",
}
"""Words for a message, by the name of vLLM's class. A message shows any other class by its name."""


def is_full_attention(spec: vllm_api.KVCacheSpec) -> bool:
    """True if a block is of use only together with all blocks before it."""
    if isinstance(spec, vllm_api.UniformTypeKVCacheSpecs):
        return all(is_full_attention(layer) for layer in spec.kv_cache_specs.values())
    return isinstance(spec, vllm_api.FullAttentionSpec)


def can_compute_from_any_block(kv_cache_config: vllm_api.KVCacheConfig) -> bool:
    """True if vLLM can compute a prompt from a device block that failed to load, because all
    blocks before it are there.

    With windows or states, earlier blocks may be gone. With several groups, the number of a device
    block does not say which group the block belongs to.
    """
    groups = kv_cache_config.kv_cache_groups
    return len(groups) == 1 and is_full_attention(groups[0].kv_cache_spec)


def specs_in(kv_cache_config: vllm_api.KVCacheConfig) -> Iterator[vllm_api.KVCacheSpec]:
    """The cache specs of all groups, including those that are not offloaded."""
    for group in kv_cache_config.kv_cache_groups:
        yield group.kv_cache_spec


def layer_specs(vllm_config: vllm_api.VllmConfig) -> Iterator[vllm_api.KVCacheSpec]:
    """The cache specs of all layers. Called in a worker, which has loaded the model but does not
    get the groups from vLLM."""
    for layer in vllm_config.compilation_config.static_forward_context.values():
        describe = getattr(layer, "get_kv_cache_spec", None)
        spec = None if describe is None else describe(vllm_config)
        if spec is not None:
            yield spec


def unproven_kinds(
    vllm_config: vllm_api.VllmConfig, specs: Iterable[vllm_api.KVCacheSpec]
) -> list[str]:
    """The unproven kinds of layers and speculation in this model, in words."""
    # Subclasses do not count as proven: they may lay out or look up their blocks differently.
    names = {type(spec).__name__ for spec in specs if type(spec) not in _PROVEN_SPECS}
    kinds = [_WORDS.get(name, f"layers of vLLM's kind {name}") for name in sorted(names)]
    speculative = getattr(vllm_config, "speculative_config", None)
    if speculative is not None and speculative.method not in _PROVEN_SPECULATION:
        kinds.append(f'speculative decoding with the method "{speculative.method}"')
    return kinds


def require_proven(kinds: list[str], extra_config: Mapping[str, Any], *, warn: bool) -> None:
    """Raise `ConfigError` if there are unproven kinds and the user does not allow them. `warn`: log
    a warning if they are allowed; set in one process of an engine only."""
    if not kinds:
        return
    what = " and ".join(kinds)
    if not OffloadingOptions.from_extra_config(extra_config).allow_unproven_models:
        raise ConfigError(
            Problem(
                "allow_unproven_models",
                f"nothing, and this model has {what}, which no test has served with kvtier: its "
                "answers could be wrong",
                "models with full attention, sliding windows or both, also with ngram speculation",
                "Serve this model without kvtier; or set allow_unproven_models to true to try it, "
                "and compare its answers with those of vLLM alone",
            )
        )
    if warn:
        logger.warning(
            "this model has %s, which no test has served: it is served because "
            "allow_unproven_models is true. Compare its answers with those of vLLM alone",
            what,
        )
