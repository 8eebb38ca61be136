"""The variant of a model: all that decides which KV-cache bytes a prompt gets, except the weights.

It covers the configuration in effect with its overrides (RoPE, data types, quantization), and the
platform. A setting counts unless it is known to have no effect: at worst, engines that could share
blocks do not. Attributes that a release of vLLM lacks are ignored. The variant's text is in the
fingerprint, so it must be the same in every process. Its settings are the same by name, for people.
"""

from __future__ import annotations

import json
import os
import platform
import re
import sys
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import fields, is_dataclass
from enum import Enum
from hashlib import blake2b
from importlib.metadata import entry_points
from numbers import Number
from pathlib import Path
from typing import Any, NamedTuple

from kvtier.config.errors import without_secrets
from kvtier.config.namespace import Scalar, short_digest, short_value

__all__ = ["Variant", "has_scales_of_its_own", "texts_in", "variant_of"]


def has_scales_of_its_own(vllm_config: Any) -> bool:
    """True if the engine derives the scales of its cache from the first prompts it computes."""
    return bool(getattr(vllm_config.cache_config, "calculate_kv_scales", False))


_MODEL_WITHOUT_EFFECT = frozenset(
    {
        # Which model it is: the revision covers that.
        *("model", "model_weights", "revision", "hf_config_path", "config_format", "hf_token"),
        *("served_model_name", "trust_remote_code", "allow_deprecated_quantization"),
        # Included elsewhere, with all overrides applied.
        *("hf_config", "hf_text_config", "hf_overrides", "multimodal_config", "runner", "convert"),
        *("max_model_len", "spec_target_max_model_len", "is_submodel_config"),
        # How text becomes tokens, and how outputs are sampled.
        *("tokenizer", "tokenizer_mode", "tokenizer_revision", "skip_tokenizer_init"),
        *("allowed_local_media_path", "allowed_media_domains", "enable_prompt_embeds"),
        *("renderer_num_workers", "io_processor_plugin", "seed", "max_logprobs", "logprobs_mode"),
        *("generation_config", "override_generation_config", "logits_processors"),
        *("use_fp64_gumbel", "return_sampling_mask", "enable_trace_replay", "pooler_config"),
        *("enable_return_routed_experts", "word_embeddings_untied_by_checkpoint"),
        # How it is run.
        *("enforce_eager", "disable_cascade_attn", "enable_sleep_mode", "sleep_mode_backend"),
        *("sleep_preserve_parameter_names", "sleep_mode_offload_cudagraph"),
        *("enable_nccl_comm_suspend", "enable_cumem_allocator"),
    }
)
_MULTIMODAL_WITHOUT_EFFECT = frozenset(
    {
        *("limit_per_prompt", "enable_mm_embeds", "interleave_mm_strings", "skip_mm_profiling"),
        *("mm_processor_cache_gb", "mm_processor_cache_type", "mm_shm_cache_max_object_size_mb"),
        *("mm_encoder_tp_mode", "mm_encoder_fp8_scale_save_path", "mm_tensor_ipc"),
        *("mm_encoder_fp8_scale_save_margin", "mm_ipc_gpu_memory_gb"),
        "allow_missing_mm_embeddings",
    }
)
_CACHE_WITHOUT_EFFECT = frozenset(
    {
        # Sizes and layout of blocks are in kvtier's configuration.
        *("block_size", "user_specified_block_size", "user_specified_mamba_block_size"),
        *("_block_size_resolved", "kv_cache_layout", "effective_attention_block_size"),
        *("prefix_match_unit", "hash_block_size", "cache_hit_alignment_tokens"),
        # Not needed: a different algorithm gives different hashes, and so different keys.
        *("enable_prefix_caching", "prefix_caching_hash_algo", "prefix_cache_retention_interval"),
        "enable_mamba_shared_prefix_checkpoint",
        # Sizes of the cache.
        *("gpu_memory_utilization", "num_gpu_blocks_override", "num_gpu_blocks", "num_cpu_blocks"),
        *("kv_cache_size_tokens", "kv_cache_max_concurrency", "kv_cache_memory_bytes"),
        *("kv_offloading_size", "kv_offloading_backend", "is_attention_free"),
    }
)
_KERNELS_WITHOUT_EFFECT = frozenset(
    {
        *("enable_flashinfer_autotune", "enable_cutedsl_warmup", "enable_jit_warmup"),
        *("enable_rocm_segmented_attn_autotune", "ir_op_priority"),
    }
)
_LOADS_SAFETENSORS = frozenset({"fastsafetensors", "instanttensor", "safetensors"})
_HF_WITHOUT_EFFECT = frozenset(
    {"_name_or_path", "name_or_path", "_commit_hash", "transformers_version"}
)

