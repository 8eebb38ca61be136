"""The keys of the valkey tier."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar
from urllib.parse import SplitResult, parse_qs, urlsplit

from kvtier.config import ConfigError, Problem, TierOptions
from kvtier.config.errors import describe
from kvtier.config.fields import BOOLEAN, TEXT, absolute_path, key, whole_number_up_to

__all__ = ["SCHEMES", "ValkeyOptions", "shown_url"]

SCHEMES = ("valkey", "valkeys", "redis", "rediss", "unix")
"""Those that end with "s" use TLS."""
_LONGEST_TTL_S = 10 * 366 * 86_400
_CONNECTIONS = whole_number_up_to(64)


def shown_url(url: str) -> str:
    """The URL without user, password and query, for messages."""
    parts = _split(url)
    if parts is None:
        return "a server"
    if parts.scheme == "unix":
        return f"unix://{parts.path}"
    host = parts.hostname or "localhost"
    host = f"[{host}]" if ":" in host else host
    port = f":{parts.port}" if parts.port else ""
    return f"{parts.scheme}://{host}{port}{parts.path}"


def _split(url: str) -> SplitResult | None:
    """The parts of a URL; None if it is not one of a server."""
    return None if _complaint(url) else urlsplit(url)


def _complaint(url: str) -> str | None:
    """What is wrong with a URL, without quoting it: it may have a secret. None: nothing."""
    if not url.lower().startswith(tuple(f"{each}://" for each in SCHEMES)):
        return "a URL of another kind"
    try:
        parts = urlsplit(url)
        (parts.hostname or "").encode("idna")
    except ValueError:
        return "a URL that cannot be read"
    is_socket = parts.scheme == "unix"
    # The password was not percent-encoded, and its end would be shown.
    if "@" in f"{parts.query}{parts.fragment}{'' if is_socket else parts.path}":
        return 'a URL with an "@" after the address'
    if is_socket and parts.netloc and "@" not in parts.netloc:
        return "a URL with a host, which a socket has not"
    try:
        _ = parts.port
    except ValueError:
        return "a URL whose port is not a number up to 65535"
    database = parts.path.strip("/")
    if not is_socket and database and not (database.isascii() and database.isdecimal()):
        return "a URL whose database is not a number"
    return None


@dataclass(frozen=True, slots=True)
class ValkeyOptions(TierOptions):
    """The keys of an entry with `"type": "valkey"`."""

    url: str = key(
        TEXT,
        "The server: `valkey://HOST:PORT/DATABASE`, `valkeys://` with TLS, or `unix:///PATH`. "
        "`redis://` and `rediss://` mean the same.",
        example='"valkey://cache.example:6379"',
        in_repr=False,
    )
    cluster: bool = key(
        BOOLEAN, "True if the server belongs to a cluster.", default=False, null_is_default=True
    )
    sentinel_service: str | None = key(
        TEXT,
        "The service whose primary the Sentinel at `url` names. Without it, `url` is the server "
        "itself.",
        default=None,
    )
    username: str | None = key(
        TEXT,
        "The ACL user. Without it, the environment variable VALKEY_USERNAME.",
        default=None,
        in_repr=False,
    )
    password: str | None = key(
        TEXT,
        "The password. Without it, the environment variable VALKEY_PASSWORD.",
        default=None,
        in_repr=False,
    )
    ca_bundle: Path | None = key(
        absolute_path("the path of a file", 'Write the path in quotes, such as "/etc/ssl/ca.pem"'),
        "With TLS, a file of certificates that are trusted besides the system's.",
        default=None,
    )
    ttl_s: int | None = key(
        whole_number_up_to(_LONGEST_TTL_S, ", or leave it out: then blocks do not expire"),
        "Seconds after its last use that a block expires. Without it, the server alone decides.",
        default=None,
    )
    connections: int = key(
        _CONNECTIONS,
        "Connections that load, and as many again that store.",
        default=2,
        null_is_default=True,
    )

    not_here: ClassVar[Mapping[str, str]] = {
        **dict.fromkeys(("host", "port", "address", "server", "db"), 'It is part of "url"'),
        **dict.fromkeys(
            ("max_bytes", "maxmemory"), "Set maxmemory in the server, which evicts by itself"
        ),
        "user": 'Here it is "username"',
        "ttl": 'Here it is "ttl_s"',
        "n_threads": 'Here it is "connections"',
        "eviction_policy": "Set maxmemory-policy in the server, for example to allkeys-lru",
    }

    @property
    def shown_url(self) -> str:
        """The URL without secrets."""
        return shown_url(self.url)

    @property
    def has_secret(self) -> bool:
        """True if these keys have a password."""
        parts = _split(self.url)
        if self.password is not None or parts is None:
            return self.password is not None
        return parts.password is not None or "password" in parse_qs(parts.query)

    @property
    def uses_tls(self) -> bool:
        parts = _split(self.url)
        return parts is not None and parts.scheme in ("valkeys", "rediss")

    def require_fitting(self) -> None:
        """Raise `ConfigError` for keys that contradict each other."""
        parts, complaint = _split(self.url), _complaint(self.url)
        if parts is None or (parts.scheme == "unix" and not parts.path):
            allowed = ", ".join(f"{scheme}://" for scheme in SCHEMES)
            raise ConfigError(
                Problem(
                    "url",
                    complaint or describe(self.shown_url),
                    f"a URL that begins with {allowed}",
                    'Write, for example, "valkey://cache.example:6379", or '
                    '"unix:///run/valkey.sock". Percent-encode a password in it, or put it into '
                    "VALKEY_PASSWORD",
                )
            )
        if self.cluster and (self.sentinel_service or parts.scheme == "unix"):
            raise ConfigError(
                Problem(
                    "cluster",
                    "true",
                    "false with sentinel_service or a unix socket",
                    "Remove cluster, or give the URL of any server of the cluster alone",
                )
            )
        if self.sentinel_service and parts.scheme == "unix":
            raise ConfigError(
                Problem(
                    "sentinel_service",
                    describe(self.sentinel_service),
                    "the URL of a Sentinel with a host",
                    "Remove sentinel_service, or give the Sentinel's host and port in url",
                )
            )
        if self.ca_bundle is not None and not self.ca_bundle.is_file():
            raise ConfigError(
                Problem(
                    "ca_bundle",
                    describe(str(self.ca_bundle)),
                    "a file of certificates",
                    "Give the path of a file in PEM format that exists",
                )
            )
        if self.ca_bundle is not None and not self.uses_tls:
            raise ConfigError(
                Problem(
                    "ca_bundle",
                    describe(str(self.ca_bundle)),
                    "a file of certificates, with a URL that uses TLS",
                    "Write valkeys:// in the URL, or remove ca_bundle",
                )
            )
