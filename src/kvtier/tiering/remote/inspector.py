"""`kvtier store` on a server: stat, ls, verify and clear. Engines may use the server meanwhile."""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Any, ClassVar

from kvtier import seal
from kvtier.base import OffloadKey
from kvtier.config import NamespaceDescription
from kvtier.config.sizes import as_size
from kvtier.tiering.inspection import (
    GarbageCollection,
    InspectionRefused,
    Listing,
    Order,
    Progress,
    Report,
    Scrub,
    StoredBlock,
    TierInspector,
    deferred_interrupts,
    matching_namespaces,
)
from kvtier.tiering.remote.errors import ServerFailure
from kvtier.tiering.scrubber import UNREADABLE, Scrubber, Verdict

__all__ = ["RemoteBlock", "RemoteInspector", "RemoteStorage"]

_LARGEST_BLOCK = (1 << 30) + seal.SEAL_BYTES
"""No block is longer. A longer value is damaged, and is not read."""
_LARGE_BYTES = 32 << 20
"""Of a longer value, the seal is read first: it may be something else, and huge."""
_AT_ONCE = 500
"""Blocks removed with one request."""


@dataclass(frozen=True, slots=True)
class RemoteBlock:
    """A value that has the name of a block."""

    place: str
    """Its name on the server."""
    namespace: str
    key: OffloadKey
    num_bytes: int
    """With the seal."""
    used_ns: int | None
    """When it was last used or written, in nanoseconds since 1970. None if unknown."""
    is_private: bool
    """True if only the engine that stored it finds it."""


class RemoteStorage(ABC):
    """What a server keeps, for one command. Every method may raise `ServerFailure`. `read` is
    called by several threads."""

    facts_in_bytes: ClassVar[frozenset[str]] = frozenset()
    """Those of `facts` that are sizes."""
    limits: ClassVar[frozenset[str]] = frozenset()
    """Those of them that are no limit at all if they are 0."""

    @abstractmethod
    def scan(self) -> Iterable[RemoteBlock]:
        """All blocks, in any order."""

    @abstractmethod
    def read(self, place: str, num_bytes: int) -> bytes | memoryview | None:
        """At most this many of a value's first bytes; None if it is gone."""

    @abstractmethod
    def remove(self, places: Sequence[str]) -> None:
        """Remove values. Those that are gone are ignored."""

    @abstractmethod
    def description(self, namespace: str) -> bytes | None:
        """What has the place of a namespace's description; None if there is nothing."""

    @abstractmethod
    def remove_descriptions(self, namespaces: Sequence[str]) -> None:
        """Remove descriptions. Those that are gone are ignored."""

    @abstractmethod
    def facts(self) -> Mapping[str, Any]:
        """What else `stat` shows, by name."""

    @abstractmethod
    def close(self) -> None:
        """Close the connections."""


