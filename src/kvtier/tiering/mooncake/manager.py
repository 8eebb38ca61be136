"""The mooncake tier: sealed blocks in a Mooncake Store, a pool of memory that many hosts lend.

The pool bounds itself, and its master chooses what to evict; a block that has vanished is a miss.
`kvtier.tiering.remote.manager` is the scheduler's side, `mover` moves the bytes, and `pool` says
when the client may be called.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any, ClassVar

from kvtier.base import OffloadKey, ReqContext
from kvtier.config.sizes import as_size
from kvtier.tiering.mooncake.mover import MOST_PIECES, MooncakeServer, copied_bytes_of
from kvtier.tiering.mooncake.options import MooncakeOptions
from kvtier.tiering.mooncake.pool import (
    Pool,
    load_library,
    require_devices,
    require_memory,
    require_private_network,
)
from kvtier.tiering.remote.errors import ServerErrors, trying_at_start
from kvtier.tiering.remote.manager import RemoteTierManager

if TYPE_CHECKING:
    from kvtier.base import OffloadingSpec
    from kvtier.tiering.remote.inspector import RemoteInspector
    from kvtier.tiering.trial import TrialBlocks

__all__ = ["MooncakeSecondaryTierManager"]

logger = logging.getLogger(__name__)


class MooncakeSecondaryTierManager(RemoteTierManager):
    """A tier that keeps each block as an object of a Mooncake Store."""

    metric_prefix: ClassVar[str] = "kvtier_mooncake"
    schemes: ClassVar[Sequence[str]] = ("mooncake",)
    options_cls = MooncakeOptions

    def __init__(
        self,
        offloading_spec: OffloadingSpec,
        primary_kv_view: memoryview,
        tier_type: str,
        **keys: Any,
    ) -> None:
        """`keys`: those of `MooncakeOptions`."""
        options = MooncakeOptions.parse(keys)
        options.require_fitting()
        offloading_spec.config.require_weights_identity()
        library = load_library()
        require_private_network(options)
        require_devices(options)
        require_memory(options.segment_bytes)
        errors = ServerErrors(options.where)
        pool = Pool(options, library, primary_kv_view)

        def config() -> Any:
            made = library.ReplicateConfig()
            made.replica_num = options.replicas
            return made

        row_bytes = offloading_spec.config.row_bytes
        self._pool_server = MooncakeServer(
            pool,
            errors,
            2 * options.connections,
            config,
            copied_bytes_of(row_bytes, options.protocol),
        )
        lanes = dict.fromkeys(("load", "store"), options.connections)
        try:
            with trying_at_start(options.where):
                pool.start()
                lent = as_size(options.segment_bytes)
                logger.info("%s: connected, lending %s", options.where, lent)
            super().__init__(
                offloading_spec, primary_kv_view, tier_type, self._pool_server, lanes, MOST_PIECES
            )
        except BaseException:
            self._pool_server.interrupt()
            self._pool_server.close()
            raise

    def missing(self, keys: Sequence[OffloadKey], req_context: ReqContext) -> Sequence[OffloadKey]:
        missing = super().missing(keys, req_context)
        if missing:
            self._pool_server.note_wanted(missing)
        return missing

    @classmethod
    def open_inspector(cls, location: str) -> RemoteInspector | None:
        from kvtier.tiering.mooncake.inspector import open_pool

        return open_pool(location)

    @classmethod
    def prepare_trial(
        cls, keys: Mapping[str, Any], blocks: TrialBlocks
    ) -> AbstractContextManager[Mapping[str, Any]]:
        from kvtier.tiering.mooncake.trial import trial_pool

        return trial_pool(keys, blocks)
