"""A slab file behind the commands of `kvtier store`."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from types import TracebackType

import numpy as np
from numpy.typing import NDArray

from kvtier.base import OffloadKey
from kvtier.cli.store.refusal import StoreRefused
from kvtier.cli.store.slab_clearing import SlabClearing, clear_slab
from kvtier.cli.store.slab_figures import SlabFigures
from kvtier.cli.store.slab_namespaces import matching_tags, namespaces_of
from kvtier.cli.store.slab_scrub import SlabScrubber
from kvtier.cli.store.store import Listing, Order, Scrub, StoredBlock
from kvtier.tiering.disk.reader import SlabReader, SlabUnreadable, Snapshot
from kvtier.tiering.io.aio import AioUnavailable

__all__ = ["SlabStore"]

_HEADERS_AT_ONCE = 16_384


class SlabStore:
    """`Store` over the slab of a disk tier."""

    kind = "slab"
    place_name = "slot"
    is_place_short = True

    def __init__(self, path: Path) -> None:
        self.path = path
        try:
            self._reader = SlabReader(path)
        except SlabUnreadable as problem:
            raise StoreRefused(str(problem)) from None

    def __enter__(self) -> SlabStore:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._reader.__exit__(kind, error, traceback)

    def figures(self) -> SlabFigures:
        snapshot = self._snapshot()
        return SlabFigures.of(self._reader, snapshot, namespaces_of(self._reader, snapshot))

    # --- blocks --------------------------------------------------------------------------------

    def blocks(self, namespace: str | None, order: Order, limit: int | None) -> Listing:
        snapshot = self._snapshot()
        spaces = namespaces_of(self._reader, snapshot)
        entries = snapshot.entries
        slots = snapshot.live_slots()
        slots = slots[np.argsort(entries["used"][slots], kind="stable")[::-1]]
        ranks = np.arange(1, len(slots) + 1)
        if namespace is not None:
            is_wanted = np.isin(entries["tag"][slots], matching_tags(spaces, namespace))
            slots, ranks = slots[is_wanted], ranks[is_wanted]
        if order is Order.OLDEST:
            slots, ranks = slots[::-1], ranks[::-1]
        elif order is Order.PLACE:
            by_place = np.argsort(slots)
            slots, ranks = slots[by_place], ranks[by_place]
        names = {space.tag: space.name for space in spaces}
        return Listing(len(slots), self._read(snapshot, slots[:limit], ranks[:limit], names))

    def _read(
        self,
        snapshot: Snapshot,
        slots: NDArray[np.int64],
        ranks: NDArray[np.int64],
        names: dict[int, str],
    ) -> Iterator[StoredBlock]:
        for start in range(0, len(slots), _HEADERS_AT_ONCE):
            some = slots[start : start + _HEADERS_AT_ONCE]
            try:
                headers = self._reader.headers_of(snapshot, np.sort(some).tolist())
            except AioUnavailable as lack:
                raise StoreRefused(str(lack)) from None
            for slot, rank in zip(some.tolist(), ranks[start:].tolist(), strict=False):
                entry = snapshot.entry(slot)
                assert entry is not None
                found = headers.get(slot)
                if found is not None and found.seq > entry.seq:
                    continue  # another block has been written there since
                is_it = found is not None and found.seq == entry.seq
                header = found if is_it else None
                key: OffloadKey | None = entry.key if header is None else header.key
                if key is None:
                    continue
                name = names[entry.tag] if header is None else header.fingerprint.hex()
                stored_ns = None if header is None else header.time_ns
                num_bytes = snapshot.geometry.payload_bytes
                yield StoredBlock(key, name, slot, num_bytes, stored_ns, rank)

    # --- all of it -----------------------------------------------------------------------------

    def verify(
        self,
        namespace: str | None,
        max_rate: int | None,
        on_progress: Callable[[int, int], None],
    ) -> Scrub:
        snapshot = self._snapshot()
        tags = None
        if namespace is not None:
            tags = matching_tags(namespaces_of(self._reader, snapshot), namespace)
        scrubber = SlabScrubber(self._reader, tags, max_rate, on_progress)
        try:
            return scrubber.run(snapshot)
        except SlabUnreadable as problem:
            raise StoreRefused(str(problem)) from None

    def count_engines(self) -> int:
        return int(self._reader.is_held())

    def count(self, namespace: str | None) -> int:
        if namespace is not None:
            raise StoreRefused(
                f"{self.path} is a slab, which is cleared as a whole: leave out --namespace"
            )
        return len(self._snapshot().live_slots())

    def clear(
        self,
        namespace: str | None,
        patience_s: float,
        on_progress: Callable[[int, int], None],
    ) -> SlabClearing:
        return clear_slab(self._reader, self.count(namespace), patience_s)

    def _snapshot(self) -> Snapshot:
        try:
            return self._reader.snapshot()
        except SlabUnreadable as problem:
            raise StoreRefused(str(problem)) from None
