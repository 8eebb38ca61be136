"""The valkey tier: sealed blocks in a Valkey or Redis server that several engines share.

The server bounds itself (`maxmemory`) and chooses what to evict; a block that has vanished is a
miss. `kvtier.tiering.remote.manager` is the scheduler's side; `mover` and `wire` move the bytes.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, ClassVar

from kvtier.base import MetricDefinition
from kvtier.config.errors import printable
from kvtier.tiering.base import TierRefused
from kvtier.tiering.remote.errors import ServerErrors, ServerFailure
from kvtier.tiering.remote.manager import RemoteTierManager, metrics_of
from kvtier.tiering.valkey.mover import ValkeyServer
from kvtier.tiering.valkey.options import ValkeyOptions
from kvtier.tiering.valkey.servers import NotAllowed, Servers, connect_to
from kvtier.tiering.valkey.wire import Refusal, command

if TYPE_CHECKING:
    from kvtier.base import OffloadingSpec
    from kvtier.tiering.remote.inspector import RemoteInspector

__all__ = ["ValkeySecondaryTierManager"]

logger = logging.getLogger(__name__)

_INSTALL = "pip install 'kvtier[valkey]'"


class ValkeySecondaryTierManager(RemoteTierManager):
    """A tier that keeps each block as a string in a Valkey or Redis server."""

    metric_prefix: ClassVar[str] = "kvtier_valkey"
    options_cls = ValkeyOptions

    def __init__(
        self,
        offloading_spec: OffloadingSpec,
        primary_kv_view: memoryview,
        tier_type: str,
        **keys: Any,
    ) -> None:
        """`keys`: those of `ValkeyOptions`."""
        options = ValkeyOptions.parse(keys)
        options.require_fitting()
        offloading_spec.config.require_weights_identity()
        servers = _servers_of(options)
        errors = ServerErrors(options.shown_url)
        try:
            _probe(servers, errors)
            row_bytes = primary_kv_view.shape[1] if primary_kv_view.shape is not None else 0
            server = ValkeyServer(servers, errors, row_bytes, options.ttl_s)
            lanes = dict.fromkeys(("load", "store"), options.connections)
            super().__init__(offloading_spec, primary_kv_view, tier_type, server, lanes)
        except BaseException:
            servers.close()
            raise

    @classmethod
    def open_inspector(cls, location: str) -> RemoteInspector | None:
        from kvtier.tiering.valkey.inspector import open_server

        return open_server(location, _INSTALL)

    @classmethod
    def build_metric_definitions(
        cls, tier_options: Mapping[str, Any]
    ) -> dict[str, MetricDefinition]:
        return metrics_of(cls.metric_prefix)


def _servers_of(options: ValkeyOptions) -> Servers:
    try:
        return connect_to(options)
    except ImportError:
        raise TierRefused(
            f"the valkey tier needs the Python package valkey, which is not installed: {_INSTALL}"
        ) from None


def _probe(servers: Servers, errors: ServerErrors) -> None:
    """Log in to every server, and look at its memory limit. A server that cannot be reached now is
    tried again later; one that refuses the user never gets better by itself."""
    try:
        for node in servers.nodes():
            wire = servers.connect(node)
            try:
                wire.expect_answers()
                wire.send([command(b"CONFIG", b"GET", b"maxmemory*")])
                settings = wire.read_pairs()
            except Refusal:
                settings = {}  # the user may not ask
            finally:
                wire.close()
            _warn_of_limits(errors.where, settings)
    except NotAllowed as refusal:
        raise TierRefused(
            f"{errors.where}: {printable(str(refusal))}. Give username and password of a user that "
            "may use the keys kvtier:*"
        ) from None
    except ServerFailure as failure:
        logger.warning(
            "%s: %s. The engine starts without this tier and tries the server again",
            errors.where,
            printable(str(failure)),
        )
    else:
        logger.info("%s: connected", errors.where)


def _warn_of_limits(where: str, settings: Mapping[bytes, bytes]) -> None:
    if settings.get(b"maxmemory") == b"0":
        logger.warning(
            "%s: the server has no maxmemory, so it grows until its machine is full. Set maxmemory "
            "and maxmemory-policy allkeys-lru",
            where,
        )
    elif settings.get(b"maxmemory-policy") == b"noeviction":
        logger.warning(
            "%s: the server evicts nothing (maxmemory-policy noeviction): once it is full, no "
            "block is stored. Set allkeys-lru",
            where,
        )
