"""`kvtier store` on a Valkey or Redis server, or a cluster."""

from __future__ import annotations

import re
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from itertools import islice
from typing import Any

from kvtier.base import OffloadKey
from kvtier.config import ConfigError
from kvtier.config.namespace import DESCRIPTION_BYTES
from kvtier.tiering.inspection import InspectionRefused
from kvtier.tiering.remote.inspector import RemoteBlock, RemoteInspector, RemoteStorage
from kvtier.tiering.valkey.options import SCHEMES, ValkeyOptions
from kvtier.tiering.valkey.servers import (
    Servers,
    connect_to,
    credentials,
    description_key,
    explained_failures,
    failure_of,
    tls_settings,
)
from kvtier.tiering.valkey.wire import Refusal, command

__all__ = ["open_server"]

_BLOCK = re.compile(rb"kvtier:1:([0-9a-f]{32}):(.+)", re.DOTALL)
_AT_ONCE = 500
_TIMEOUT_S = 30.0


def open_server(location: str, install: str) -> RemoteInspector | None:
    """The inspector of a server. User and password come from the URL, or from VALKEY_USERNAME and
    VALKEY_PASSWORD. `install`: the command that installs the client."""
    if "://" not in location or location.partition("://")[0] not in SCHEMES:
        return None
    options = ValkeyOptions(url=location)
    try:
        options.require_fitting()
        storage = _Server(options, connect_to(options))
    except ImportError:
        raise InspectionRefused(f"{options.shown_url} needs valkey: {install}") from None
    except ConfigError as refused:
        raise InspectionRefused(str(refused)) from None
    return RemoteInspector("valkey", options.shown_url, storage)


class _Server(RemoteStorage):
    """Connects when it is first used."""

    facts_in_bytes = frozenset(("used_memory", "maxmemory"))
    limits = frozenset(("maxmemory",))

    def __init__(self, options: ValkeyOptions, servers: Servers) -> None:
        import valkey

        self._library = valkey
        self._servers = servers
        self._url = options.url
        self._given: dict[str, Any] = {
            "socket_timeout": _TIMEOUT_S,
            **credentials(options),
            **tls_settings(options),
        }
        self._connected: Any = None

    @property
    def _client(self) -> Any:
        if self._connected is None:
            self._require_server()
            client: Any = self._library.Valkey.from_url(self._url, **self._given)
            if client.info("cluster").get("cluster_enabled"):
                client.close()
                client = self._library.ValkeyCluster.from_url(self._url, **self._given)
            self._connected = client
        return self._connected

    def _require_server(self) -> None:
        """Raise `ServerFailure` within some seconds if the server cannot be used. The client
        library waits much longer, because some commands take their time."""
        wire = self._servers.connect("")
        try:
            wire.expect_answers()
            wire.send([command(b"PING")])
            wire.read()
        except Refusal as refusal:
            if refusal.code != "NOPERM":
                raise failure_of(refusal) from None
        finally:
            wire.close()

    def scan(self) -> Iterator[RemoteBlock]:
        with explained_failures():
            names = self._client.scan_iter(match=b"kvtier:1:*", count=_AT_ONCE)
            seen: set[bytes] = set()
            while some := list(islice(names, _AT_ONCE)):
                new = [name for name in dict.fromkeys(some) if name not in seen]
                seen.update(new)  # a server may name a key twice
                yield from self._described(new)

    def _described(self, names: Sequence[bytes]) -> Iterator[RemoteBlock]:
        commands = self._client.pipeline(transaction=False)
        for name in names:
            commands.strlen(name)
            commands.object("idletime", name)
        answers = commands.execute(raise_on_error=False)
        for name, length, idle_s in zip(names, answers[::2], answers[1::2], strict=True):
            found = _BLOCK.fullmatch(name)
            if found is None or not isinstance(length, int):
                continue
            used_ns = time.time_ns() - idle_s * 10**9 if isinstance(idle_s, int) else None
            yield RemoteBlock(
                place=f"kvtier:1:{found[1].decode()}:{found[2].hex()}",
                namespace=found[1].decode(),
                key=OffloadKey(found[2]),
                num_bytes=length,
                used_ns=used_ns,
                is_private=False,
            )

    def read(self, place: str, num_bytes: int) -> bytes | None:
        with explained_failures():
            content = self._client.getrange(_name_of(place), 0, num_bytes - 1)
        return bytes(content) or None

    def remove(self, places: Sequence[str]) -> None:
        with explained_failures():
            commands = self._client.pipeline(transaction=False)
            for place in places:
                commands.unlink(_name_of(place))
            commands.execute()

    def description(self, namespace: str) -> bytes | None:
        with explained_failures():
            key = description_key(namespace)
            return bytes(self._client.getrange(key, 0, DESCRIPTION_BYTES)) or None

    def remove_descriptions(self, namespaces: Sequence[str]) -> None:
        with explained_failures():
            for namespace in namespaces:
                self._client.unlink(description_key(namespace))

    def facts(self) -> Mapping[str, Any]:
        with explained_failures():
            sections = self._client.info("memory")
            # A cluster answers for each of its servers.
            servers = list(sections.values()) if "used_memory" not in sections else [sections]
            return {
                "servers": len(servers),
                "used_memory": sum(each["used_memory"] for each in servers),
                "maxmemory": sum(each.get("maxmemory", 0) for each in servers),
                "maxmemory_policy": servers[0].get("maxmemory_policy"),
            }

    def close(self) -> None:
        if self._connected is not None:
            with suppress(Exception):
                self._connected.close()


def _name_of(place: str) -> bytes:
    head, _, key = place.rpartition(":")
    return head.encode() + b":" + bytes.fromhex(key)
