"""The disk tier's events: blocks that are stored and removed, and those that it has found.

Blocks that an earlier engine left are announced after the start, a few in each step, the most
recently used first. If events describe blocks, a thread first reads the descriptions, which are in
the slots' headers.
"""

from __future__ import annotations

import logging
import queue
import threading
import time
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from kvtier.base import BlockDescriber, Medium, OffloadingEvent, OffloadKey
from kvtier.tiering.disk.recovery import scan_headers
from kvtier.tiering.disk.slab import Slab
from kvtier.tiering.disk.slots import SlabBlock
from kvtier.tiering.io.aio import AioUnavailable

if TYPE_CHECKING:
    from kvtier.tiering.base import SecondaryTierManager

__all__ = ["EventLog"]

logger = logging.getLogger(__name__)

_ANNOUNCED_AT_ONCE = 256
"""Limit on blocks of an earlier engine in one event. An engine takes one such event in a step."""
_BATCHES_AHEAD = 2
"""Batches of descriptions that wait for the engine's next steps."""
_PATIENCE_S = 1.0
"""An engine without requests keeps stepping for this long after the last progress."""
_PAUSE_S = 0.05


class EventLog:
    """Records events between two calls of `take`. Scheduler thread only, except `stop`."""

    def __init__(
        self, tier: SecondaryTierManager, slab: Slab, found: Mapping[OffloadKey, SlabBlock]
    ) -> None:
        """`found`: the blocks that an earlier engine left, most recently used first."""
        self._tier = tier
        self._slab = slab
        self._events: list[OffloadingEvent] = []
        self._unannounced = dict(found)
        """Blocks of an earlier engine that are not in any event yet."""
        self._to_announce = list(found.values())[::-1]
        """Those of them that `take` has not come to, and some that are gone. The next one is last,
        so that taking it away takes no time."""
        self._reader: _DescriptionReader | None = None
        self._progress: float | None = None
        """When blocks were last announced, or `has_announcements` was first called."""

    def stored(self, keys: list[OffloadKey]) -> None:
        self._add(keys, removed=False)

    def removed(self, keys: list[OffloadKey]) -> None:
        """Report removed blocks, except those that were never announced."""
        if self._unannounced and self._tier.enable_kv_events:
            unannounced = self._unannounced.keys() & keys
            keys = [key for key in keys if key not in unannounced]
            for key in unannounced:
                del self._unannounced[key]
        self._add(keys, removed=True)

    def all_removed(self, keys: Collection[OffloadKey]) -> None:
        """Report that the tier was emptied. `keys`: all blocks that were readable before."""
        unannounced, self._unannounced = self._unannounced, {}
        if self._tier.enable_kv_events:
            announced = list(keys)
            if unannounced:
                announced = [key for key in keys if key not in unannounced]
            self._add(announced, removed=True)

    def drop_if_disabled(self) -> None:
        if self._unannounced and not self._tier.enable_kv_events:
            self._unannounced = {}

    def take(self) -> list[OffloadingEvent]:
        events, self._events = self._events, []
        if self._unannounced and self._tier.enable_kv_events:
            events += self._announce()
        return events

    def has_announcements(self) -> bool:
        """True if a further `take` will soon announce more blocks."""
        if not self._unannounced or not self._tier.enable_kv_events:
            return False
        now = time.monotonic()
        if self._progress is None:
            self._progress = now
        return now - self._progress < _PATIENCE_S

    def stop(self) -> None:
        """Announce nothing more. Waits for the disk. No call of `take` follows."""
        self._unannounced = {}
        if self._reader is not None:
            self._reader.stop()

    def _announce(self) -> Iterator[OffloadingEvent]:
        describer = self._tier.offloading_spec.describer
        if describer is None:
            keys = [block.key for block in _next_of(self._to_announce)]
            descriptions: Sequence[Any] = [None] * len(keys)
        else:
            if self._reader is None:
                self._reader = _DescriptionReader(
                    self._slab, self._tier.fingerprint, self._to_announce, describer
                )
            keys, descriptions = self._reader.take()
        if not keys:
            return
        self._progress = time.monotonic()
        found = [
            (key, description)
            for key, description in zip(keys, descriptions, strict=True)
            if self._unannounced.pop(key, None) is not None
        ]
        if found:
            event = OffloadingEvent(
                [key for key, _ in found], Medium.STORAGE, False, self._tier.locality
            )
            event.descriptions = [description for _, description in found]
            yield event

    def _add(self, keys: list[OffloadKey], removed: bool) -> None:
        if keys and self._tier.enable_kv_events:
            event = OffloadingEvent(keys, Medium.STORAGE, removed, self._tier.locality)
            self._events.append(event)


def _next_of(blocks: list[SlabBlock]) -> list[SlabBlock]:
    """Take the blocks for the next event from the end of the list."""
    taken = blocks[: -_ANNOUNCED_AT_ONCE - 1 : -1]
    del blocks[-_ANNOUNCED_AT_ONCE:]
    return taken


class _DescriptionReader:
    """Reads the descriptions of blocks from the slots' headers, on a thread of its own."""

    def __init__(
        self,
        slab: Slab,
        fingerprint: bytes,
        blocks: list[SlabBlock],
        describer: BlockDescriber,
    ) -> None:
        """`blocks`: the next one is last. From now on, only the thread takes blocks from it."""
        self._slab = slab
        self._fingerprint = fingerprint
        self._blocks = blocks
        self._describer = describer
        self._ready: queue.Queue[tuple[list[OffloadKey], list[Any]]] = queue.Queue(_BATCHES_AHEAD)
        self._is_stopping = False
        self._thread = threading.Thread(target=self._run, name="kvtier-disk-events", daemon=True)
        self._thread.start()

    def take(self) -> tuple[list[OffloadKey], list[Any]]:
        """The next blocks and their descriptions, None for those that have none. Empty if they are
        not read yet, or if there are no more."""
        try:
            return self._ready.get_nowait()
        except queue.Empty:
            return [], []

    def stop(self) -> None:
        """End the thread. Waits for the disk."""
        self._is_stopping = True
        self._thread.join()

    def _run(self) -> None:
        while blocks := _next_of(self._blocks):
            batch = ([block.key for block in blocks], self._read(blocks))
            while not self._is_stopping:
                try:
                    self._ready.put(batch, timeout=_PAUSE_S)
                    break
                except queue.Full:
                    continue
            if self._is_stopping:
                return

    def _read(self, blocks: Sequence[SlabBlock]) -> list[Any]:
        try:
            return self._descriptions(blocks)
        except (OSError, AioUnavailable) as error:
            logger.warning(
                "%s: headers could not be read (%s); events for %d blocks have no tokens",
                self._slab.file.path,
                error,
                len(blocks),
            )
            return [None] * len(blocks)

    def _descriptions(self, blocks: Sequence[SlabBlock]) -> list[Any]:
        slab = self._slab
        slots = sorted(block.block_id for block in blocks)
        headers = {
            (found.key, found.seq): found.description
            for found in scan_headers(slab.file, slab.geometry, slab.superblock.uuid, slots)
            if found.fingerprint == self._fingerprint
        }
        described: list[Any] = []
        for block in blocks:
            data = headers.get((block.key, block.generation))
            described.append(None if data is None else self._describer.read(block.key, data))
        return described
