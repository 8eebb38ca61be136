"""Trials of the mooncake tier: in the configured pool, if it has room, and without lending."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from typing import Any

from kvtier.config.sizes import as_size
from kvtier.tiering.base import TierRefused
from kvtier.tiering.mooncake.admin import MasterAdmin
from kvtier.tiering.mooncake.inspector import plain_client
from kvtier.tiering.mooncake.namespaces import block_names, description_name
from kvtier.tiering.mooncake.options import MooncakeOptions
from kvtier.tiering.mooncake.pool import load_library, require_private_network
from kvtier.tiering.remote.errors import FailureKind, ServerFailure
from kvtier.tiering.remote.manager import namespace_of
from kvtier.tiering.trial import TrialBlocks, TrialProblem

__all__ = ["trial_pool"]

_FULL = 0.9
"""Share of the pool above which the master evicts (-eviction_high_watermark_ratio), by default."""


@contextmanager
def trial_pool(keys: Mapping[str, Any], blocks: TrialBlocks) -> Iterator[Mapping[str, Any]]:
    """Yield the keys of a tier that lends nothing, and remove its blocks at the end. Raises
    `TrialProblem` if the master would have to evict blocks of others."""
    options = MooncakeOptions.parse(keys)
    options.require_fitting()
    try:
        load_library()
        require_private_network(options)
    except TierRefused as refused:
        raise TrialProblem(str(refused), "Do what it says, then try again") from None
    _require_room(options, blocks)
    try:
        yield {**keys, "segment_bytes": 0}
    finally:
        with suppress(ServerFailure), plain_client(options) as client:
            namespace = namespace_of(blocks.fingerprint)
            names = block_names(namespace, blocks.keys)
            client.batch_remove([*names, description_name(namespace)], True)


def _require_room(options: MooncakeOptions, blocks: TrialBlocks) -> None:
    where = options.where
    admin = MasterAdmin.of(options)
    try:
        if admin is None:
            raise ServerFailure(FailureKind.REFUSED, "the leading master is not known")
        use = admin.use()
    except ServerFailure as failure:
        raise TrialProblem(
            f"{where}: it is not known how full the pool is, so a trial could evict blocks of "
            f"others: {failure}",
            'Set "admin" to the HTTP interface of the master, HOST:PORT',
            is_untried=True,
        ) from None
    needed = int(blocks.total_bytes * options.replicas * 1.1)
    if use.used_bytes + needed > _FULL * use.capacity_bytes:
        raise TrialProblem(
            f"{where} is full: {as_size(use.used_bytes)} of {as_size(use.capacity_bytes)} are "
            "used, and the master evicts beyond nine tenths. So nothing was written",
            "Let a host lend memory (segment_bytes)"
            if not use.capacity_bytes
            else "Let hosts lend more if blocks leave before they are used again",
            is_full=True,
        )
