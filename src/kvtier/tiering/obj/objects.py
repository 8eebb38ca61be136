"""The objects below one URL, through the client library obstore.

PREFIX/kvtier/1/<fingerprint>/<key>    a block: the seal, then the payload. The key is in hex digits
PREFIX/kvtier/1/private/<engine>/...   the same, of namespaces that only this engine reads
PREFIX/kvtier/1/made-of/<fingerprint>  what a namespace is made of

The version of the stored format is part of each name, so that releases with another one neither
find nor touch these blocks. No error's text is passed on: it may quote a signed URL.
"""

from __future__ import annotations

import re
import ssl
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from typing import TYPE_CHECKING, Any

from kvtier.base import OffloadKey
from kvtier.tiering.remote.errors import FailureKind, NotAllowed, ServerFailure

if TYPE_CHECKING:
    from kvtier.tiering.obj.options import ObjOptions

__all__ = [
    "BLOCKS",
    "DESCRIPTIONS",
    "PRIVATE",
    "Objects",
    "description_name",
    "object_name",
    "open_objects",
]

BLOCKS = "kvtier/1"
PRIVATE = f"{BLOCKS}/private"
DESCRIPTIONS = f"{BLOCKS}/made-of"
_CONNECT_S = 2
_SILENCE_S = 5
"""How long the service may send nothing."""
_REQUEST_S = 30
"""How long one request may take in all."""
_RETRY_S = 3
"""A request that failed within this time is made once more."""
_NAMES: dict[str, dict[str, str]] = {
    "s3": {"endpoint": "endpoint", "region": "region"},
    "az": {
        "endpoint": "endpoint",
        "access_key_id": "account_name",
        "secret_access_key": "account_key",
    },
    "gs": {},
}
"""The library's names of our keys, by scheme."""
_RIGHTS = (
    "Give access_key_id and secret_access_key, or set the environment's credentials, of a user "
    "that may get, put, list and delete objects below the url"
)


def object_name(folder: str, first: OffloadKey) -> str:
    """The name of the object with a block, or with the blocks from this one on. `folder`: that of
    its namespace."""
    return f"{folder}/{first.hex()}"


def description_name(namespace: str) -> str:
    """The name of the object that says what a namespace is made of."""
    return f"{DESCRIPTIONS}/{namespace}"


class _Known:
    """A failure that the library's text shows."""

    def __init__(
        self,
        pattern: str,
        kind: FailureKind,
        reason: str,
        remedy: str | None = None,
    ) -> None:
        """`reason`: has a place for what the pattern's group finds, if it has one. `remedy`: for
        what does not get better by itself."""
        self.pattern = re.compile(pattern, re.DOTALL)
        self._kind = kind
        self._reason = reason
        self._remedy = remedy

    def failure(self, *found: str) -> ServerFailure:
        reason = self._reason.format(*found)
        if self._remedy is not None:
            return NotAllowed(reason, self._remedy)
        return ServerFailure(self._kind, reason)


_CODES = (
    "AccessDenied|ExpiredToken|ExpiredTokenException|InvalidAccessKeyId|InvalidToken|"
    "RequestTimeTooSkewed|SignatureDoesNotMatch"
)
_NOT_ALLOWED = _Known(
    rf"status code: 40[13]|<Code>(?:{_CODES})<|\(code: (?:{_CODES})\)",
    FailureKind.REFUSED,
    "the service does not accept the credentials, or not for this",
    _RIGHTS,
)
_NO_BUCKET = _Known("status code: 404", FailureKind.REFUSED, "there is no such bucket", _RIGHTS)
_METADATA = r"169\.254\.|/latest/api/token|/latest/meta-data|metadata\.google\.internal"
"""The service of a machine in a cloud that the library asks if it has found no credentials."""
_NO_CREDENTIALS = "neither the configuration nor the environment has credentials, and the machine's"
_KNOWN = (
    _Known(
        rf"(?:{_METADATA}).*status code: 4",
        FailureKind.REFUSED,
        f"{_NO_CREDENTIALS} metadata service gives none",
        _RIGHTS,
    ),
    _Known(
        _METADATA,
        FailureKind.UNREACHABLE,
        f"{_NO_CREDENTIALS} metadata service cannot be reached",
    ),
    _NOT_ALLOWED,
    _NO_BUCKET,
    _Known(
        "Received redirect",
        FailureKind.REFUSED,
        "the bucket is in another region, or not at this endpoint",
        _RIGHTS,
    ),
    _Known(
        "status code: (429|503)",
        FailureKind.REFUSED,
        "the service asks for fewer requests (status {})",
    ),
    _Known("status code: 507", FailureKind.FULL, "the service has no room"),
    _Known(r"status code: (\d{3})", FailureKind.REFUSED, "the service answered with status {}"),
    _Known(
        "InvalidCertificate",
        FailureKind.UNREACHABLE,
        "its certificate is not accepted: check ca_bundle",
    ),
    _Known("kind: Timeout", FailureKind.SILENT, "the service did not answer in time"),
    _Known("HTTP error.*kind: Unknown", FailureKind.GARBAGE, "the answer is not one of HTTP"),
    _Known("HTTP error", FailureKind.UNREACHABLE, "the service cannot be reached"),
    _Known(r"LocalFileSystem.*os error (?:28|122)\)", FailureKind.FULL, "the disk is full"),
    _Known(
        r"LocalFileSystem.*os error (?:1|13|30)\)",
        FailureKind.REFUSED,
        "the directory may not be written",
        _RIGHTS,
    ),
    _Known("LocalFileSystem", FailureKind.UNREACHABLE, "the directory cannot be used"),
)