_ENVIRONMENT_WITH_EFFECT = re.compile(
    "ATTN|ATTENTION|MLA|KV_CACHE_LAYOUT|SSM|LAYER_PARTITION|MODEL_RUNNER"
    "|SCALE|QUANT|FP4|FP8|INT4|INT8|E8M0|DTYPE|PRECISION|EMULATION|MARLIN|HUMMING"
    "|MOE|ROUTING|GEMM|KERNEL|ROCM|AWQ|BATCH_INVARIANT|REPLICATE_EMBED|VIDEO_LOADER"
)
"""Parts of the names of vLLM's environment variables that change how keys and values are computed
or where they lie."""


class Variant(NamedTuple):
    """The variant in two forms, both made from the same values."""

    text: str
    """Its main points in words, then a digest of everything."""
    settings: tuple[tuple[str, Scalar], ...]
    """Everything by name; see `OffloadingModelConfig.settings`."""


def variant_of(vllm_config: Any) -> Variant:
    """The variant of the model that an engine has loaded. Never raises."""
    model = vllm_config.model_config
    cache = vllm_config.cache_config
    release, device = _vllm_release(), _device()
    parts = {
        "vllm": release,
        "max_model_len": _max_model_len(model),
        "device": device,
        "plugins": _plugins(),
        "model": _fields_of(model, _MODEL_WITHOUT_EFFECT),
        "files": _choice_of_files(vllm_config.load_config),
        "runner": [getattr(model, "runner_type", None), getattr(model, "convert_type", None)],
        "hf_config": getattr(model, "hf_config", None),
        "hf_text_config": getattr(model, "hf_text_config", None),
        "transformers": _transformers_release(model),
        "multimodal": _fields_of(
            getattr(model, "multimodal_config", None), _MULTIMODAL_WITHOUT_EFFECT
        ),
        "cache": _fields_of(cache, _CACHE_WITHOUT_EFFECT),
        "scales": _scales(vllm_config),
        "attention": getattr(vllm_config, "attention_config", None),
        "mamba": getattr(vllm_config, "mamba_config", None),
        "diffusion": getattr(vllm_config, "diffusion_config", None),
        "kernels": _fields_of(getattr(vllm_config, "kernel_config", None), _KERNELS_WITHOUT_EFFECT),
        "additional": getattr(vllm_config, "additional_config", None),
        # Which rank holds which token of a block.
        "interleaving": {
            name: getattr(vllm_config.parallel_config, name, None)
            for name in ("cp_kv_cache_interleave_size", "dcp_kv_cache_interleave_size")
        },
        "draft": _draft(vllm_config),
        "environment": _environment(),
    }
    stable = {name: _stable(part) for name, part in parts.items()}
    text = json.dumps(stable, sort_keys=True)
    digest = blake2b(text.encode(), digest_size=16).hexdigest()
    dtype = str(getattr(model, "dtype", None)).removeprefix("torch.")
    words = [f"vllm-{release}", device, dtype, f"kv-{cache.cache_dtype}"]
    if quantization := getattr(model, "quantization", None):
        words.append(str(quantization))
    return Variant(" ".join([*words, digest]), tuple(_settings_in(stable)))


