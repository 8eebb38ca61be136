"""The namespaces of a slab: the index has the start of a fingerprint, the slots have the rest."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from kvtier.cli.store.refusal import StoreRefused, no_such_namespace
from kvtier.tiering.disk.reader import SlabReader, Snapshot
from kvtier.tiering.io.aio import AioUnavailable

__all__ = ["Namespace", "matching_tags", "namespaces_of"]

_SLOTS_ASKED = 8
"""Of each namespace. One would do, were none being overwritten or damaged."""
_TAG_BYTES = 4


@dataclass(frozen=True, slots=True)
class Namespace:
    """Blocks of one model, layout and epoch."""

    tag: int
    name: str
    """The fingerprint as hex digits, or the start of it."""
    num_blocks: int


def namespaces_of(reader: SlabReader, snapshot: Snapshot) -> list[Namespace]:
    """The namespaces that have blocks, those with the most first."""
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
        headers = reader.headers_of(snapshot, samples)
    except AioUnavailable as lack:
        raise StoreRefused(str(lack)) from None
    for slot, found in headers.items():
        if found.seq == int(snapshot.entries["seq"][slot]):
            names[int(snapshot.entries["tag"][slot])] = found.fingerprint.hex()
    found_namespaces = [
        Namespace(tag, names.get(tag, _start_of(tag)), count) for tag, count in counts.items()
    ]
    return sorted(found_namespaces, key=lambda namespace: -namespace.num_blocks)


def _start_of(tag: int) -> str:
    return tag.to_bytes(_TAG_BYTES, "little").hex()


def matching_tags(namespaces: list[Namespace], wanted: str) -> list[int]:
    """The namespaces whose names begin with `wanted`. Raises `StoreRefused` if there is none."""
    start = wanted.lower()
    tags = [space.tag for space in namespaces if space.name.startswith(start)]
    if not tags:
        raise no_such_namespace(wanted, [space.name for space in namespaces])
    return tags
