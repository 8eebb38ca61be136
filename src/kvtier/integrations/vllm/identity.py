"""What two engines must have in common to find each other's blocks in a lasting tier: one that
outlives the process, or that other machines reach.

- The *revision*: which weights were loaded, as a commit of the hub or a digest of all local files.
  If kvtier cannot be certain, it records the reason instead of a revision, and a lasting tier
  requires `cache_namespace`.
- The *variant*: everything else that decides which KV-cache bytes a prompt gets (`variant.py`).
- The *root of the block hashes*. vLLM chains a block's hash to the hash of the block before, and
  the first block's hash to a root that every process makes by hashing a seed. Without
  `PYTHONHASHSEED`, the root is random for hash algorithms that vLLM considers too weak for a known
  seed, and before vLLM 0.32 for all algorithms. With different roots all answers are right, but
  no process finds another's blocks: a lasting tier would be written but never read. So kvtier
  refuses lasting tiers with a random root.

Revision and variant are part of the fingerprint. The root is not: it does not change the bytes that
a key stands for, it is not known when tiers start, and with a random root every start would leave
behind a namespace whose blocks no later engine evicts.

Importing this module does not import vLLM.
"""

from __future__ import annotations

import logging
import multiprocessing
import os
import re
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from glob import glob
from importlib import import_module
from pathlib import Path
from typing import Any

from kvtier.base import Locality, Medium
from kvtier.config import ConfigError, Problem
from kvtier.config.errors import without_secrets
from kvtier.config.namespace import Scalar
from kvtier.config.options import TierConfig
from kvtier.integrations.vllm.variant import has_scales_of_its_own, texts_in, variant_of
from kvtier.integrations.vllm.weight_files import (
    DigestMemory,
    UnknownWeightsError,
    digest_of_files,
    model_files,
)
from kvtier.tiering.factory import SecondaryTierFactory

__all__ = [
    "HashRoot",
    "HashSeed",
    "ModelIdentity",
    "identity_of",
    "lasting_tiers",
    "random_root_error",
    "log_hash_root",
]

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class ModelIdentity:
    """The model that an engine has loaded. Engines with equal identities can share blocks."""

    revision: str | None
    """`hub:` and a commit, or `files:` and a digest. None: the weights are not known."""
    unknown_because: str | None
    """Why there is no revision, in one clause; None if there is one."""
    variant: str
    """Everything else that decides which KV-cache bytes a prompt gets. Stable across processes."""
    settings: tuple[tuple[str, Scalar], ...] = ()
    """The same by name, for people."""
    title: str = ""
    """What people call the model."""


def identity_of(vllm_config: Any, *, digest_files: bool) -> ModelIdentity:
    """Identify the model that an engine has loaded.

    Called once in the scheduler's process while the engine starts, after the workers have loaded
    the weights. `digest_files`: True if local files may be read in full. The first time, that takes
    a while. Does not raise for any configuration or state of the file system.
    """
    revision = unknown_because = None
    try:
        revision = _revision_of(vllm_config, digest_files)
    except UnknownWeightsError as error:
        unknown_because = str(error)
    except OSError as error:
        unknown_because = f"the weight files cannot be read: {error}"
    variant = variant_of(vllm_config)
    title = _title_of(str(vllm_config.model_config.model))
    return ModelIdentity(revision, unknown_because, variant.text, variant.settings, title)


def _title_of(name: str) -> str:
    """What people call a model: its name in the hub, also if vLLM was given its folder in a hub
    cache; else the path of its folder, or the URL without secrets."""
    folder = Path(name)
    if _is_snapshot(folder):
        return folder.parent.parent.name.removeprefix("models--").replace("--", "/")
    return without_secrets(name, {})


# --- the weights --------------------------------------------------------------------------------

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
"""Load formats of vLLM that take all weights from files of the model's folder."""
_NOT_FILES = {
    "dummy": "the weights are random (load_format is dummy)",
    "ipc_cache": "the weights come from a cache daemon, which may have loaded them long ago",
    "modelexpress": "the weights come from other engines (load_format is modelexpress)",
    "npcache": "load_format npcache keeps its own copy of the weights",
}
"""Load formats that take weights from elsewhere, and what to tell the user."""
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
"""Keys of `model_loader_extra_config` that do not change which weights are loaded."""

_LINK_SLACK_S = 2.0
"""Seconds by which a downloaded file may be newer than the link to it."""


def _revision_of(vllm_config: Any, digest_files: bool) -> str:
    """The revision of the loaded weights. Raises `UnknownWeightsError` with the reason in one
    clause, or `OSError`."""
    model, load = vllm_config.model_config, vllm_config.load_config
    if getattr(vllm_config, "lora_config", None) is not None:
        # vLLM 0.26 and 0.28 put the adapter's name into a block's hash, 0.32 its path as well.
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
        raise UnknownWeightsError(
            "the weight files were not read: no tier needs that, or cache_namespace is given"
        )
    digest = digest_of_files(
        files, DigestMemory.of_the_user(), unchanged_since=_engine_process_started()
    )
    return f"files:{digest}"


def _refuse_other_loaders(load: Any) -> None:
    load_format = load.load_format
    if load_format in _NOT_FILES:
        raise UnknownWeightsError(_NOT_FILES[load_format])
    # Do not import vLLM's module: a plug-in that replaces a loader has imported it already.
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
    """Raise if weights come from outside the model's folder or repository."""
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
    """Raise if the model's own code comes from a repository or branch that may change. Code in the
    model's folder or commit is covered by the revision."""
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
    """True if this folder is a commit in a hub cache. When vLLM is offline, it replaces the name of
    a model by such a folder."""
    return (
        _is_commit(folder.name)
        and folder.parent.name == "snapshots"
        and folder.parent.parent.name.startswith("models--")
    )


