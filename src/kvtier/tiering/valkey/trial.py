"""Trials of the valkey tier: on the configured server, under keys that expire soon."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from typing import Any

from kvtier.config.sizes import as_size
from kvtier.tiering.remote.errors import NotAllowed, ServerFailure
from kvtier.tiering.remote.manager import namespace_of
from kvtier.tiering.trial import TrialBlocks, TrialProblem
from kvtier.tiering.valkey.mover import Breaks, Wires
from kvtier.tiering.valkey.options import ValkeyOptions
from kvtier.tiering.valkey.servers import Servers, block_key, connect_to
from kvtier.tiering.valkey.wire import Refusal, Wire, command

__all__ = ["trial_server"]

_TTL_S = 60
"""Removes the blocks if this process is killed."""
_OVERHEAD = 1.25
"""What a value takes in the server's memory, as a multiple of its bytes."""
_BASE_BYTES = 2 << 20
"""Buffers of the connections."""
_LONGEST_ANSWER = 64 << 10


@contextmanager
def trial_server(keys: Mapping[str, Any], blocks: TrialBlocks) -> Iterator[Mapping[str, Any]]:
    """Yield the keys of a tier whose blocks expire, and remove them at the end. Raises
    `TrialProblem` if a server would have to evict blocks of others."""
    options = ValkeyOptions.parse(keys)
    options.require_fitting()
    try:
        servers = connect_to(options)
    except ImportError:
        from kvtier.tiering.valkey.manager import INSTALL

        raise TrialProblem("the Python package valkey is not installed", INSTALL) from None
    needed = int(_OVERHEAD * blocks.total_bytes) + _BASE_BYTES
    try:
        for node in servers.nodes():
            wire = servers.connect(node)
            try:
                _require_room(wire, needed, options)
            finally:
                wire.close()
    except ServerFailure as failure:
        remedy = "Check the URL, and that this machine reaches the server"
        raise TrialProblem(
            f"{options.shown_url}: {failure}",
            failure.remedy if isinstance(failure, NotAllowed) else remedy,
        ) from None
    try:
        yield {**keys, "ttl_s": min(options.ttl_s or _TTL_S, _TTL_S)}
    finally:
        with suppress(ServerFailure):  # then they expire
            _remove(servers, blocks)


def _require_room(wire: Wire, needed: int, options: ValkeyOptions) -> None:
    """Raise `TrialProblem` if a server has no room for this many bytes more."""
    where = options.shown_url
    answer = memoryview(bytearray(_LONGEST_ANSWER))
    try:
        wire.expect_answers()
        wire.send([command(b"INFO", b"memory")])
        length = wire.read_into(answer) or 0
    except Refusal:
        raise TrialProblem(
            f"{where}: the user may not ask how full the server is (INFO), so a trial could evict "
            "blocks of others",
            "Let the user run INFO (+info), or give a trial a user of its own",
            is_untried=True,
        ) from None
    lines = bytes(answer[:length]).decode("utf-8", "replace").splitlines()
    memory = dict(line.split(":", 1) for line in lines if ":" in line)
    used, limit = int(memory.get("used_memory", 0)), int(memory.get("maxmemory", 0))
    if limit and used + needed > limit:
        evicts = memory.get("maxmemory_policy") != "noeviction"
        then = "evicts others for each new block" if evicts else "stores no new block"
        raise TrialProblem(
            f"{where} is full: {as_size(used)} of its maxmemory of {as_size(limit)} are used. It "
            f"{then}, so nothing was written",
            "Give it more maxmemory if blocks leave before they are used again"
            if evicts
            else "Set its maxmemory-policy to allkeys-lru, or give it more maxmemory",
            is_full=True,
        )


def _remove(servers: Servers, blocks: TrialBlocks) -> None:
    wires = Wires(servers, Breaks())
    namespace = namespace_of(blocks.fingerprint)
    try:
        names = [block_key(namespace, key) for key in blocks.keys]
        for node, some in wires.by_node(names, lambda name: name).items():
            wire = wires.to(node)
            wire.send([command(b"UNLINK", name) for name in some])
            for _ in some:
                with suppress(Refusal):
                    wire.read()
    finally:
        wires.close()
