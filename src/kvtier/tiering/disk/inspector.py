"""`kvtier store` on a slab file: lists, counts, verifies and clears its blocks.

An engine may have the slab open at the same time. Only `clear` writes. The other commands take the
slab's lock at most for an instant, to see whether an engine holds it.
"""

from __future__ import annotations

import os
import time
import uuid
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

import numpy as np
from numpy.typing import NDArray

from kvtier.base import OffloadKey
from kvtier.config import NamespaceDescription
from kvtier.config.sizes import as_size
from kvtier.tiering.disk.file import SlabFile
from kvtier.tiering.disk.index import is_alive, tag_name
from kvtier.tiering.disk.layout import CONTROL_OFFSET, Holder, encode_clear_request
from kvtier.tiering.disk.ownership import SlabRefused
from kvtier.tiering.disk.reader import SlabReader, SlabUnreadable, Snapshot
from kvtier.tiering.disk.scrub import SlabScrubber
from kvtier.tiering.disk.slab import open_slab
from kvtier.tiering.inspection import (
    InspectionRefused,
    InspectionTimedOut,
    Listing,
    Order,
    Progress,
    Report,
    Scrub,
    StoredBlock,
    TierInspector,
    as_time,
    matching_namespaces,
)
from kvtier.tiering.io.aio import AioUnavailable

__all__ = ["SlabInspector"]

_HEADERS_AT_ONCE = 16_384
_SLOTS_ASKED = 8
"""Slots whose headers are read to learn the fingerprint of a namespace. More than one, because some
headers may be damaged or overwritten."""
_LOOK_EVERY_S = 0.05
_OUR_NAME = "kvtier store clear"
"""Engine id that `clear` leaves in the slab when it opens the slab itself."""


@dataclass(frozen=True, slots=True)
class _Namespace:
    """Blocks of one model, layout and epoch."""

    tag: int
    """The first four bytes of the fingerprint, as a number; see `namespace_tag`."""
    name: str
    """The fingerprint in hexadecimal; only its first 8 digits if no header could be read."""
    num_blocks: int