def _is_as_downloaded(snapshot: Path) -> bool:
    """True if all files are as the hub client wrote them: links to files that have a digest as
    their name and were not written to after the link was made."""
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
    """The revision of a model that was given by its name in the hub."""
    if os.environ.get("VLLM_USE_MODELSCOPE", "").lower() in ("1", "true"):
        raise UnknownWeightsError("ModelScope does not say which commit it has given")
    hub = import_module("huggingface_hub.constants")
    cache = Path(getattr(load, "download_dir", None) or hub.HF_HUB_CACHE)
    # Resolve links, as `_revision_of` does for a local folder, so that a model gets the same
    # revision whether it is given by its name in the hub or by its folder in the cache.
    repository = (cache / f"models--{model.model.replace('/', '--')}").resolve()
    revision = str(getattr(model, "revision", None) or "main")
    commit = revision if _is_commit(revision) else _commit_of_branch(repository, revision)
    snapshot = repository / "snapshots" / commit
    if not snapshot.is_dir() or _is_as_downloaded(snapshot):
        return f"hub:{commit}"
    return _digest(model_files(snapshot), digest_files)


def _commit_of_branch(repository: Path, branch: str) -> str:
    """The commit that the hub client recorded for a branch or tag when it last asked the hub.

    That commit was loaded, unless the branch moved while the engine started, or the client could
    not record a newer commit that it loaded. Raises if either is possible and the cache holds
    several commits.
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
    """When the engine's own process started, in seconds since the epoch: no weights were loaded
    earlier. None: the engine has no process of its own, so files that were written after the start
    of this process may still be the ones that were loaded.

    vLLM normally starts a process for each engine. With `VLLM_ENABLE_V1_MULTIPROCESSING=0` it does
    not.
    """
    return None if multiprocessing.parent_process() is None else _process_started()


def _process_started() -> float:
    """When this process was started, in seconds since the epoch."""
    ticks = int(Path("/proc/self/stat").read_text().rpartition(")")[2].split()[19])
    booted = time.time() - time.clock_gettime(time.CLOCK_BOOTTIME)
    return booted + ticks / os.sysconf("SC_CLK_TCK")


# --- the root of the block hashes ---------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class HashSeed:
    """The text that a process hashes to get its root."""

    given: str | None
    """The value of `PYTHONHASHSEED`; None: it is not set."""
    default: str | None
    """The seed that this vLLM uses if `PYTHONHASHSEED` is not set; None: it draws a random one."""

    @property
    def text(self) -> str | None:
        """The seed in effect; None: the root is random."""
        return self.default if self.given is None else self.given


@dataclass(frozen=True, slots=True)
class HashRoot:
    """The root of this process's block hashes."""

    value: bytes
    seed: HashSeed
    algorithms: Mapping[str, Callable[[Any], bytes]]
    """The hash functions that vLLM may have used, by name."""

    @property
    def algorithm(self) -> str | None:
        """The algorithm that gives this root for the seed; None: the root is random."""
        if self.seed.text is None:
            return None
        for name, algorithm in self.algorithms.items():
            try:
                if algorithm(self.seed.text) == self.value:
                    return name
            except ImportError:  # its package is not installed, so vLLM did not use it
                continue
        return None

    @property
    def title(self) -> str:
        """A few words that are the same in all engines with the same root and algorithm. The start
        of the root stands for the seed, which some users keep secret."""
        source = "vLLM's own seed" if self.seed.given is None else "the seed in PYTHONHASHSEED"
        return f"{self.value[:4].hex()} ({self.algorithm}, {source})"


def lasting_tiers(tiers: Sequence[TierConfig]) -> list[str]:
    """The types of the tiers in which another process could find the blocks of this process. Raises
    `ConfigError` for a tier that cannot be made."""
    return [
        planned.config.type
        for planned in SecondaryTierFactory.plan_secondary_tiers(tiers)
        if planned.tier_cls.medium is Medium.STORAGE
        or Locality.REMOTE in (planned.config.locality, getattr(planned.tier_cls, "locality", None))
    ]


def random_root_error(tiers: Sequence[str], default_seed: str | None) -> ConfigError:
    """The error for an engine that has lasting tiers of these types and a random root.

    `default_seed`: see `HashSeed.default`.
    """
    by_seed = "set PYTHONHASHSEED to the same number for every engine, such as PYTHONHASHSEED=0"
    remedy = (
        f"{by_seed[0].upper()}{by_seed[1:]}"
        if default_seed is None
        else f"Start vLLM with --prefix-caching-hash-algo sha256_cbor; or {by_seed}"
    )
    return ConfigError(
        Problem(
            "PYTHONHASHSEED",
            "nothing, and vLLM draws a random seed for its block hashes without it: no other "
            f"process would find blocks that this one stores in {', '.join(tiers)}, nor would this "
            "engine after a restart",
            "block hashes that are the same in every process, when a tier outlives the process",
            remedy,
        )
    )


def log_hash_root(root: HashRoot, tiers: Sequence[str]) -> None:
    """Log the root, so that operators can compare engines that should share blocks in these types
    of tiers. Raises `ConfigError` for a random root. Called once per engine, on the scheduler
    thread."""
    if root.algorithm is None:
        raise random_root_error(tiers, root.seed.default)
    logger.info(
        "the root of the block hashes begins with %s: engines find each other's blocks in %s only "
        "if all of them log the same root",
        root.title,
        ", ".join(tiers),
    )
