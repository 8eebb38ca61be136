"""Fills the tier with what an earlier engine left in the slab."""

from __future__ import annotations

import gc

import numpy as np
from numpy.typing import NDArray

from kvtier.base import OffloadKey
from kvtier.tiering.disk.index import is_alive
from kvtier.tiering.disk.recovery import forget_twins
from kvtier.tiering.disk.residents import Residents
from kvtier.tiering.disk.slab import Slab

__all__ = ["populate"]


def populate(residents: Residents, slab: Slab, tag: int) -> None:
    """Take in every block of this namespace that the index knows. While an engine starts.

    Slots that hold blocks of another namespace are free, but the last to be used: the engine that
    wrote them may come back.
    """
    entries, slots, keys = _ours(slab, tag)
    if len(set(keys)) < len(keys):
        forget_twins(slab.index)
        entries, slots, keys = _ours(slab, tag)
    seqs: list[int] = entries["seq"][slots].tolist()
    # Millions of new objects, and no garbage among them: collecting would only take time.
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        residents.adopt(keys, slots.tolist(), seqs)
    finally:
        if was_enabled:
            gc.enable()
    alive = is_alive(entries, slab.superblock.cut)
    is_theirs = alive & (entries["tag"] != tag)
    residents.set_free(np.flatnonzero(~alive).tolist(), np.flatnonzero(is_theirs).tolist())


def _ours(slab: Slab, tag: int) -> tuple[NDArray[np.void], NDArray[np.int64], list[OffloadKey]]:
    """All entries of the index; the slots with blocks of this namespace, the most recently used
    ones first; and their keys."""
    entries = slab.index.entries()
    slots = np.flatnonzero(is_alive(entries, slab.superblock.cut) & (entries["tag"] == tag))
    slots = slots[np.argsort(entries["used"][slots], kind="stable")[::-1]]
    return entries, slots, slab.index.keys(entries, slots)