class SlabInspector(TierInspector):
    """The slab file of a disk tier."""

    kind = "slab"
    place_name = "slot"

    def __init__(self, path: Path) -> None:
        """Raises `InspectionRefused` or `OSError`."""
        self.location = str(path)
        try:
            self._reader = SlabReader(path)
        except SlabUnreadable as problem:
            raise InspectionRefused(str(problem)) from None

    def close(self) -> None:
        self._reader.file.close()

    def _snapshot(self) -> Snapshot:
        try:
            return self._reader.snapshot()
        except SlabUnreadable as problem:
            raise InspectionRefused(str(problem)) from None

    def _namespaces(self, snapshot: Snapshot) -> list[_Namespace]:
        """The namespaces that have blocks, largest first. The index has only the first four bytes
        of a fingerprint; the complete one is read from slot headers."""
        slots = snapshot.live_slots()
        tags = snapshot.entries["tag"][slots]
        samples: list[int] = []
        counts: dict[int, int] = {}
        for tag in np.unique(tags).tolist():
            members = slots[tags == tag]
            counts[tag] = len(members)
            samples += members[:_SLOTS_ASKED].tolist()
        names: dict[int, str] = {}
        try:
            headers = self._reader.headers_of(snapshot, samples)
        except AioUnavailable as lack:
            raise InspectionRefused(str(lack)) from None
        for slot, found in headers.items():
            if found.seq == int(snapshot.entries["seq"][slot]):
                names[int(snapshot.entries["tag"][slot])] = found.fingerprint.hex()
        found_namespaces = [
            _Namespace(tag, names.get(tag, tag_name(tag)), count) for tag, count in counts.items()
        ]
        return sorted(found_namespaces, key=lambda namespace: -namespace.num_blocks)

    # --- stat ----------------------------------------------------------------------------------

    def figures(self) -> Report:
        snapshot = self._snapshot()
        figures = self._figures(snapshot, self._namespaces(snapshot))
        return Report(figures, list(_figure_lines(figures)))

    def _figures(self, snapshot: Snapshot, namespaces: list[_Namespace]) -> dict[str, Any]:
        reader, superblock, geometry = self._reader, snapshot.superblock, snapshot.geometry
        holder, request = reader.holder(), reader.clear_request()
        return {
            "path": self.location,
            "kind": self.kind,
            "version": reader.version,
            "uuid": superblock.uuid.hex(),
            "created_at": as_time(superblock.created_ns),
            "file_bytes": reader.file.size,
            "expected_file_bytes": geometry.file_bytes,
            "allocated_bytes": reader.file.allocated_bytes,
            "block_bytes": geometry.payload_bytes,
            "slots": geometry.num_slots,
            "blocks": sum(space.num_blocks for space in namespaces),
            "dead_blocks": snapshot.num_dead(),
            "namespaces": [
                {
                    "namespace": space.name,
                    "blocks": space.num_blocks,
                    "bytes": space.num_blocks * geometry.payload_bytes,
                }
                for space in namespaces
            ],
            "holder": None if holder is None else _holder_json(holder),
            "held": reader.is_held(),
            "index_pages": geometry.num_index_pages,
            "damaged_index_pages": len(snapshot.damaged_pages),
            "intact_superblocks": reader.num_intact_superblocks(),
            "clear_pending": request not in (None, superblock.last_clear),
        }

    # --- ls ------------------------------------------------------------------------------------

    def blocks(self, namespace: str | None, order: Order, limit: int | None) -> Listing:
        snapshot = self._snapshot()
        spaces = self._namespaces(snapshot)
        entries = snapshot.entries
        slots = snapshot.live_slots()
        slots = slots[np.argsort(entries["used"][slots], kind="stable")[::-1]]
        ranks = np.arange(1, len(slots) + 1)
        if namespace is not None:
            is_wanted = np.isin(entries["tag"][slots], _matching_tags(spaces, namespace))
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
                raise InspectionRefused(str(lack)) from None
            for slot, rank in zip(some.tolist(), ranks[start:].tolist(), strict=False):
                entry = snapshot.entry(slot)
                assert entry is not None
                found = headers.get(slot)
                if found is not None and found.seq > entry.seq:
                    continue  # another block has been written there since the snapshot
                is_same_block = found is not None and found.seq == entry.seq
                header = found if is_same_block else None
                key: OffloadKey | None = entry.key if header is None else header.key
                if key is None:
                    continue
                name = names[entry.tag] if header is None else header.fingerprint.hex()
                stored_ns = None if header is None else header.time_ns
                num_bytes = snapshot.geometry.payload_bytes
                yield StoredBlock(key, name, slot, num_bytes, stored_ns, rank)

    def descriptions(self) -> Mapping[str, NamespaceDescription]:
        described = self._reader.superblock.descriptions
        return {description.namespace: description for description in described}

    # --- verify --------------------------------------------------------------------------------

    def verify(self, namespace: str | None, max_rate: int | None, on_progress: Progress) -> Scrub:
        snapshot = self._snapshot()
        tags = None
        if namespace is not None:
            tags = _matching_tags(self._namespaces(snapshot), namespace)
        scrubber = SlabScrubber(self._reader, tags, max_rate, on_progress)
        try:
            return scrubber.run(snapshot)
        except SlabUnreadable as problem:
            raise InspectionRefused(str(problem)) from None

    # --- clear ---------------------------------------------------------------------------------

    def count_engines(self) -> int:
        return int(self._reader.is_held())

    def count(self, namespace: str | None) -> int:
        """Blocks whose page of the index is damaged are not counted."""
        if namespace is not None:
            raise InspectionRefused(
                f"{self.location} is a slab, which is cleared as a whole: leave out --namespace"
            )
        return len(self._snapshot().live_slots())

    def clear(self, namespace: str | None, patience_s: float, on_progress: Progress) -> Report:
        """Clear the slab in this process if no engine has it open. Otherwise write a request into
        the file, and wait until the engine has carried it out."""
        num_blocks = self.count(namespace)
        started = time.monotonic()
        request_id: bytes | None = None
        while True:
            if not self._reader.is_held() and (num_found := self._clear_unheld()) is not None:
                return self._cleared(num_found, started, by_engine=False)
            if request_id is None:
                request_id = uuid.uuid4().bytes
                self._ask_the_engine(request_id)
            if self._last_clear() in (request_id, self._reader.clear_request()):
                # The engine has carried out our request, or one that another command has written
                # over it since.
                return self._cleared(num_blocks, started, by_engine=True)
            if time.monotonic() - started > patience_s:
                raise InspectionTimedOut(self._not_yet(patience_s))
            time.sleep(_LOOK_EVERY_S)

    def _cleared(self, num_blocks: int, started: float, *, by_engine: bool) -> Report:
        by = " by the engine that has it open" if by_engine else ""
        document = {
            "path": self.location,
            "cleared_blocks": num_blocks,
            "by_engine": by_engine,
            "seconds": round(time.monotonic() - started, 3),
        }
        lines = (
            f"{self.location}: {num_blocks} blocks were cleared{by}.",
            "Their bytes stay in the file until they are overwritten, or it is removed.",
        )
        return Report(document, lines)

    def _clear_unheld(self) -> int | None:
        """Open the slab as an engine does, and clear it. Returns the number of blocks that it held;
        None if another process opened it first."""
        reader = self._reader
        try:
            before = reader.read_superblock()
            slab = open_slab(
                reader.file.path,
                before.geometry.payload_bytes,
                max_bytes=None,
                engine_id=_OUR_NAME,
                use_o_direct=False,
                may_be_foreign=True,
            )
        except (AioUnavailable, SlabUnreadable) as problem:
            raise InspectionRefused(str(problem)) from None
        except SlabRefused as problem:
            if reader.is_held():
                return None
            raise InspectionRefused(str(problem)) from None
        try:
            num_blocks = int(np.count_nonzero(is_alive(slab.index.entries(), before.cut)))
            # A pending request is carried out by this, too.
            last_clear = reader.clear_request() or slab.superblock.last_clear
            slab.save_superblock(cut=slab.first_seq, last_clear=last_clear)
            slab.file.sync()
        finally:
            slab.close()
        return num_blocks

    def _ask_the_engine(self, request_id: bytes) -> None:
        file = SlabFile(self._reader.file.path, os.O_RDWR)
        try:
            file.use_o_direct()
            file.write(CONTROL_OFFSET, encode_clear_request(request_id))
            file.sync()
        finally:
            file.close()

    def _last_clear(self) -> bytes:
        try:
            return self._reader.read_superblock().last_clear
        except SlabUnreadable as problem:
            raise InspectionRefused(str(problem)) from None

    def _not_yet(self, patience_s: float) -> str:
        holder = self._reader.holder()
        who = "the process that has it open"
        if holder is not None:
            who = f'the engine "{holder.engine_id}" (process {holder.pid} on {holder.host})'
        return (
            f"{self.location} is not cleared yet: {who} did not respond within {patience_s:g} s. "
            "The request stays in the file, and the engine carries it out when it next checks the "
            "file. If the engine hangs, end it and run this command again"
        )

    # --- gc ------------------------------------------------------------------------------------

    def find_garbage(self, namespaces: Sequence[str], older_than_s: int) -> NoReturn:
        raise InspectionRefused(
            f"{self.location} is a slab, which needs no gc: it never grows, and its engine "
            "overwrites old blocks"
        )


