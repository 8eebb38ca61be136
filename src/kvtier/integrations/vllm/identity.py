"""Who is this model? What has to be the same so that two engines may share blocks.

Two answers. The *revision* says which weights were loaded: a commit of the hub, or a digest of all
local files. Where neither can be had, it says why, and a tier that outlives the process asks for
`cache_namespace`. The *variant* says what else decides which bytes a prompt gives: the
configuration that vLLM really uses, RoPE overrides included, types, quantization, the platform.

Whatever is not known to be without effect is taken in: at worst, engines that might share do not.
Attributes that a release of vLLM lacks are passed over.
"""

from __future__ import annotations

import json
import multiprocessing
import os
import platform
import re
import sys
import time
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, fields, is_dataclass
from enum import Enum
from glob import glob
from hashlib import blake2b
from importlib import import_module
from importlib.metadata import entry_points
from numbers import Number
from pathlib import Path
from typing import Any

from kvtier.integrations.vllm.weight_files import (
    DigestMemory,
    UnknownWeightsError,
    digest_of_files,
    model_files,
)

__all__ = ["ModelIdentity", "identity_of", "variant_of"]


@dataclass(frozen=True, slots=True)
class ModelIdentity:
    """What a model's blocks may be shared by."""

    revision: str | None
    """Which weights: `hub:` and a commit, or `files:` and a digest. None: not known."""
    unknown_because: str | None
    """Why there is no revision, in one clause."""
    variant: str
    """Everything else that decides which bytes a prompt gives. Stable across processes."""


def identity_of(vllm_config: Any, *, digest_files: bool) -> ModelIdentity:
    """Identify the model that an engine has loaded.

    Called once in the scheduler's process, while the engine starts, when the workers have loaded
    the weights. `digest_files`: whether local files may be read in full, which takes a while the
    first time. Never raises for what a configuration or a file system may hold.
    """
    variant = variant_of(vllm_config)
    try:
        return ModelIdentity(_revision(vllm_config, digest_files), None, variant)
    except UnknownWeightsError as error:
        return ModelIdentity(None, str(error), variant)
    except OSError as error:
        return ModelIdentity(None, f"the weights cannot be looked at: {error}", variant)


# --- the revision -------------------------------------------------------------------------------

_COMMIT = re.compile("[0-9a-f]{40}")
_BLOB = re.compile("[0-9a-f]{40}|[0-9a-f]{64}")

_LOADS_FILES = frozenset(
    {
        "auto",
        "bitsandbytes",
        "fastsafetensors",
        "hf",
        "instanttensor",
        "mistral",
        "pt",
        "runai_streamer",
        "runai_streamer_sharded",
        "safetensors",
        "sharded_state",
    }
)
"""Load formats of vLLM whose weights are the files of the model's folder, and nothing else."""
_NOT_FILES = {
    "dummy": "the weights are random (load_format is dummy)",
    "ipc_cache": "the weights come from a cache daemon, which may have loaded them long ago",
    "modelexpress": "the weights come from other engines (load_format is modelexpress)",
    "npcache": "load_format npcache keeps its own copy of the weights",
}
_LOADING_ONLY = frozenset(
    {
        "concurrency",
        "distributed",
        "enable_multithread_load",
        "enable_weights_track",
        "memory_limit",
        "num_threads",
        "pattern",
    }
)
"""Keys of `model_loader_extra_config` that do not bring in other weights."""

_LINK_SLACK_S = 2.0


def _revision(vllm_config: Any, digest_files: bool) -> str:
    model, load = vllm_config.model_config, vllm_config.load_config
    if getattr(vllm_config, "lora_config", None) is not None:
        # 0.26 and 0.28 put the adapter's name into a block's hash, 0.32 its path, too.
        raise UnknownWeightsError(
            "LoRA is enabled, and hashes of blocks name an adapter without saying which weights "
            "it has"
        )
    if _has_scales_of_its_own(vllm_config):
        raise UnknownWeightsError(
            "calculate_kv_scales takes the cache's scales from the first requests, so that blocks "
            "mean nothing to another process"
        )
    _refuse_other_sources(model)
    _refuse_floating_code(model)
    if load.load_format == "tensorizer":
        return _digest(_tensorizer_files(load.model_loader_extra_config), digest_files)
    _refuse_other_loaders(load)
    folder = Path(model.model)
    if not folder.is_dir():
        return _hub_revision(model, load, digest_files)
    folder = folder.resolve()
    if _is_snapshot(folder) and _is_as_downloaded(folder):
        return f"hub:{folder.name}"
    return _digest(model_files(folder), digest_files)


def _has_scales_of_its_own(vllm_config: Any) -> bool:
    return bool(getattr(vllm_config.cache_config, "calculate_kv_scales", False))


