"""The valkey tier: sealed blocks in a Valkey or Redis server that several engines share.

The server bounds itself (`maxmemory`) and chooses what to evict; a block that has vanished is a
miss. `kvtier.tiering.remote.manager` is the scheduler's side; `mover` and `wire` move the bytes.
"""

from __future__ import annotations

import logging
import uuid
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any, ClassVar

from kvtier.tiering.base import TierRefused
from kvtier.tiering.remote.errors import NotAllowed, ServerErrors, trying_at_start
from kvtier.tiering.remote.manager import RemoteTierManager
from kvtier.tiering.valkey.mover import ValkeyServer
from kvtier.tiering.valkey.options import SCHEMES, ValkeyOptions
from kvtier.tiering.valkey.servers import Servers, connect_to, failure_of
from kvtier.tiering.valkey.wire import Refusal, Wire, command

if TYPE_CHECKING:
    from kvtier.base import OffloadingSpec
    from kvtier.tiering.remote.inspector import RemoteInspector
    from kvtier.tiering.trial import TrialBlocks

__all__ = ["INSTALL", "ValkeySecondaryTierManager", "log_in"]

logger = logging.getLogger(__name__)

INSTALL = "pip install 'kvtier[valkey]'"
_NO_LIMIT = (
    "the server has no maxmemory, so it grows until its machine is full. Set maxmemory and "
    "maxmemory-policy allkeys-lru"
)
_NO_EVICTION = (
    "the server evicts nothing (maxmemory-policy noeviction): once it is full, no block is stored. "
    "Set allkeys-lru"
)
_NUM_SLOTS_TRIED = 16


class ValkeySecondaryTierManager(RemoteTierManager):
    """A tier that keeps each block as a string in a Valkey or Redis server."""

    metric_prefix: ClassVar[str] = "kvtier_valkey"
    schemes: ClassVar[Sequence[str]] = SCHEMES
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
        _probe(servers, errors, options)
        row_bytes = primary_kv_view.shape[1] if primary_kv_view.shape is not None else 0
        server = ValkeyServer(servers, errors, row_bytes, options.ttl_s)
        lanes = dict.fromkeys(("load", "store"), options.connections)
        super().__init__(offloading_spec, primary_kv_view, tier_type, server, lanes)

    @classmethod
    def open_inspector(cls, location: str) -> RemoteInspector | None:
        from kvtier.tiering.valkey.inspector import open_server

        return open_server(location, INSTALL)

    @classmethod
    def prepare_trial(
        cls, keys: Mapping[str, Any], blocks: TrialBlocks
    ) -> AbstractContextManager[Mapping[str, Any]]:
        from kvtier.tiering.valkey.trial import trial_server

        return trial_server(keys, blocks)


def _servers_of(options: ValkeyOptions) -> Servers:
    try:
        return connect_to(options)
    except ImportError:
        raise TierRefused(
            f"the valkey tier needs the Python package valkey, which is not installed: {INSTALL}"
        ) from None


def _probe(servers: Servers, errors: ServerErrors, options: ValkeyOptions) -> None:
    """Log in to every server."""
    with trying_at_start(errors.where):
        complaints = log_in(servers, options)
        logger.info("%s: connected", errors.where)
        for complaint in complaints:
            logger.warning("%s: %s", errors.where, complaint)


def log_in(servers: Servers, options: ValkeyOptions) -> list[str]:
    """Log in to every server, try the user's rights, and return what its operator should change.
    Raises `NotAllowed` and `ServerFailure`."""
    complaints = []
    for node in servers.nodes():
        wire = servers.connect(node)
        try:
            _try_rights(wire, options)
            complaints += _complaints_about(_limits(wire))
        finally:
            wire.close()
    return list(dict.fromkeys(complaints))


def _try_rights(wire: Wire, options: ValkeyOptions) -> None:
    """Send what the tier will send, for keys that do not exist, so that nothing changes. Raises
    `ServerFailure`."""
    key = b"kvtier:1:probe:" + uuid.uuid4().hex.encode()
    attempts = [
        [b"GET", key],
        [b"GETEX", key, b"PX", b"1000"],
        [b"SET", key, b"", b"XX"],
        [b"TOUCH", key],
        [b"PEXPIRE", key, b"1000"],
        [b"UNLINK", key],
        # Keys of many slots: a server of a cluster has only some of them.
        *([b"STRLEN", b"%b:%d" % (key, number)] for number in range(_NUM_SLOTS_TRIED)),
    ]
    # Together, so that a server that is far away or slow holds up the start for one answer.
    wire.send([b"".join(command(*words) for words in attempts)])
    for words in attempts:
        try:
            wire.read()
        except Refusal as refusal:
            _judge(refusal, words[0].decode(), options)


def _judge(refusal: Refusal, name: str, options: ValkeyOptions) -> None:
    if refusal.code == "NOPERM":
        raise NotAllowed(
            f"the user may not use {name} with keys kvtier:*",
            "docs/valkey.md lists the rights that a user needs",
        ) from None
    if refusal.code in ("MOVED", "CLUSTERDOWN") and not options.cluster:
        raise NotAllowed("the server belongs to a cluster", 'Set "cluster": true') from None
    if "unknown command" in str(refusal):
        raise NotAllowed(f"the server has no {name}", "Use Valkey, or Redis 6.2 or later") from None
    if refusal.code in ("NOAUTH", "DENIED"):
        raise failure_of(refusal) from None


def _limits(wire: Wire) -> Mapping[bytes, bytes]:
    """The server's memory limit and policy. Empty if the user may not ask."""
    try:
        wire.expect_answers()
        wire.send([command(b"CONFIG", b"GET", b"maxmemory*")])
        words = [word for word in wire.read_list() if isinstance(word, bytes)]
    except Refusal:
        return {}
    return dict(zip(words[::2], words[1::2], strict=False))


def _complaints_about(settings: Mapping[bytes, bytes]) -> list[str]:
    if settings.get(b"maxmemory") == b"0":
        return [_NO_LIMIT]
    if settings.get(b"maxmemory-policy") == b"noeviction":
        return [_NO_EVICTION]
    return []