class RemoteInspector(TierInspector):
    """The blocks of a server."""

    place_name = "name"
    is_place_short = False

    def __init__(self, kind: str, location: str, storage: RemoteStorage) -> None:
        """`location`: without secrets."""
        self.kind = kind
        self.location = location
        self._storage = storage
        self._names: Sequence[str] = ()
        """The namespaces that the last scan has found."""

    def close(self) -> None:
        self._storage.close()

    def _scan(self, namespace: str | None = None) -> list[RemoteBlock]:
        """All blocks, or those whose namespace begins with these digits. Raises
        `InspectionRefused`."""
        try:
            found = list(self._storage.scan())
        except ServerFailure as failure:
            raise self._refusal(failure) from None
        self._names = names = sorted({block.namespace for block in found})
        if namespace is None:
            return found
        wanted = set(matching_namespaces(names, namespace))
        return [block for block in found if block.namespace in wanted]

    def _refusal(self, failure: ServerFailure) -> InspectionRefused:
        return InspectionRefused(
            f"{self.location}: {failure}. Check the URL, and the credentials in the environment"
        )

    # --- stat and ls ---------------------------------------------------------------------------

    def figures(self) -> Report:
        blocks = self._scan()
        try:
            facts = dict(self._storage.facts())
        except ServerFailure as failure:
            raise self._refusal(failure) from None
        spaces: dict[tuple[str, bool], list[RemoteBlock]] = {}
        for block in blocks:
            spaces.setdefault((block.namespace, block.is_private), []).append(block)
        by_size = sorted(spaces.items(), key=lambda each: -len(each[1]))
        num_bytes = _bytes_of(blocks)
        document = {
            "path": self.location,
            "kind": self.kind,
            "blocks": len(blocks),
            "bytes": num_bytes,
            **facts,
            "namespaces": [
                {
                    "namespace": name,
                    "blocks": len(some),
                    "bytes": _bytes_of(some),
                    "private": is_private,
                }
                for (name, is_private), some in by_size
            ],
        }
        lines = [self.location, f"{'blocks':<18}{len(blocks)}, {as_size(num_bytes)}"]
        lines += [f"{name.replace('_', ' '):<18}{value}" for name, value in self._shown(facts)]
        for (name, is_private), some in by_size:
            private = ", private to one engine after a reset" if is_private else ""
            lines.append(f"  {name}  {len(some)} blocks, {as_size(_bytes_of(some))}{private}")
        return Report(document, lines)

    def _shown(self, facts: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
        for name, value in facts.items():
            is_size = name in self._storage.facts_in_bytes
            is_no_limit = name in self._storage.limits and not value
            yield name, "none" if is_no_limit else as_size(value) if is_size else value

    def descriptions(self) -> Mapping[str, NamespaceDescription]:
        found: dict[str, NamespaceDescription] = {}
        try:
            for name in self._names:
                content = self._storage.description(name)
                if content and (description := NamespaceDescription.decode(content, name)):
                    found[name] = description
        except ServerFailure as failure:
            raise self._refusal(failure) from None
        return found

    def blocks(self, namespace: str | None, order: Order, limit: int | None) -> Listing:
        found = self._scan(namespace)
        found.sort(key=lambda block: (-(block.used_ns or 0), block.place))
        ranked = list(enumerate(found, start=1))
        if order is Order.OLDEST:
            ranked.reverse()
        elif order is Order.PLACE:
            ranked.sort(key=lambda each: each[1].place)
        return Listing(len(ranked), self._described(islice(ranked, limit)))

    def keys(self, namespace: str | None) -> Iterator[tuple[str, OffloadKey]]:
        for block in self._scan():
            if not block.is_private and block.namespace.startswith((namespace or "").lower()):
                yield block.namespace, block.key

    def _described(self, ranked: Iterable[tuple[int, RemoteBlock]]) -> Iterator[StoredBlock]:
        for rank, block in ranked:
            try:
                header = self._storage.read(block.place, seal.SEAL_BYTES)
                stored_ns = None if header is None else seal.read(header).time_ns
            except (ServerFailure, seal.SealError):
                stored_ns = None
            num_bytes = max(block.num_bytes - seal.SEAL_BYTES, 0)
            yield StoredBlock(
                block.key, block.namespace, block.place, num_bytes, stored_ns, rank, block.used_ns
            )

    # --- verify and clear ----------------------------------------------------------------------

    def verify(self, namespace: str | None, max_rate: int | None, on_progress: Progress) -> Scrub:
        scrubber = _RemoteScrubber(self._storage, max_rate, on_progress)
        return scrubber.run(self._scan(namespace))

    def count(self, namespace: str | None) -> int:
        return len(self._scan(namespace))

    def clear(self, namespace: str | None, patience_s: float, on_progress: Progress) -> Report:
        started = time.monotonic()
        blocks = self._scan(namespace)
        num_removed = freed_bytes = 0
        with deferred_interrupts() as is_stopping:
            for start in range(0, len(blocks), _AT_ONCE):
                if is_stopping():
                    break
                some = blocks[start : start + _AT_ONCE]
                try:
                    self._storage.remove([block.place for block in some])
                except ServerFailure as failure:
                    raise self._refusal(failure) from None
                num_removed += len(some)
                freed_bytes += _bytes_of(some)
                on_progress(num_removed, len(blocks))
            is_complete = num_removed == len(blocks)
            if is_complete:
                self._storage.remove_descriptions(sorted({block.namespace for block in blocks}))
        document = {
            "path": self.location,
            "complete": is_complete,
            "cleared_blocks": num_removed,
            "freed_bytes": freed_bytes,
            "seconds": round(time.monotonic() - started, 3),
        }
        lines = [f"{self.location}: {num_removed} blocks were removed, {as_size(freed_bytes)}."]
        if not is_complete:
            lines.append("It was ended by Ctrl-C: the other blocks are still there.")
        return Report(document, lines, is_complete)

    def find_garbage(self, namespaces: Sequence[str], older_than_s: int) -> GarbageCollection:
        raise InspectionRefused(
            f"{self.location} needs no gc: ended engines leave nothing there that would have to be "
            "counted. To remove the blocks of one model, use `kvtier store clear --namespace`"
        )


def _bytes_of(blocks: Iterable[RemoteBlock]) -> int:
    return sum(block.num_bytes for block in blocks)


class _RemoteScrubber(Scrubber):
    def __init__(self, storage: RemoteStorage, max_rate: int | None, on_progress: Progress) -> None:
        super().__init__(max_rate, on_progress)
        self._storage = storage

    def run(self, blocks: Sequence[RemoteBlock]) -> Scrub:
        return self._judge_all(
            _bytes_of(blocks),
            self._read_all(blocks, lambda block: block.num_bytes, self._check),
            # A block never changes after it was written.
            lambda suspects: suspects,
        )

    def _check(self, block: RemoteBlock) -> list[Verdict]:
        place, key = block.place, block.key
        if not seal.SEAL_BYTES < block.num_bytes <= _LARGEST_BLOCK:
            return [Verdict(place, key, seal.SealFailure.LENGTH)]
        try:
            if block.num_bytes > _LARGE_BYTES and not self._has_fitting_seal(block):
                return [Verdict(place, key, seal.SealFailure.LENGTH)]
            content = self._storage.read(place, block.num_bytes)
        except ServerFailure:
            return [Verdict(place, key, UNREADABLE)]
        if content is None:
            return [Verdict(place, key, is_gone=True)]
        with memoryview(content) as view:
            failure = seal.check(
                view[: seal.SEAL_BYTES],
                view[seal.SEAL_BYTES :],
                key,
                bytes.fromhex(block.namespace),
            )
        return [Verdict(place, key, failure)]

    def _has_fitting_seal(self, block: RemoteBlock) -> bool:
        """False if the value begins with no seal of this length, so that it need not be read."""
        header = self._storage.read(block.place, seal.SEAL_BYTES)
        try:
            payload_bytes = None if header is None else seal.read(header).payload_bytes
        except seal.SealError:
            return False
        return payload_bytes in (None, block.num_bytes - seal.SEAL_BYTES)