def _digest(files: Mapping[str, Path], digest_files: bool) -> str:
    if not digest_files:
        raise UnknownWeightsError("the weight files were not read, as cache_namespace is given")
    digest = digest_of_files(
        files, DigestMemory.of_the_user(), unchanged_since=_engine_process_started()
    )
    return f"files:{digest}"


def _refuse_other_loaders(load: Any) -> None:
    load_format = load.load_format
    if load_format in _NOT_FILES:
        raise UnknownWeightsError(_NOT_FILES[load_format])
    # A plug-in that replaces a loader has imported this; nobody else needs to.
    module = sys.modules.get("vllm.model_executor.model_loader")
    loader = getattr(module, "_LOAD_FORMAT_TO_MODEL_LOADER", {}).get(load_format)
    is_vllms = loader is None or loader.__module__.startswith("vllm.")
    if load_format not in _LOADS_FILES or not is_vllms:
        raise UnknownWeightsError(
            f"the weights are loaded by load_format {load_format}, which kvtier does not know"
        )
    extra = load.model_loader_extra_config
    unknown = sorted(set(extra) - _LOADING_ONLY) if isinstance(extra, Mapping) else ["a value"]
    if unknown:
        raise UnknownWeightsError(
            f"model_loader_extra_config has {', '.join(unknown)}, which kvtier does not know"
        )


def _refuse_other_sources(model: Any) -> None:
    """Weights that are neither in the model's folder nor in its repository."""
    for place in (getattr(model, "model_weights", ""), model.model):
        if "://" in str(place):
            raise UnknownWeightsError("the weights come from an object store")
    others = [
        key
        for key, value in getattr(model.hf_config, "__dict__", {}).items()
        if key.endswith("_model_id") and isinstance(value, str) and value
    ]
    if others:
        raise UnknownWeightsError(
            f"the model takes weights from other repositories, too ({', '.join(sorted(others))} "
            "in its configuration)"
        )


def _refuse_floating_code(model: Any) -> None:
    """A model's own code is part of its folder or commit, unless it comes from elsewhere."""
    auto_map = getattr(model.hf_config, "auto_map", None)
    code_revision = getattr(model, "code_revision", None)
    if not getattr(model, "trust_remote_code", False) or not auto_map or _is_commit(code_revision):
        return
    repositories = {name.partition("--")[0] for name in _texts_in(auto_map) if "--" in name} - {
        model.model
    }
    if repositories or code_revision or getattr(model, "hf_config_path", None):
        raise UnknownWeightsError(
            "the model's code comes from another repository or from a branch; give its commit "
            "with --code-revision"
        )


def _texts_in(value: object) -> Iterator[str]:
    if isinstance(value, str):
        yield value
    elif isinstance(value, Mapping):
        yield from _texts_in(list(value.values()))
    elif isinstance(value, Iterable):
        for item in value:
            yield from _texts_in(item)


def _tensorizer_files(extra: Any) -> dict[str, Path]:
    settings = extra.get("tensorizer_config", extra) if isinstance(extra, Mapping) else {}
    folder = settings.get("tensorizer_dir")
    uri = settings.get("tensorizer_uri") or (f"{folder}/model.tensors" if folder else "")
    # With tensor parallelism, the number of the rank is part of the name.
    paths = [Path(path) for path in glob(re.sub(r"%\d*d", "*", uri))]
    if not paths:
        raise UnknownWeightsError("tensorizer loads the weights from elsewhere than local files")
    return {path.name: path for path in paths}


def _is_commit(text: object) -> bool:
    return isinstance(text, str) and _COMMIT.fullmatch(text) is not None


def _is_snapshot(folder: Path) -> bool:
    """Whether it is a commit in a hub cache; that is also where vLLM points, when offline, the
    name of a model."""
    return (
        _is_commit(folder.name)
        and folder.parent.name == "snapshots"
        and folder.parent.parent.name.startswith("models--")
    )


def _is_as_downloaded(snapshot: Path) -> bool:
    """Whether all files are what the hub client has put there: links to files that are named
    after their content, and that were not written to after the link was made."""
    blobs = snapshot.parent.parent / "blobs"
    for path in model_files(snapshot).values():
        if not path.is_symlink():
            return False
        blob = Path(os.path.normpath(path.parent / path.readlink()))
        if blob.parent != blobs or not _BLOB.fullmatch(blob.name):
            return False
        if blob.stat().st_mtime > path.lstat().st_mtime + _LINK_SLACK_S:
            return False
    return True


