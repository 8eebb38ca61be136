"""A job of the example tier while it is being carried out, and what it carries."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from kvtier.base import OffloadKey
from kvtier.tiering.base import TransferJob

__all__ = ["SealedBlock", "Transfer"]


class SealedBlock(NamedTuple):
    """A block as the tier keeps it."""

    header: bytes
    """Its seal."""
    payload: NDArray[np.uint8]


@dataclass(slots=True, eq=False)
class Transfer:
    """A job on its way, a block at a time. Belongs to one thread at a time: the scheduler makes it,
    the I/O thread carries it out, and the scheduler gets it back."""

    job: TransferJob
    todo: deque[tuple[OffloadKey, int]]
    """The blocks still to be moved, and their slots, in prompt order."""
    blocks: dict[OffloadKey, SealedBlock] = field(default_factory=dict)
    """A load: what goes into the slots. A store: what has been taken out of them so far."""
    done: list[OffloadKey] = field(default_factory=list)
    """The blocks that were moved, or needed no move."""
    failed: list[OffloadKey] = field(default_factory=list)
    """The blocks that could not be moved, or were not what they should be."""
    num_reserved: int = 0
    """A store: how many blocks room was made for."""
    replaced: list[SealedBlock] = field(default_factory=list)
    """A store: what had to leave for it. Freed by the I/O thread: that takes time, too."""
    seconds: float | None = None
    """Time spent on moving so far. None: nothing was tried."""
