"""Whether another process gives a block the same hash; if not, tiers that outlive this one are
refused.

vLLM chains a block's hash to that of the block before, and the first one to a root that every
process makes for itself, by hashing a seed. With another root, every hash of the process is
another: nothing is wrong, but none finds what the other has stored, and a tier that is written at
every start and never read again only wears out a disk. The root is random where vLLM holds its hash
algorithm for too weak to have a known seed; in earlier releases, wherever `PYTHONHASHSEED` is not
set.

The root is no part of the fingerprint. It does not change what bytes a key stands for; it is not
known yet when tiers start; and a random one would leave a namespace behind at every start, whose
blocks no later engine would ever evict.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from kvtier.base import Locality, Medium
from kvtier.config import ConfigError, Problem
from kvtier.config.options import TierConfig
from kvtier.tiering.factory import SecondaryTierFactory

__all__ = ["HashRoot", "HashSeed", "lasting_tiers", "refuse_random_root", "tell_about"]

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class HashSeed:
    """What a process hashes to get its root, unless it draws one at random."""

    given: str | None
    """`PYTHONHASHSEED`."""
    default: str | None
    """What this vLLM takes without; None: it has none."""

    @property
    def text(self) -> str | None:
        """None: every root is random."""
        return self.default if self.given is None else self.given


@dataclass(frozen=True, slots=True)
class HashRoot:
    """The root of this process, and how it came to be."""

    value: bytes
    seed: HashSeed
    algorithms: Mapping[str, Callable[[Any], bytes]]
    """By name, all that vLLM may have made it with."""

    @property
    def algorithm(self) -> str | None:
        """By which any process comes from the seed to this root; None: it was random."""
        if self.seed.text is None:
            return None
        for name, algorithm in self.algorithms.items():
            try:
                if algorithm(self.seed.text) == self.value:
                    return name
            except ImportError:  # it needs a package that is not installed, so it was not this one
                continue
        return None


def lasting_tiers(tiers: Sequence[TierConfig]) -> list[str]:
    """The types of those in which another process could find this one's blocks; or `ConfigError`,
    if there is a tier that cannot be."""
    return [
        planned.config.type
        for planned in SecondaryTierFactory.plan_secondary_tiers(tiers)
        if planned.tier_cls.medium is Medium.STORAGE
        or Locality.REMOTE in (planned.config.locality, getattr(planned.tier_cls, "locality", None))
    ]


def refuse_random_root(tiers: Sequence[str], default_seed: str | None) -> ConfigError:
    """Why these types of tiers cannot be used by an engine with a random root, and the remedy.

    `default_seed`: what this vLLM takes for an algorithm that needs no secret.
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
            f"process would find what this one stores in {', '.join(tiers)}, nor would this "
            "engine after a restart",
            "block hashes that every process arrives at, when a tier keeps blocks beyond it",
            remedy,
        )
    )


def tell_about(root: HashRoot, tiers: Sequence[str]) -> None:
    """Log, for these types of tiers, what others must have in common with this process; or raise
    `ConfigError`, because none can. Called once for an engine, on the scheduler thread."""
    algorithm = root.algorithm
    if algorithm is None:
        raise refuse_random_root(tiers, root.seed.default)
    logger.info(
        "block hashes begin with %s (%s, %s): engines find each other's blocks in %s where this "
        "is the same",
        root.value[:4].hex(),
        algorithm,
        "vLLM's own seed" if root.seed.given is None else "the seed in PYTHONHASHSEED",
        ", ".join(tiers),
    )