def _settings_in(stable: Mapping[str, Any]) -> Iterator[tuple[str, Scalar]]:
    """The parts of a variant by name. One with fields is a digest of all, followed by each field
    that has a value."""
    for name, value in stable.items():
        part = value
        if isinstance(value, list) and len(value) == 2 and isinstance(value[1], dict):
            part = value[1]  # an object, as `_stable` shows it: its type and its attributes
        if not isinstance(part, dict):
            yield name, _shown(name, part)
        elif part:
            yield name, short_digest(part)
            is_repeated = name == "hf_text_config" and value == stable["hf_config"]
            for key, field in () if is_repeated else part.items():
                if field is not None:
                    yield f"{name}.{key}", _shown(key, field, is_foreign=name == "additional")


def _shown(name: str, value: Any, *, is_foreign: bool = False) -> Scalar:
    """A value as people see it; a digest if it may be a secret. `is_foreign`: it belongs to a
    plug-in, whose names say nothing to kvtier."""
    if isinstance(value, list) and all(isinstance(item, str) for item in value):
        value = " ".join(value)
    is_salt = is_foreign or "salt" in name.lower()
    if isinstance(value, str) and (is_salt or without_secrets(value, {name: value}) != value):
        return short_digest(value)
    return short_value(value)


def _fields_of(config: Any, without: Collection[str]) -> dict[str, Any] | None:
    if not is_dataclass(config):
        return None
    return {
        field.name: getattr(config, field.name, None)
        for field in fields(config)
        if field.name not in without
    }


def _vllm_release() -> str:
    """vLLM's version without its local part, which names the device it was built for. A development
    build keeps the local part, which names its commit."""
    import vllm

    version = str(vllm.__version__)
    return version if "dev" in version else version.partition("+")[0]


def _choice_of_files(load: Any) -> str:
    """The format that is loaded: a folder may have the weights in several formats."""
    load_format = str(load.load_format)
    return "safetensors" if load_format in _LOADS_SAFETENSORS else load_format


def _plugins() -> list[str]:
    """Packages that may change vLLM's code, including its models."""
    groups = ("vllm.general_plugins", "vllm.platform_plugins")
    found = (point.dist for group in groups for point in entry_points(group=group))
    return sorted({f"{dist.name}=={dist.version}" for dist in found if dist is not None})


def _device() -> str:
    """Platform and kind of device: they decide which attention backend vLLM chooses, and so the
    layout of pages. In vLLM's CPU backend, the instruction set decides."""
    import torch
    from vllm.platforms import current_platform

    kind = str(getattr(current_platform, "device_type", "unknown"))
    if kind == "cpu":
        sets = {
            "amx": "_is_amx_tile_supported",
            "avx512": "_is_avx512_supported",
            "avx2": "_is_avx2_supported",
        }
        has = [name for name, check in sets.items() if _called(getattr(torch, "cpu", None), check)]
        return "-".join([kind, platform.machine(), *has])
    capability = _called(current_platform, "get_device_capability")
    if capability is not None:
        return f"{kind}-{'.'.join(map(str, capability))}"
    return f"{kind}-{_called(current_platform, 'get_device_name')}"


def _called(owner: Any, method: str) -> Any:
    """The result of a method of vLLM, torch or transformers; None if it does not exist or
    raises."""
    try:
        return getattr(owner, method)()
    except Exception:
        return None


def _max_model_len(model: Any) -> object:
    """The longest prompt in tokens, which decides the RoPE or attention of some models. "auto" if
    vLLM chooses the length by the free memory: it does that after it has built the model, so the
    length has no effect."""
    if getattr(model, "original_max_model_len", None) == -1:
        return "auto"
    return getattr(model, "max_model_len", None)


def _transformers_release(model: Any) -> str | None:
    """The version of transformers, if the model's code comes from there."""
    if _called(model, "using_transformers_backend") is False:
        return None
    return str(getattr(sys.modules.get("transformers"), "__version__", None))


def _scales(vllm_config: Any) -> object:
    """The id of the engine, which no other engine has, if the engine derives scales of its own;
    else None."""
    if not has_scales_of_its_own(vllm_config):
        return None
    return getattr(getattr(vllm_config, "kv_transfer_config", None), "engine_id", None)


