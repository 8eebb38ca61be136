"""The objects below one URL, through the client library obstore.

PREFIX/kvtier/1/<fingerprint>/<key>    a block: the seal, then the payload. The key is in hex digits
PREFIX/kvtier/1/private/<engine>/...   the same, of namespaces that only this engine reads

The version of the stored format is part of each name, so that releases with another one neither
find nor touch these blocks. No error's text is passed on: it may quote a signed URL.
"""

from __future__ import annotations

import re
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from typing import TYPE_CHECKING, Any

from kvtier.tiering.remote.errors import FailureKind, ServerFailure

if TYPE_CHECKING:
    from kvtier.tiering.obj.options import ObjOptions

__all__ = ["BLOCKS", "PRIVATE", "NotAllowed", "Objects", "open_objects"]

BLOCKS = "kvtier/1"
PRIVATE = f"{BLOCKS}/private"
_CONNECT_S = 2
_SILENCE_S = 5
"""How long the service may send nothing."""
_REQUEST_S = 30
"""How long one request may take in all."""
_NAMES: dict[str, dict[str, str]] = {
    "s3": {
        "endpoint": "endpoint",
        "region": "region",
        "access_key_id": "access_key_id",
        "secret_access_key": "secret_access_key",
    },
    "az": {
        "endpoint": "endpoint",
        "access_key_id": "account_name",
        "secret_access_key": "account_key",
    },
    "gs": {},
}
"""The library's names of our keys, by scheme."""
_STATUS = re.compile(r"status code: (\d{3})")


class NotAllowed(ServerFailure):
    """The service does not know the credentials, they may not do this, or there is no bucket."""


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
            with _explained_failures():
                return int(obstore.head(self._store, name)["size"])
        except FileNotFoundError:
            return None

    async def size_of_async(self, name: str) -> int | None:
        """The same, for many at once."""
        import obstore

        try:
            with _explained_failures():
                return int((await obstore.head_async(self._store, name))["size"])
        except FileNotFoundError:
            return None

    def read(self, name: str, num_bytes: int) -> Any | None:
        """The content of an object of this size, as a buffer; empty if it has another size; None if
        there is none."""
        import obstore

        try:
            with _explained_failures():
                found = obstore.get(self._store, name)
                if found.meta["size"] != num_bytes:
                    return b""  # do not read it: it may be huge
                return found.bytes()
        except FileNotFoundError:
            return None

    def read_first(self, name: str, num_bytes: int) -> Any | None:
        """At most this many of an object's first bytes, as a buffer; None if there is none."""
        import obstore

        try:
            with _explained_failures():
                return obstore.get_range(self._store, name, start=0, end=num_bytes)
        except FileNotFoundError:
            return None

    def create(self, name: str, parts: Sequence[bytes | memoryview]) -> bool:
        """Write an object, unless there is one of this name. Returns True if it was written."""
        import obstore
        from obstore.exceptions import AlreadyExistsError, PreconditionError

        try:
            with _explained_failures():
                obstore.put(self._store, name, iter(parts), mode="create", use_multipart=False)
        except (AlreadyExistsError, PreconditionError):
            return False
        except FileNotFoundError:
            raise NotAllowed(FailureKind.REFUSED, "there is no such bucket") from None
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
            with _explained_failures():
                return float(obstore.head(self._store, name)["last_modified"].timestamp())
        except FileNotFoundError:
            return None

    def remove(self, names: Sequence[str]) -> None:
        """Remove objects. Names without an object are ignored."""
        import obstore

        try:
            with _explained_failures():
                obstore.delete(self._store, list(names))
        except FileNotFoundError:
            pass

    def remove_below(self, prefix: str, most_s: float) -> None:
        """Remove all objects with this prefix, for this time at most."""
        deadline = time.monotonic() + most_s
        for page in self.below(prefix):
            if time.monotonic() > deadline:
                return
            self.remove([item["path"] for item in page])

    def below(self, prefix: str) -> Iterator[list[dict[str, Any]]]:
        """Lists of objects with this prefix, each with `path`, `size` and `last_modified`."""
        import obstore

        with _explained_failures():
            yield from obstore.list(self._store, prefix)


def open_objects(options: ObjOptions) -> Objects:
    """Open the place that the options name. Does not connect. Raises `ImportError` without the
    client library, and `ValueError` for what it cannot use."""
    from obstore.store import from_url

    client: dict[str, Any] = {
        "timeout": timedelta(seconds=_REQUEST_S),
        "read_timeout": timedelta(seconds=_SILENCE_S),
        "connect_timeout": timedelta(seconds=_CONNECT_S),
        "allow_http": options.allow_http,
    }
    if options.ca_bundle is not None:
        client["root_certificate"] = options.ca_bundle.read_text()
    if options.scheme == "file":
        return Objects(from_url(options.url, mkdir=True))
    config = {
        name: value
        for option, name in _NAMES[options.scheme].items()
        if (value := getattr(options, option)) is not None
    }
    if options.scheme == "s3":
        # Digests of the content take two thirds of the processor time of a store. The seal has one.
        config["unsigned_payload"] = "true"
    # The orchestrator has deadlines of its own, and a breaker.
    retry = {"max_retries": 1, "retry_timeout": timedelta(seconds=_REQUEST_S)}
    return Objects(from_url(options.url, config=config, client_options=client, retry_config=retry))


@contextmanager
def _explained_failures() -> Iterator[None]:
    """Turn the library's errors into `ServerFailure`, in words of our own."""
    from obstore.exceptions import (
        AlreadyExistsError,
        BaseError,
        PermissionDeniedError,
        PreconditionError,
        UnauthenticatedError,
    )

    try:
        yield
    except (AlreadyExistsError, PreconditionError, FileNotFoundError):
        raise
    except (PermissionDeniedError, UnauthenticatedError):
        raise _not_allowed() from None
    except (BaseError, OSError) as error:
        text = str(error)
        status = _STATUS.search(text)
        if status is not None:
            if status[1] in ("401", "403"):
                raise _not_allowed() from None
            raise ServerFailure(
                FailureKind.REFUSED, f"the service answered with status {status[1]}"
            ) from None
        if "timed out" in text or "timeout" in text:
            raise ServerFailure(FailureKind.SILENT, "the service did not answer in time") from None
        raise ServerFailure(FailureKind.UNREACHABLE, "the service cannot be reached") from None


def _not_allowed() -> NotAllowed:
    return NotAllowed(
        FailureKind.REFUSED, "the service does not accept the credentials, or not for this"
    )
