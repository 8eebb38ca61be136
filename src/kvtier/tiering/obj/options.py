"""The keys of the obj tier."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar
from urllib.parse import SplitResult, urlsplit

from kvtier.config import ConfigError, Problem, TierOptions
from kvtier.config.errors import describe
from kvtier.config.fields import BOOLEAN, SIZE, TEXT, absolute_path, key, whole_number_up_to

__all__ = ["SCHEMES", "ObjOptions", "shown_url"]

SCHEMES = ("s3", "gs", "az", "file")
_LEAST_BLOCKS = 8


def shown_url(url: str) -> str:
    """The URL without user, password and query, for messages."""
    parts = _split(url)
    if parts is None:
        return "an object store"
    return f"{parts.scheme}://{parts.hostname or ''}{parts.path}"


def _split(url: str) -> SplitResult | None:
    try:
        parts = urlsplit(url)
    except ValueError:
        return None
    if parts.scheme not in SCHEMES or "@" in parts.netloc or parts.query or parts.fragment:
        return None
    has_place = bool(parts.path.strip("/")) if parts.scheme == "file" else bool(parts.netloc)
    return parts if has_place else None


@dataclass(frozen=True, slots=True)
class ObjOptions(TierOptions):
    """The keys of an entry with `"type": "obj"`."""

    url: str = key(
        TEXT,
        "The bucket and a prefix in it: `s3://BUCKET/PREFIX`, `gs://`, `az://`, or `file:///PATH`.",
        example='"s3://kv-cache/llama"',
        in_repr=False,
    )
    endpoint: str | None = key(
        TEXT, "URL of the service, if it is not Amazon's, Google's or Azure's own.", default=None
    )
    region: str | None = key(TEXT, "The region of the bucket.", default=None)
    access_key_id: str | None = key(
        TEXT,
        "The access key; with `az://`, the account. Without it, credentials come from the "
        "environment, a web identity, the container or the machine.",
        default=None,
        in_repr=False,
    )
    secret_access_key: str | None = key(
        TEXT, "The secret of the access key.", default=None, in_repr=False
    )
    ca_bundle: Path | None = key(
        absolute_path("the path of a file", 'Write the path in quotes, such as "/etc/ssl/ca.pem"'),
        "Certificates that the service's is checked against. Without it, the system's.",
        default=None,
    )
    allow_http: bool = key(
        BOOLEAN,
        "True if the endpoint may use plain HTTP. Blocks and signatures then cross the network "
        "unencrypted.",
        default=False,
        null_is_default=True,
    )
    max_bytes: int | None = key(
        SIZE,
        "Bytes that all engines together may keep below the URL. Without it, only the bucket's "
        "lifecycle rules remove blocks.",
        default=None,
    )
    concurrency: int = key(
        whole_number_up_to(256),
        "Loads at the same time, and half as many stores.",
        default=8,
        null_is_default=True,
    )

    not_here: ClassVar[Mapping[str, str]] = {
        **dict.fromkeys(("bucket", "prefix", "path", "root_dir"), 'It is part of "url"'),
        **dict.fromkeys(("endpoint_url", "aws_endpoint"), 'Here it is "endpoint"'),
        "secret_key": 'Here it is "secret_access_key"',
        "access_key": 'Here it is "access_key_id"',
        **dict.fromkeys(("n_threads", "io_threads"), 'Here it is "concurrency"'),
        "ttl_s": "Add a lifecycle rule to the bucket, or set max_bytes",
    }

    @property
    def shown_url(self) -> str:
        """The URL without secrets."""
        return shown_url(self.url)

    @property
    def scheme(self) -> str:
        return self.url.partition("://")[0]

    def require_fitting(self, block_bytes: int) -> None:
        """Raise `ConfigError` for keys that contradict each other or leave no room."""
        if _split(self.url) is None:
            raise ConfigError(
                Problem(
                    "url",
                    describe(self.shown_url),
                    "a bucket or directory, without user, query or fragment",
                    'Write, for example, "s3://kv-cache/llama"; credentials have keys of their own',
                )
            )
        if self.scheme in ("gs", "file") and self.access_key_id is not None:
            raise ConfigError(
                Problem(
                    "access_key_id",
                    "a key",
                    f"nothing with {self.scheme}://",
                    "Remove it; Google's credentials come from GOOGLE_APPLICATION_CREDENTIALS or "
                    "the machine, and a directory needs none",
                )
            )
        if (self.access_key_id is None) != (self.secret_access_key is None):
            missing = "access_key_id" if self.access_key_id is None else "secret_access_key"
            raise ConfigError(
                Problem(missing, "nothing", "both keys or none", "Give the other key, too")
            )
        if self.endpoint is not None and self.endpoint.startswith("http:") and not self.allow_http:
            raise ConfigError(
                Problem(
                    "endpoint",
                    describe(self.endpoint),
                    "a URL that begins with https://",
                    "Write https://, or set allow_http to true in a network that you trust",
                )
            )
        if self.max_bytes is not None and self.max_bytes < _LEAST_BLOCKS * block_bytes:
            raise ConfigError(
                Problem(
                    "max_bytes",
                    self.as_given("max_bytes"),
                    f"at least {_LEAST_BLOCKS * block_bytes} bytes",
                    f"Give room for {_LEAST_BLOCKS} blocks of {block_bytes} bytes; a useful cache "
                    "holds many prompts",
                )
            )
