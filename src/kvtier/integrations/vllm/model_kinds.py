"""Which kinds of models are served, and why others are refused when the engine starts.

A kind is served if a test has run such a model with kvtier and got the answers of vLLM alone. Other
kinds may work. They may also give wrong answers, which nobody would notice: blocks of a layer with
a state, say, mean something else than those of a layer with attention. So they are refused, unless
the user sets `allow_unproven_models`.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from kvtier.config import ConfigError, OffloadingOptions, Problem
from kvtier.integrations.vllm import vllm_api

__all__ = ["layer_specs", "require_proven", "specs_in", "unproven_kinds"]

logger = logging.getLogger(__name__)

_PROVEN_SPECS = (vllm_api.FullAttentionSpec, vllm_api.SlidingWindowSpec)
_PROVEN_SPECULATION = ("ngram",)
"""Methods that propose tokens without a cache of their own."""

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
"""By the name of vLLM's class. Releases add classes: those not named here go by their own name."""


def specs_in(kv_cache_config: vllm_api.KVCacheConfig) -> Iterator[vllm_api.KVCacheSpec]:
    """Of all groups, those that are not offloaded included."""
    for group in kv_cache_config.kv_cache_groups:
        yield group.kv_cache_spec


def layer_specs(vllm_config: vllm_api.VllmConfig) -> Iterator[vllm_api.KVCacheSpec]:
    """Of all layers that keep a cache. For a rank that is not told of its groups; its model must be
    loaded."""
    for layer in vllm_config.compilation_config.static_forward_context.values():
        describe = getattr(layer, "get_kv_cache_spec", None)
        spec = None if describe is None else describe(vllm_config)
        if spec is not None:
            yield spec


def unproven_kinds(
    vllm_config: vllm_api.VllmConfig, specs: Iterable[vllm_api.KVCacheSpec]
) -> list[str]:
    """What no test has served, in words; empty for a model that is served."""
    # By the class itself: a subclass lays out its blocks, or finds them, in another way.
    names = {type(spec).__name__ for spec in specs if type(spec) not in _PROVEN_SPECS}
    kinds = [_WORDS.get(name, f"layers of vLLM's kind {name}") for name in sorted(names)]
    speculative = getattr(vllm_config, "speculative_config", None)
    if speculative is not None and speculative.method not in _PROVEN_SPECULATION:
        kinds.append(f'speculative decoding with the method "{speculative.method}"')
    return kinds


def require_proven(kinds: list[str], extra_config: Mapping[str, Any], *, warn: bool) -> None:
    """Raise `ConfigError` for kinds of which there are any, unless the user allows them. `warn`: if
    so, say that they are tried; one process of an engine does."""
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
            "this model has %s, which no test has served: tried because allow_unproven_models is "
            "true. Compare its answers with those of vLLM alone",
            what,
        )
