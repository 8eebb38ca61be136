"""Who is this model? What has to be the same so that two engines may share blocks.

Two answers. The *revision* says which weights were loaded. Where that cannot be told, it says why,
and a tier that outlives the process asks for `cache_namespace`. The *variant* says what else
decides which bytes a prompt gives.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from kvtier.integrations.vllm.revision import revision_of
from kvtier.integrations.vllm.variant import variant_of
from kvtier.integrations.vllm.weight_files import UnknownWeightsError

__all__ = ["ModelIdentity", "identity_of"]


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
        return ModelIdentity(revision_of(vllm_config, digest_files), None, variant)
    except UnknownWeightsError as error:
        return ModelIdentity(None, str(error), variant)
    except OSError as error:
        return ModelIdentity(None, f"the weights cannot be looked at: {error}", variant)