def _draft(vllm_config: Any) -> object:
    """The configuration of a draft model, because its layers share blocks with those of the model.
    Its weights do not count: vLLM verifies the tokens that the draft model proposes."""
    speculative = getattr(vllm_config, "speculative_config", None)
    draft = getattr(speculative, "draft_model_config", None)
    if draft is None or draft is vllm_config.model_config:
        return None
    return [
        getattr(speculative, "method", None),
        getattr(speculative, "kv_cache_dtype", None),
        _fields_of(draft, _MODEL_WITHOUT_EFFECT),
        getattr(draft, "hf_config", None),
    ]


def _environment() -> dict[str, str]:
    """Environment variables with an effect. Only vLLM's own variables count, because a cluster may
    set others with similar names."""
    from vllm import envs

    known = getattr(envs, "environment_variables", {})
    return {
        name: value
        for name, value in os.environ.items()
        if name in known and _ENVIRONMENT_WITH_EFFECT.search(name)
    }


_MAX_NAMED_FILE = 16 << 20
"""If a setting is the path of a file of at most this number of bytes, the file's content counts
instead of the path."""


def _stable(value: Any, within: tuple[int, ...] = ()) -> Any:
    """The value as JSON types, the same in every process: without addresses, and with sets sorted.

    `within`: the ids of the objects that contain the value, to detect a reference back to one.
    """
    if value is None or isinstance(value, bool | str):
        return value
    name = f"{type(value).__module__}.{type(value).__qualname__}"
    if id(value) in within:
        return name
    within = (*within, id(value))
    if isinstance(value, Enum):
        return [name, value.name]
    if isinstance(value, Number | Path) or name in ("torch.dtype", "torch.device"):
        return str(value)
    if isinstance(value, bytes | bytearray):
        return blake2b(value, digest_size=16).hexdigest()
    if isinstance(value, Mapping):
        return _stable_items(value, within)
    if isinstance(value, list | tuple):
        return [_stable(item, within) for item in value]
    if isinstance(value, set | frozenset):
        return sorted(json.dumps(_stable(item, within), sort_keys=True) for item in value)
    if isinstance(value, type) or callable(value):
        return f"{getattr(value, '__module__', '')}.{getattr(value, '__qualname__', name)}"
    return [name, _stable_items(_attributes_of(value), within)]


def _attributes_of(value: Any) -> Mapping[Any, Any]:
    """The attributes of an object: a configuration of transformers, a data class, or any other."""
    if isinstance(as_dict := _called(value, "to_dict"), Mapping):
        return as_dict
    as_fields = _fields_of(value, ())
    return getattr(value, "__dict__", {}) if as_fields is None else as_fields


def _stable_items(items: Mapping[Any, Any], within: tuple[int, ...]) -> dict[str, Any]:
    return {
        _stable_key(key, within): _stable_item(key, value, within)
        for key, value in items.items()
        if key not in _HF_WITHOUT_EFFECT
    }


def _stable_key(key: Any, within: tuple[int, ...]) -> str:
    return key if isinstance(key, str) else json.dumps(_stable(key, within), sort_keys=True)


def _stable_item(key: Any, value: Any, within: tuple[int, ...]) -> Any:
    """The value of one key. For the path of a small file: a digest of the file's content."""
    if key == "auto_map":
        # Leave out the repository of the code: it is here only if the user named the model by its
        # repository, not by a folder.
        return sorted(text.rpartition("--")[2] for text in texts_in(value))
    if isinstance(value, str) and str(key).endswith(("_file", "_path")):
        path = Path(value)
        try:
            if path.is_file() and path.stat().st_size <= _MAX_NAMED_FILE:
                return blake2b(path.read_bytes(), digest_size=16).hexdigest()
        except (OSError, ValueError):
            return value
    return _stable(value, within)


def texts_in(value: object) -> Iterator[str]:
    """All strings in a value of a configuration, at any depth."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, Mapping):
        yield from texts_in(list(value.values()))
    elif isinstance(value, Iterable):
        for item in value:
            yield from texts_in(item)