def _hub_revision(model: Any, load: Any, digest_files: bool) -> str:
    """Of a model that was given by its name in the hub."""
    if os.environ.get("VLLM_USE_MODELSCOPE", "").lower() in ("1", "true"):
        raise UnknownWeightsError("ModelScope does not say which commit it has given")
    hub = import_module("huggingface_hub.constants")
    cache = Path(getattr(load, "download_dir", None) or hub.HF_HUB_CACHE)
    # Links are resolved, as they are in the path of a folder.
    repository = (cache / f"models--{model.model.replace('/', '--')}").resolve()
    revision = str(getattr(model, "revision", None) or "main")
    commit = revision if _is_commit(revision) else _commit_of_branch(repository, revision)
    snapshot = repository / "snapshots" / commit
    if not snapshot.is_dir() or _is_as_downloaded(snapshot):
        return f"hub:{commit}"
    return _digest(model_files(snapshot), digest_files)


def _commit_of_branch(repository: Path, branch: str) -> str:
    """What the hub client notes where a branch or tag was when it last asked.

    That is what was loaded, unless it has moved between then and now, or could not be noted. With
    a single commit in the cache, there is nothing to mix up.
    """
    note = repository / "refs" / branch
    try:
        commit = note.read_text().strip()
        noted_at = note.stat().st_mtime
        commits = sum(1 for _ in (repository / "snapshots").iterdir())
    except OSError as error:
        raise UnknownWeightsError(
            f"the cache of the hub does not say which commit {branch} is; give it with --revision"
        ) from error
    is_old = noted_at < _process_started() and os.access(note, os.W_OK)
    if not _is_commit(commit) or (commits > 1 and not is_old):
        raise UnknownWeightsError(
            f"{branch} may have moved to another commit while the engine started; start it again, "
            "or give the commit with --revision"
        )
    return commit


def _engine_process_started() -> float | None:
    """Since when weights may have been loaded; None: not known.

    vLLM starts a process for an engine. Without (`VLLM_ENABLE_V1_MULTIPROCESSING=0`), the same
    process may have written the weights before it loaded them.
    """
    return None if multiprocessing.parent_process() is None else _process_started()


def _process_started() -> float:
    """In seconds since the epoch."""
    ticks = int(Path("/proc/self/stat").read_text().rpartition(")")[2].split()[19])
    booted = time.time() - time.clock_gettime(time.CLOCK_BOOTTIME)
    return booted + ticks / os.sysconf("SC_CLK_TCK")


# --- the variant --------------------------------------------------------------------------------

