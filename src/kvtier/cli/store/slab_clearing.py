"""Forget everything that is in a slab, by ourselves or through the engine that has it open."""

from __future__ import annotations

import os
import time
import uuid
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np

from kvtier.cli.store.refusal import NotDone, StoreRefused
from kvtier.tiering.disk.file import SlabFile
from kvtier.tiering.disk.index import is_alive
from kvtier.tiering.disk.layout import CONTROL_OFFSET, encode_clear_request
from kvtier.tiering.disk.reader import SlabReader, SlabUnreadable
from kvtier.tiering.disk.refusal import SlabRefused
from kvtier.tiering.disk.slab import open_slab
from kvtier.tiering.io.aio import AioUnavailable

__all__ = ["SlabClearing", "clear_slab"]

_LOOK_EVERY_S = 0.05
_OUR_NAME = "kvtier store clear"
"""Who has the slab, should an engine be started in this very moment."""


@dataclass(frozen=True, slots=True)
class SlabClearing:
    """`Clearing` of a slab."""

    path: str
    num_blocks: int
    by_engine: bool
    """Whether the engine that has the slab open did it."""
    seconds: float

    @property
    def is_complete(self) -> bool:
        return True

    def as_json(self) -> dict[str, Any]:
        return {
            "path": self.path,
            "cleared_blocks": self.num_blocks,
            "by_engine": self.by_engine,
            "seconds": round(self.seconds, 3),
        }

    def lines(self) -> Iterator[str]:
        by = " by the engine that has it open" if self.by_engine else ""
        yield f"{self.path}: {self.num_blocks} blocks were cleared{by}."
        yield "Their bytes stay in the file until they are overwritten, or it is removed."


def clear_slab(reader: SlabReader, num_blocks: int, patience_s: float) -> SlabClearing:
    """`num_blocks`: how many there are, as far as is known without asking slots whose part of the
    index is damaged. Raises `StoreRefused`, `NotDone` or `OSError`."""
    path = str(reader.file.path)
    started = time.monotonic()
    request_id: bytes | None = None
    while True:
        if not reader.is_held() and (num_found := _clear_unheld(reader)) is not None:
            return SlabClearing(
                path, num_found, by_engine=False, seconds=time.monotonic() - started
            )
        if request_id is None:
            request_id = uuid.uuid4().bytes
            _ask_the_engine(reader, request_id)
        if _last_clear(reader) in (request_id, reader.clear_request()):
            # Ours, or one that was written over it by someone else, and so is younger.
            return SlabClearing(
                path, num_blocks, by_engine=True, seconds=time.monotonic() - started
            )
        if time.monotonic() - started > patience_s:
            raise NotDone(_not_yet(reader, patience_s))
        time.sleep(_LOOK_EVERY_S)


def _clear_unheld(reader: SlabReader) -> int | None:
    """Take the slab and clear it. Returns how many blocks there were; None: someone was quicker to
    take it."""
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
        raise StoreRefused(str(problem)) from None
    except SlabRefused as problem:
        if reader.is_held():
            return None
        raise StoreRefused(str(problem)) from None
    try:
        num_blocks = int(np.count_nonzero(is_alive(slab.index.entries(), before.cut)))
        # A request that no engine has lived to obey is obeyed by this.
        last_clear = reader.clear_request() or slab.superblock.last_clear
        slab.save_superblock(cut=slab.first_seq, last_clear=last_clear)
        slab.file.sync()
    finally:
        slab.close()
    return num_blocks


def _ask_the_engine(reader: SlabReader, request_id: bytes) -> None:
    file = SlabFile(reader.file.path, os.O_RDWR)
    try:
        file.use_o_direct()
        file.write(CONTROL_OFFSET, encode_clear_request(request_id))
        file.sync()
    finally:
        file.close()


def _last_clear(reader: SlabReader) -> bytes:
    try:
        return reader.read_superblock().last_clear
    except SlabUnreadable as problem:
        raise StoreRefused(str(problem)) from None


def _not_yet(reader: SlabReader, patience_s: float) -> str:
    holder = reader.holder()
    who = "whoever has it open"
    if holder is not None:
        who = f'the engine "{holder.engine_id}" (process {holder.pid} on {holder.host})'
    return (
        f"{reader.file.path} is not cleared yet: {who} has not obeyed within {patience_s:g} s. The "
        "request stays in the file, and is obeyed as soon as an engine looks. If this one hangs, "
        "end it, and run this again"
    )