class _PastTheEnd(Exception):
    """An object is not longer than where the range to be read begins."""


_PAST_THE_END = re.compile("status code: 416|InvalidRange")


class Objects:
    """Reads, writes and removes objects. Any thread. Every method may raise `ServerFailure`."""

    def __init__(self, store: Any) -> None:
        self._store = store

    def close(self) -> None:
        """Close idle connections. No other call follows."""
        self._store = None

    def size_of(self, name: str) -> int | None:
        """Bytes of an object; None if there is none."""
        import obstore

        try:
            with _explained_failures(FileNotFoundError):
                return int(obstore.head(self._store, name)["size"])
        except FileNotFoundError:
            return None

    async def size_of_async(self, name: str) -> int | None:
        """The same, for many at once."""
        import obstore

        try:
            with _explained_failures(FileNotFoundError):
                return int((await obstore.head_async(self._store, name))["size"])
        except FileNotFoundError:
            return None

    def read(self, name: str, num_bytes: int) -> Any | None:
        """The content of an object of this size, as a buffer; empty if it has another size; None if
        there is none."""
        import obstore

        try:
            with _explained_failures(FileNotFoundError):
                found = obstore.get(self._store, name)
                if found.meta["size"] != num_bytes:
                    return b""  # do not read it: it may be huge
                return found.bytes()
        except FileNotFoundError:
            return None

    def read_range(self, name: str, start: int, num_bytes: int) -> Any | None:
        """At most this many of an object's bytes from `start` on, as a buffer; empty if it is not
        that long; None if there is none."""
        import obstore

        try:
            with _explained_failures(FileNotFoundError, _PastTheEnd):
                return obstore.get_range(self._store, name, start=start, length=num_bytes)
        except _PastTheEnd:
            return b""
        except FileNotFoundError:
            return None

    async def read_range_async(self, name: str, start: int, num_bytes: int) -> Any | None:
        """The same, for many at once."""
        import obstore

        try:
            with _explained_failures(FileNotFoundError, _PastTheEnd):
                return await obstore.get_range_async(
                    self._store, name, start=start, length=num_bytes
                )
        except _PastTheEnd:
            return b""
        except FileNotFoundError:
            return None

    def create(self, name: str, parts: Sequence[bytes | memoryview]) -> bool:
        """Write an object, unless there is one of this name. Returns True if it was written."""
        import obstore
        from obstore.exceptions import AlreadyExistsError, PreconditionError

        try:
            with _explained_failures(AlreadyExistsError, PreconditionError):
                obstore.put(self._store, name, iter(parts), mode="create", use_multipart=False)
        except (AlreadyExistsError, PreconditionError):
            return False
        return True

    def write(self, name: str, content: bytes) -> None:
        """Write an object, in place of an earlier one of this name."""
        import obstore

        with _explained_failures():
            obstore.put(self._store, name, content, use_multipart=False)

    def modified_at(self, name: str) -> float | None:
        """When an object was written, in seconds since 1970 by the service's clock; None if there
        is none."""
        import obstore

        try:
            with _explained_failures(FileNotFoundError):
                return float(obstore.head(self._store, name)["last_modified"].timestamp())
        except FileNotFoundError:
            return None

    def remove(self, names: Sequence[str]) -> None:
        """Remove objects. Names without an object are ignored."""
        import obstore

        try:
            with _explained_failures(FileNotFoundError):
                obstore.delete(self._store, list(names))
        except FileNotFoundError:
            # Where the service removes one object at a time, the library stops at the first that
            # is missing.
            if len(names) > 1:
                for name in names:
                    self.remove([name])

    def remove_below(self, prefix: str, most_s: float) -> bool:
        """Remove all objects with this prefix, for this time at most. Returns True if none is
        left."""
        deadline = time.monotonic() + most_s
        for page in self.below(prefix):
            if time.monotonic() > deadline:
                return False
            self.remove([item["path"] for item in page])
        return True

    def below(self, prefix: str) -> Iterator[list[dict[str, Any]]]:
        """Lists of objects with this prefix, each with `path`, `size` and `last_modified`."""
        import obstore

        with _explained_failures():
            yield from obstore.list(self._store, prefix)

    def folders_in(self, prefix: str) -> list[str]:
        """The names of the folders right below this prefix. Costs a request for each thousand."""
        import obstore

        with _explained_failures():
            found = obstore.list_with_delimiter(self._store, prefix)["common_prefixes"]
        return [path.rstrip("/").rpartition("/")[2] for path in found]


