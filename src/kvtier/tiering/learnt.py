"""What the guard has learnt, in a small note that a tier keeps for the next start."""

from __future__ import annotations

import json
import socket
from collections.abc import Sequence
from math import isfinite
from typing import NamedTuple

from kvtier.tiering.prefill_line import CostLine

__all__ = ["MOST_NOTE_BYTES", "Learnt", "read_note", "write_note"]

MOST_NOTE_BYTES = 1024
_FORMAT = 1
"""Another number where these figures mean something else: a note with another one is ignored."""
_MOST = 1e12
"""No figure in a note is larger."""


class Learnt(NamedTuple):
    """Both parts may be missing."""

    loads: tuple[float, ...] | None
    """`kvtier.tiering.guard.TransferEstimate.sums` of the tier."""
    prefill: CostLine | None


def write_note(learnt: Learnt, fingerprint: bytes) -> bytes:
    """The note. `fingerprint`: what the engine computes, whose costs these are."""
    fields = {
        "format": _FORMAT,
        "fingerprint": fingerprint.hex(),
        "host": socket.gethostname(),
        "loads": learnt.loads,
        "prefill": learnt.prefill,
    }
    return json.dumps(fields).encode()


def read_note(note: object, fingerprint: bytes) -> Learnt:
    """What a note says. Nothing, if it is damaged, or is not about this engine on this host."""
    try:
        if not isinstance(note, bytes) or len(note) > MOST_NOTE_BYTES:
            return Learnt(None, None)
        fields = json.loads(note)
        owner = fields["format"], fields["fingerprint"], fields["host"]
        if owner != (_FORMAT, fingerprint.hex(), socket.gethostname()):
            return Learnt(None, None)
        loads, prefill = _figures(fields["loads"], 5), _figures(fields["prefill"], 3)
    except (ValueError, TypeError, KeyError, RecursionError):
        return Learnt(None, None)
    return Learnt(loads, None if prefill is None else CostLine(*prefill))


def _figures(found: Sequence[object] | None, count: int) -> tuple[float, ...] | None:
    if found is None:
        return None
    figures = [figure for figure in found if isinstance(figure, (int, float))]
    is_sound = all(isfinite(figure) and 0 <= figure <= _MOST for figure in figures)
    if len(figures) != len(found) or len(figures) != count or not is_sound:
        raise ValueError("not what was written")
    return tuple(map(float, figures))