def _matching_tags(namespaces: list[_Namespace], wanted: str) -> list[int]:
    names = matching_namespaces([space.name for space in namespaces], wanted)
    return [space.tag for space in namespaces if space.name in names]


def _holder_json(holder: Holder) -> dict[str, Any]:
    return {
        "engine_id": holder.engine_id,
        "pid": holder.pid,
        "host": holder.host,
        "since": as_time(holder.since_ns),
    }


def _figure_lines(figures: dict[str, Any]) -> Iterator[str]:
    """The figures of `stat` as lines of text."""
    block_bytes, allocated = figures["block_bytes"], figures["allocated_bytes"]
    yield figures["path"]
    yield f"format      version {figures['version']}, made {figures['created_at']}"
    yield f"on disk     {as_size(allocated)} ({allocated} bytes)"
    if figures["file_bytes"] != figures["expected_file_bytes"]:
        yield (
            f"            the file has {figures['file_bytes']} bytes and should have "
            f"{figures['expected_file_bytes']}: the next engine that opens it repairs it"
        )
    yield f"slots       {figures['slots']} of {as_size(block_bytes)}"
    yield f"blocks      {figures['blocks']} ({as_size(figures['blocks'] * block_bytes)})"
    for space in figures["namespaces"]:
        yield f"  {space['namespace']}  {space['blocks']}"
    if figures["dead_blocks"]:
        yield f"cleared     {figures['dead_blocks']} blocks that no engine will find"
    yield f"in use      {_user(figures['holder'], figures['held'])}"
    damaged = figures["damaged_index_pages"]
    yield f"index       {figures['index_pages']} pages, {damaged} damaged"
    if damaged:
        yield "            their slots are not counted here; an engine that starts reads them"
    if figures["intact_superblocks"] < 2:
        yield "superblock  one of two copies is damaged; an engine that starts repairs it"
    if figures["clear_pending"]:
        yield "clear       requested; an engine clears within about a second, or when it starts"


def _user(holder: dict[str, Any] | None, is_held: bool) -> str:
    if holder is None:
        return "by a process that left no name" if is_held else "no; no engine has opened it yet"
    who = "{engine_id} (process {pid} on {host}, since {since})".format(**holder)
    return f"by {who}" if is_held else f"no; last by {who}"
