"""Whether another process gives a block the same hash; and the operator is told.

vLLM chains a block's hash to that of the block before, and the first one to a root that every
process makes for itself, by hashing a seed. With another root, every hash of the process is
another: nothing is wrong, but none finds what the other has stored. The root is random where vLLM
holds its hash algorithm for too weak to have a known seed; in earlier releases, wherever
`PYTHONHASHSEED` is not set.

The root is no part of the fingerprint. It does not change what bytes a key stands for; it is not
known yet when tiers start; and a random one would leave a namespace behind at every start, whose
blocks no later engine would ever evict.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from kvtier.base import Locality, Medium
from kvtier.tiering.base import SecondaryTierManager

__all__ = ["HashRoot", "HashSeed", "lasting_tiers", "tell_about"]

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


def lasting_tiers(tiers: Iterable[SecondaryTierManager]) -> list[str]:
    """The types of those in which another process could find this one's blocks."""
    return [
        tier.tier_type
        for tier in tiers
        if tier.medium is Medium.STORAGE or tier.locality is Locality.REMOTE
    ]


def tell_about(root: HashRoot, tiers: list[str]) -> None:
    """Log, for these types of tiers, what others must have in common with this process; or warn
    that none can. Called once for an engine, on the scheduler thread."""
    algorithm = root.algorithm
    if algorithm is None:
        logger.warning(
            "no other process will find the blocks that this one stores in %s, nor will this "
            "engine after a restart: vLLM has drawn a random seed for its block hashes. %s",
            ", ".join(tiers),
            _remedy(root.seed),
        )
        return
    logger.info(
        "block hashes begin with %s (%s, %s): engines find each other's blocks in %s where this "
        "is the same",
        root.value[:4].hex(),
        algorithm,
        "vLLM's own seed" if root.seed.given is None else "the seed in PYTHONHASHSEED",
        ", ".join(tiers),
    )


def _remedy(seed: HashSeed) -> str:
    by_seed = "set PYTHONHASHSEED to the same number for every engine, such as PYTHONHASHSEED=0"
    if seed.default is None:
        return f"{by_seed[0].upper()}{by_seed[1:]}"
    return f"Start vLLM with --prefix-caching-hash-algo sha256_cbor; or {by_seed}"
