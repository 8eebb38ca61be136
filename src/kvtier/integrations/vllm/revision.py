"""Which weights were loaded: a commit of the hub, or a digest of all local files.

What cannot be told for certain is not known: then a tier that outlives the process asks for
`cache_namespace`.
"""

from __future__ import annotations

import multiprocessing
import os
import re
import sys
import time
from collections.abc import Mapping
from glob import glob
from importlib import import_module
from pathlib import Path
from typing import Any

from kvtier.integrations.vllm.variant import has_scales_of_its_own, texts_in
from kvtier.integrations.vllm.weight_files import (
    DigestMemory,
    UnknownWeightsError,
    digest_of_files,
    model_files,
)

__all__ = ["revision_of"]

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


def revision_of(vllm_config: Any, digest_files: bool) -> str:
    """`hub:` and a commit, or `files:` and a digest of all local files, which takes a while the
    first time. Raises `UnknownWeightsError`, with the reason in one clause, and `OSError`."""
    model, load = vllm_config.model_config, vllm_config.load_config
    if getattr(vllm_config, "lora_config", None) is not None:
        # 0.26 and 0.28 put the adapter's name into a block's hash, 0.32 its path, too.
        raise UnknownWeightsError(
            "LoRA is enabled, and hashes of blocks name an adapter without saying which weights "
            "it has"
        )
    if has_scales_of_its_own(vllm_config):
        raise UnknownWeightsError(
            "calculate_kv_scales takes the cache's scales from the first requests, so that blocks "
            "mean nothing to another process"
        )
    if getattr(vllm_config, "weight_transfer_config", None) is not None:
        raise UnknownWeightsError("a trainer may replace the weights (--weight-transfer-config)")
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
    named = {name.partition("--")[0] for name in texts_in(auto_map) if "--" in name}
    if named - {model.model} or code_revision or getattr(model, "hf_config_path", None):
        raise UnknownWeightsError(
            "the model's code comes from another repository or from a branch; give its commit "
            "with --code-revision"
        )


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
