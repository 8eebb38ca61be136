"""What there is to know about a slab as a whole."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from kvtier.cli.store.amounts import as_size, as_time
from kvtier.cli.store.slab_namespaces import Namespace
from kvtier.tiering.disk.layout import Geometry, Holder
from kvtier.tiering.disk.reader import SlabReader, Snapshot

__all__ = ["SlabFigures"]


@dataclass(frozen=True, slots=True)
class SlabFigures:
    """`Figures` of a slab file."""

    path: str
    version: int
    uuid: str
    created_ns: int
    geometry: Geometry
    file_bytes: int
    allocated_bytes: int
    num_blocks: int
    num_dead: int
    namespaces: list[Namespace]
    holder: Holder | None
    is_held: bool
    num_damaged_pages: int
    num_intact_superblocks: int
    is_clear_pending: bool

    @classmethod
    def of(cls, reader: SlabReader, snapshot: Snapshot, namespaces: list[Namespace]) -> SlabFigures:
        superblock = snapshot.superblock
        request = reader.clear_request()
        return cls(
            path=str(reader.file.path),
            version=reader.version,
            uuid=superblock.uuid.hex(),
            created_ns=superblock.created_ns,
            geometry=snapshot.geometry,
            file_bytes=reader.file.size,
            allocated_bytes=reader.file.allocated_bytes,
            num_blocks=sum(space.num_blocks for space in namespaces),
            num_dead=snapshot.num_dead(),
            namespaces=namespaces,
            holder=reader.holder(),
            is_held=reader.is_held(),
            num_damaged_pages=len(snapshot.damaged_pages),
            num_intact_superblocks=reader.num_intact_superblocks(),
            is_clear_pending=request not in (None, superblock.last_clear),
        )

    def as_json(self) -> dict[str, Any]:
        holder = self.holder
        return {
            "path": self.path,
            "kind": "slab",
            "version": self.version,
            "uuid": self.uuid,
            "created_at": as_time(self.created_ns),
            "file_bytes": self.file_bytes,
            "expected_file_bytes": self.geometry.file_bytes,
            "allocated_bytes": self.allocated_bytes,
            "block_bytes": self.geometry.payload_bytes,
            "slots": self.geometry.num_slots,
            "blocks": self.num_blocks,
            "dead_blocks": self.num_dead,
            "namespaces": [
                {
                    "namespace": space.name,
                    "blocks": space.num_blocks,
                    "bytes": space.num_blocks * self.geometry.payload_bytes,
                }
                for space in self.namespaces
            ],
            "holder": None
            if holder is None
            else {
                "engine_id": holder.engine_id,
                "pid": holder.pid,
                "host": holder.host,
                "since": as_time(holder.since_ns),
            },
            "held": self.is_held,
            "index_pages": self.geometry.num_index_pages,
            "damaged_index_pages": self.num_damaged_pages,
            "intact_superblocks": self.num_intact_superblocks,
            "clear_pending": self.is_clear_pending,
        }

    def lines(self) -> Iterator[str]:
        geometry = self.geometry
        in_use = self.num_blocks * geometry.payload_bytes
        yield self.path
        yield f"format      version {self.version}, made {as_time(self.created_ns)}"
        yield f"on disk     {as_size(self.allocated_bytes)} ({self.allocated_bytes} bytes)"
        if self.file_bytes != geometry.file_bytes:
            yield (
                f"            the file has {self.file_bytes} bytes and should have "
                f"{geometry.file_bytes}: the next engine that opens it mends it"
            )
        yield f"slots       {geometry.num_slots} of {as_size(geometry.payload_bytes)}"
        yield f"blocks      {self.num_blocks} ({as_size(in_use)})"
        for space in self.namespaces:
            yield f"  {space.name}  {space.num_blocks}"
        if self.num_dead:
            yield f"cleared     {self.num_dead} blocks that no engine will find"
        yield f"in use      {self._who()}"
        yield f"index       {geometry.num_index_pages} pages, {self.num_damaged_pages} damaged"
        if self.num_damaged_pages:
            yield "            their slots are not counted here; an engine that starts asks them"
        if self.num_intact_superblocks < 2:
            yield "superblock  one of two copies is damaged; an engine that starts mends it"
        if self.is_clear_pending:
            yield "clear       asked for; an engine obeys within about a second, or when it starts"

    def _who(self) -> str:
        if self.holder is None:
            return "by a process that has left no name" if self.is_held else "no, and never was"
        who = (
            f"{self.holder.engine_id} (process {self.holder.pid} on {self.holder.host}, "
            f"since {as_time(self.holder.since_ns)})"
        )
        return f"by {who}" if self.is_held else f"no; last by {who}"