def open_objects(options: ObjOptions, *, makes_directory: bool) -> Objects:
    """Open the place that the options name. Does not connect. `makes_directory`: that of a
    `file://` URL, if it is missing. Raises `ImportError` without the client library, `ConfigError`
    for what the environment has, `OSError` for a file of certificates that cannot be used, and
    errors of the library for what else is wrong."""
    from obstore.store import from_url

    options.require_environment()
    client: dict[str, Any] = {
        "timeout": timedelta(seconds=_REQUEST_S),
        "read_timeout": timedelta(seconds=_SILENCE_S),
        "connect_timeout": timedelta(seconds=_CONNECT_S),
        "allow_http": options.allow_http,
    }
    if options.ca_bundle is not None:
        ssl.create_default_context(cafile=str(options.ca_bundle))  # names what is wrong with it
        client["root_certificate"] = options.ca_bundle.read_text(errors="replace")
    if options.scheme == "file":
        return Objects(from_url(options.url, mkdir=makes_directory))
    config = {
        name: value
        for option, name in _NAMES[options.scheme].items()
        if (value := getattr(options, option)) is not None
    }
    further: dict[str, Any] = {}
    if options.scheme == "s3":
        # Digests of the content take two thirds of the processor time of a store. The seal has one.
        config["unsigned_payload"] = "true"
        if options.access_key_id is not None:
            # As part of `config`, they would be used with a session token of the environment.
            credential = {
                "access_key_id": options.access_key_id,
                "secret_access_key": options.secret_access_key,
                "expires_at": None,
            }
            further["credential_provider"] = lambda: credential
    # The orchestrator has deadlines of its own, and a breaker.
    retry = {"max_retries": 1, "retry_timeout": timedelta(seconds=_RETRY_S)}
    return Objects(
        from_url(options.url, config=config, client_options=client, retry_config=retry, **further)
    )


@contextmanager
def _explained_failures(*expected: type[Exception]) -> Iterator[None]:
    """Turn the library's errors into `ServerFailure`, in words of our own. Errors that the caller
    expects pass."""
    from obstore.exceptions import BaseError

    try:
        yield
    except (BaseError, OSError) as error:
        if isinstance(error, expected):
            raise
        if _PastTheEnd in expected and _PAST_THE_END.search(str(error)):
            raise _PastTheEnd from None
        raise _explained(error) from None
    except BaseException as error:
        # The library panics at some answers. Its panics are no `Exception`, and would end a thread.
        if type(error).__name__ != "PanicException":
            raise
        raise _garbage() from None


def _garbage() -> ServerFailure:
    return ServerFailure(FailureKind.GARBAGE, "the answer is not that of an object store")


def _explained(error: Exception) -> ServerFailure:
    """Why the service cannot be used. The library says it in a text, and only there."""
    from obstore.exceptions import PermissionDeniedError, UnauthenticatedError

    if isinstance(error, (PermissionDeniedError, UnauthenticatedError)):
        return _NOT_ALLOWED.failure()
    if isinstance(error, FileNotFoundError):
        return _NO_BUCKET.failure()
    text = str(error)
    for known in _KNOWN:
        if found := known.pattern.search(text):
            return known.failure(*found.groups())
    return _garbage()