_MODEL_WITHOUT_EFFECT = frozenset(
    {
        # Which model it is: the revision says that.
        *("model", "model_weights", "revision", "hf_config_path", "config_format", "hf_token"),
        *("served_model_name", "trust_remote_code", "allow_deprecated_quantization"),
        # Taken in as they are after all overrides.
        *("hf_config", "hf_text_config", "hf_overrides", "multimodal_config", "runner", "convert"),
        *("max_model_len", "spec_target_max_model_len", "is_submodel_config"),
        # How text becomes tokens, and what is made of the outcome.
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
        # kvtier's configuration has the sizes and the layout of blocks.
        *("block_size", "user_specified_block_size", "user_specified_mamba_block_size"),
        *("_block_size_resolved", "kv_cache_layout", "effective_attention_block_size"),
        *("prefix_match_unit", "hash_block_size", "cache_hit_alignment_tokens"),
        # Another algorithm gives other hashes.
        *("enable_prefix_caching", "prefix_caching_hash_algo", "prefix_cache_retention_interval"),
        "enable_mamba_shared_prefix_checkpoint",
        # How much there is.
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
_HF_WITHOUT_EFFECT = frozenset(
    {"_name_or_path", "name_or_path", "_commit_hash", "transformers_version"}
)

_ENVIRONMENT_WITH_EFFECT = re.compile(
    "ATTN|ATTENTION|MLA|KV_CACHE_LAYOUT|SSM|LAYER_PARTITION|MODEL_RUNNER"
    "|SCALE|QUANT|FP4|FP8|INT4|INT8|E8M0|DTYPE|PRECISION|EMULATION|MARLIN|HUMMING"
    "|MOE|ROUTING|GEMM|KERNEL|ROCM|AWQ|BATCH_INVARIANT|REPLICATE_EMBED|VIDEO_LOADER"
)
"""In names of vLLM's environment variables: where keys and values lie, and how they are made."""


def variant_of(vllm_config: Any) -> str:
    """Everything but the weights that decides which bytes a prompt gives: the main points, then a
    digest of all. Never raises."""
    model = vllm_config.model_config
    cache = vllm_config.cache_config
    release, device = _vllm_release(), _device()
    parts = {
        "vllm": release,
        "plugins": _plugins(),
        "device": device,
        "model": _fields_of(model, _MODEL_WITHOUT_EFFECT),
        "runner": [getattr(model, "runner_type", None), getattr(model, "convert_type", None)],
        "max_model_len": _max_model_len(model),
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
        "draft": _draft(vllm_config),
        "environment": _environment(),
    }
    text = json.dumps(_stable(parts), sort_keys=True)
    digest = blake2b(text.encode(), digest_size=16).hexdigest()
    dtype = str(getattr(model, "dtype", None)).removeprefix("torch.")
    words = [f"vllm-{release}", device, dtype, f"kv-{cache.cache_dtype}"]
    if quantization := getattr(model, "quantization", None):
        words.append(str(quantization))
    return " ".join([*words, digest])


def _fields_of(config: Any, without: Collection[str]) -> dict[str, Any] | None:
    if not is_dataclass(config):
        return None
    return {
        field.name: getattr(config, field.name, None)
        for field in fields(config)
        if field.name not in without
    }


def _vllm_release() -> str:
    """Without the local part, which says for which device it was built; a build of the moment
    keeps it, as it stands for the code."""
    import vllm

    version = str(vllm.__version__)
    return version if "dev" in version else version.partition("+")[0]


def _plugins() -> list[str]:
    """Packages that may add to vLLM's code, models included."""
    groups = ("vllm.general_plugins", "vllm.platform_plugins")
    found = (point.dist for group in groups for point in entry_points(group=group))
    return sorted({f"{dist.name}=={dist.version}" for dist in found if dist is not None})


def _device() -> str:
    """The platform, and which of its devices: attention backends, and with them the layout of
    pages, are chosen by it. vLLM's CPU backend chooses by the instruction set."""
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
    """What the method gives; None where there is none, or it raises: these are others' methods."""
    try:
        return getattr(owner, method)()
    except Exception:
        return None


def _max_model_len(model: Any) -> object:
    """Some models choose their RoPE, or how they attend, by it. Where vLLM fits it to the memory,
    models were built before."""
    if getattr(model, "original_max_model_len", None) == -1:
        return "auto"
    return getattr(model, "max_model_len", None)


def _transformers_release(model: Any) -> str | None:
    """Where the model's code is that of transformers."""
    if _called(model, "using_transformers_backend") is False:
        return None
    return str(getattr(sys.modules.get("transformers"), "__version__", None))


def _scales(vllm_config: Any) -> object:
    """Scales that are found while running belong to one engine alone, whose id is always new."""
    if not _has_scales_of_its_own(vllm_config):
        return None
    return getattr(getattr(vllm_config, "kv_transfer_config", None), "engine_id", None)


def _draft(vllm_config: Any) -> object:
    """A draft model's layers share blocks with the model's own. Of its weights nothing is said:
    tokens that a draft proposes are checked, so they are right with any."""
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
    """Only variables that vLLM knows: a cluster may set others that begin like these."""
    from vllm import envs

    known = getattr(envs, "environment_variables", {})
    return {
        name: value
        for name, value in os.environ.items()
        if name in known and _ENVIRONMENT_WITH_EFFECT.search(name)
    }


_MAX_NAMED_FILE = 16 << 20


def _stable(value: Any, within: tuple[int, ...] = ()) -> Any:
    """The value in terms of JSON, the same in every process: no addresses, no order of sets.

    `within`: the ids of what it is part of, as objects may refer back to their owners.
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
    if isinstance(as_dict := _called(value, "to_dict"), Mapping):  # transformers' configurations
        return [name, _stable_items(as_dict, within)]
    as_fields = _fields_of(value, ())
    return [
        name,
        _stable_items(getattr(value, "__dict__", {}) if as_fields is None else as_fields, within),
    ]


def _stable_items(items: Mapping[Any, Any], within: tuple[int, ...]) -> dict[str, Any]:
    return {
        _stable_key(key, within): _stable_item(key, value, within)
        for key, value in items.items()
        if key not in _HF_WITHOUT_EFFECT
    }


def _stable_key(key: Any, within: tuple[int, ...]) -> str:
    return key if isinstance(key, str) else json.dumps(_stable(key, within), sort_keys=True)


def _stable_item(key: Any, value: Any, within: tuple[int, ...]) -> Any:
    """A small file that a configuration names counts by what is in it."""
    if key == "auto_map":
        # Which repository code comes from is written here only when it was asked for by name.
        return sorted(text.rpartition("--")[2] for text in _texts_in(value))
    if isinstance(value, str) and str(key).endswith(("_file", "_path")):
        path = Path(value)
        try:
            if path.is_file() and path.stat().st_size <= _MAX_NAMED_FILE:
                return blake2b(path.read_bytes(), digest_size=16).hexdigest()
        except (OSError, ValueError):
            return value
    return _stable(value, within)
