"""The keys of the mooncake tier."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import ClassVar
from urllib.parse import urlsplit

from kvtier.config import ConfigError, Problem, TierOptions
from kvtier.config.errors import describe
from kvtier.config.fields import (
    BOOLEAN,
    SIZE_OR_ZERO,
    TEXT,
    key,
    one_of,
    whole_number_up_to,
)
from kvtier.config.sizes import as_size

__all__ = ["P2P", "MooncakeOptions", "Protocol", "master_address"]

P2P = "P2PHANDSHAKE"
"""In place of a metadata server: the hosts ask each other."""
_METADATA = ("http", "https", "etcd", "redis")
_ADDRESS = re.compile(r"(?P<host>\[[0-9A-Fa-f:.]+\]|[A-Za-z0-9_.-]+):(?P<port>[0-9]{1,5})")
_HOST = re.compile(r"[A-Za-z0-9_.-]+(:[0-9]{1,5})?")
_HIGH_AVAILABILITY = "etcd://"
_SMALLEST_SEGMENT_BYTES = 16 << 20


class Protocol(StrEnum):
    """How bytes travel between hosts."""

    TCP = "tcp"
    RDMA = "rdma"


def master_address(master: str) -> tuple[str, int] | None:
    """Host and port of a master. None for several masters behind etcd, or for something else."""
    found = _ADDRESS.fullmatch(master)
    if found is None or not 0 < int(found["port"]) < 65_536:
        return None
    return found["host"].strip("[]"), int(found["port"])


def _is_server(url: str) -> bool:
    """True for the URL of a metadata server."""
    try:
        parts = urlsplit(url)
        return parts.scheme in _METADATA and bool(parts.hostname) and parts.port != 0
    except ValueError:
        return False


@dataclass(frozen=True, slots=True)
class MooncakeOptions(TierOptions):
    """The keys of an entry with `"type": "mooncake"`."""

    master: str = key(
        TEXT,
        "The pool's master: `HOST:PORT`, or `etcd://HOST:PORT;HOST:PORT` if several masters stand "
        "by.",
        example='"cache.example:50051"',
    )
    metadata: str = key(
        TEXT,
        "Where hosts find each other: the URL of a metadata server, or `P2PHANDSHAKE`, which needs "
        "none. The same for all hosts of a pool.",
        default=P2P,
        null_is_default=True,
        in_repr=False,
    )
    hostname: str | None = key(
        TEXT,
        "The name or address, and perhaps the port, under which other hosts reach this one. "
        "Without it, the address from which this machine reaches the master.",
        default=None,
    )
    segment_bytes: int = key(
        SIZE_OR_ZERO,
        "Memory that this engine lends to the pool, besides its own host memory. 0: it uses the "
        "pool and lends nothing.",
        default=0,
        null_is_default=True,
    )
    protocol: Protocol = key(
        one_of(Protocol), "How bytes travel.", default=Protocol.TCP, null_is_default=True
    )
    devices: str | None = key(
        TEXT,
        'With RDMA, the devices to use, such as `"mlx5_0,mlx5_1"`. Without it, all that fit.',
        default=None,
    )
    replicas: int = key(
        whole_number_up_to(8),
        "Copies of each block, on different hosts.",
        default=1,
        null_is_default=True,
    )
    connections: int = key(
        whole_number_up_to(64),
        "Threads that load, and as many again that store.",
        default=2,
        null_is_default=True,
    )
    admin: str | None = key(
        TEXT,
        "The master's HTTP interface, `HOST:PORT`, which commands ask how full the pool is. "
        "Without it, port 9003 of the master's host.",
        default=None,
    )
    allow_public: bool = key(
        BOOLEAN,
        "True: start although this machine has a public address, on which the client listens, too, "
        "without a password.",
        default=False,
        null_is_default=True,
    )

    not_here: ClassVar[Mapping[str, str]] = {
        **dict.fromkeys(
            ("master_server_address", "master_server_addr", "master_server"), 'Here it is "master"'
        ),
        "metadata_server": 'Here it is "metadata"',
        "local_hostname": 'Here it is "hostname"',
        "global_segment_size": 'Here it is "segment_bytes"',
        "local_buffer_size": "No buffer is needed: blocks travel straight between slots and pool",
        "device_name": 'Here it is "devices"',
        "rdma_devices": 'Here it is "devices"',
        "replica_num": 'Here it is "replicas"',
        "max_bytes": 'The pool is as large as what hosts lend. Here it is "segment_bytes"',
        "eviction_policy": "The master evicts: see docs/mooncake.md",
    }

    @property
    def where(self) -> str:
        """The pool, for messages."""
        return f"mooncake://{self.master.removeprefix(_HIGH_AVAILABILITY)}"

    @property
    def etcd_servers(self) -> Sequence[str]:
        """The servers that know the leading master, `HOST:PORT` each; none if there is one
        master."""
        several = self.master.startswith(_HIGH_AVAILABILITY)
        return self.master.removeprefix(_HIGH_AVAILABILITY).split(";") if several else ()

    def require_fitting(self) -> None:
        """Raise `ConfigError` for values that cannot be right."""
        if not all(map(master_address, self.etcd_servers or [self.master])):
            raise ConfigError(
                Problem(
                    "master",
                    describe(self.master),
                    "HOST:PORT, or etcd://HOST:PORT;HOST:PORT",
                    'Write, for example, "cache.example:50051": the address on which '
                    "mooncake_master was started (-rpc_port)",
                )
            )
        if self.etcd_servers and self.hostname is None:
            raise ConfigError(
                Problem(
                    "hostname",
                    "nothing",
                    "this machine's name or address, with several masters",
                    'Write, for example, "node7.example"',
                )
            )
        if self.metadata != P2P and not _is_server(self.metadata):
            raise ConfigError(
                Problem(
                    "metadata",
                    describe(self.metadata),
                    'a URL such as "http://cache.example:8080/metadata", or "P2PHANDSHAKE"',
                    f'Leave it out, or write "{P2P}": then no metadata server is needed',
                )
            )
        if 0 < self.segment_bytes < _SMALLEST_SEGMENT_BYTES:
            raise ConfigError(
                Problem(
                    "segment_bytes",
                    as_size(self.segment_bytes),
                    f"0, or {as_size(_SMALLEST_SEGMENT_BYTES)} and more",
                    "Lend more, or nothing: the library takes no smaller segment",
                )
            )
        if self.hostname is not None and not _HOST.fullmatch(self.hostname):
            raise ConfigError(
                Problem(
                    "hostname",
                    describe(self.hostname),
                    "a host name or IPv4 address, perhaps with a port",
                    'Write, for example, "node7.example" or "10.0.0.7:13002"',
                )
            )
        if self.admin is not None and master_address(self.admin) is None:
            raise ConfigError(
                Problem(
                    "admin",
                    describe(self.admin),
                    "HOST:PORT",
                    'Write, for example, "cache.example:9003": what mooncake_master was told with '
                    "-metrics_port",
                )
            )
        if self.devices is not None and self.protocol is not Protocol.RDMA:
            raise ConfigError(
                Problem(
                    "devices",
                    describe(self.devices),
                    'nothing, or "protocol": "rdma" beside it',
                    'Remove devices, or set "protocol": "rdma"',
                )
            )
