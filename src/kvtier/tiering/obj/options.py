"""The keys of the obj tier."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar
from urllib.parse import SplitResult, unquote, urlsplit

from kvtier.config import ConfigError, Problem, TierOptions
from kvtier.config.errors import describe
from kvtier.config.fields import BOOLEAN, SIZE, TEXT, absolute_path, key, whole_number_up_to

__all__ = ["SCHEMES", "ObjOptions", "endpoint_in_environment", "shown_url"]

SCHEMES = ("s3", "gs", "az", "file")
_LEAST_BLOCKS = 8
_ENDPOINTS = ("AWS_ENDPOINT_URL_S3", "AWS_ENDPOINT_URL", "AWS_ENDPOINT")
"""Where the client library looks for the endpoint of S3, the first one first."""


def shown_url(url: str) -> str:
    """The URL without user, password and query, for messages."""
    parts = _split(url)
    if parts is None:
        return "an object store"
    return f"{parts.scheme}://{parts.hostname or ''}{parts.path}"


def _split(url: str) -> SplitResult | None:
    return None if _complaint(url) else urlsplit(url)


def _complaint(url: str) -> str | None:
    """What is wrong with a URL, without quoting it: it may have a secret. None: nothing."""
    try:
        parts = urlsplit(url)
    except ValueError:
        return "a URL that cannot be read"
    if parts.scheme not in SCHEMES:
        return "a URL of another kind"
    if "@" in parts.netloc:
        return "a URL with a user"
    if parts.query or parts.fragment:
        return "a URL with a query or fragment"
    if parts.scheme != "file":
        return None if parts.netloc else "a URL without a bucket"
    if parts.netloc:
        return "a URL with a host, or with a path that does not begin with /"
    return None if parts.path.strip("/") else "a URL without a path"


def endpoint_in_environment() -> tuple[str, str] | None:
    """The variable that names the endpoint of S3, and its value."""
    return next(((name, os.environ[name]) for name in _ENDPOINTS if os.environ.get(name)), None)


def _is_http_url(text: str) -> bool:
    try:
        parts = urlsplit(text)
        _ = parts.port  # raises if it is not a number
    except ValueError:
        return False
    has_more = "@" in parts.netloc or parts.query or parts.fragment
    return parts.scheme in ("http", "https") and bool(parts.hostname) and not has_more


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
        TEXT,
        "URL of the service, if it is not Amazon's, Google's or Azure's own.",
        default=None,
        in_repr=False,
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
        complaint = _complaint(self.url)
        if complaint is not None:
            raise ConfigError(
                Problem(
                    "url",
                    complaint,
                    "a bucket or directory (s3://, gs://, az://, file:///), without user, query or "
                    "fragment",
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
        if self.endpoint is not None:
            self._require_endpoint(self.endpoint, "")
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

    def require_environment(self) -> None:
        """Raise `ConfigError` for an endpoint in the environment that cannot be used. The client
        library panics at some, and would call others a broken connection."""
        found = endpoint_in_environment()
        if self.scheme == "s3" and self.endpoint is None and found is not None:
            name, value = found
            self._require_endpoint(value, f" in {name}")

    def _require_endpoint(self, endpoint: str, where: str) -> None:
        is_http = endpoint.startswith("http:")
        if _is_http_url(endpoint) and (self.allow_http or not is_http):
            return
        remedy = "Write the whole URL of the service, such as https://s3.example:9000"
        if is_http and not self.allow_http:
            remedy = "Write https://, or set allow_http to true in a network that you trust"
        allowed = "http:// or https://" if self.allow_http else "https://"
        raise ConfigError(
            Problem(
                "endpoint",
                f"{describe(endpoint)}{where}",
                f"a URL that begins with {allowed}, without user and query",
                remedy,
            )
        )

    @property
    def what_to_check(self) -> str:
        """What may be wrong if the client library cannot open the URL."""
        if self.scheme == "file":
            return "Give a directory, or a path at which the engine may make one"
        if self.scheme == "az":
            return (
                "Check url, endpoint and ca_bundle; the account is in access_key_id, or in "
                "AZURE_STORAGE_ACCOUNT_NAME"
            )
        return "Check url, endpoint, region and ca_bundle"

    @property
    def directory(self) -> Path | None:
        """Where `file://` keeps blocks; None for a service."""
        return Path(unquote(urlsplit(self.url).path)) if self.scheme == "file" else None
