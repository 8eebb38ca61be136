"""Fills the tier with what an earlier engine left in the slab."""

from __future__ import annotations

import gc

import numpy as np

from kvtier.base import OffloadKey
from kvtier.tiering.disk.index import is_alive
from kvtier.tiering.disk.residents import Residents
from kvtier.tiering.disk.slab import Slab

__all__ = ["populate"]


def populate(residents: Residents, slab: Slab, tag: int) -> None:
    """Take in every block of this namespace that the index knows. While an engine starts.

    Slots that hold blocks of another namespace are free, but the last to be used: the engine that
    wrote them may come back.
    """
    entries = slab.index.entries()
    alive = is_alive(entries, slab.superblock.cut)
    is_ours = alive & (entries["tag"] == tag)
    slots = np.flatnonzero(is_ours)
    slots = slots[np.argsort(entries["used"][slots], kind="stable")[::-1]]
    keys = slab.index.keys(entries, slots)
    seqs: list[int] = entries["seq"][slots].tolist()
    if len(set(keys)) < len(keys):
        kept = _newest(keys, seqs)
        alive[slots] = False
        slots, keys, seqs = slots[kept], [keys[i] for i in kept], [seqs[i] for i in kept]
        alive[slots] = True
        is_ours &= alive
    # Millions of new objects, and no garbage among them: collecting would only take time.
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        residents.adopt(keys, slots.tolist(), seqs)
    finally:
        if was_enabled:
            gc.enable()
    residents.set_free(np.flatnonzero(~alive).tolist(), np.flatnonzero(alive & ~is_ours).tolist())


def _newest(keys: list[OffloadKey], seqs: list[int]) -> list[int]:
    """One position of each key. Two slots with one block: a crash came after it was written anew,
    and before the old one was forgotten."""
    newest: dict[OffloadKey, int] = {}
    for position, key in enumerate(keys):
        other = newest.setdefault(key, position)
        if seqs[other] < seqs[position]:
            newest[key] = position
    return sorted(newest.values())
