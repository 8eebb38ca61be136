"""The figures of the disk tier."""

from __future__ import annotations

from kvtier.tiering.io.errors import error_counters
from kvtier.tiering.io.figures import definitions

__all__ = [
    "CAPACITY",
    "COUNTERS",
    "DEFINITIONS",
    "EVICTED",
    "FAILED",
    "FILE_BYTES",
    "FORGOTTEN",
    "PREFIX",
    "QUEUED",
    "REFUSED",
    "RESIDENT",
]

PREFIX = "kvtier_disk"
"""Of all these names."""

RESIDENT = f"{PREFIX}_resident_blocks"
CAPACITY = f"{PREFIX}_capacity_blocks"
FILE_BYTES = f"{PREFIX}_file_bytes"
QUEUED = f"{PREFIX}_queued_blocks"
EVICTED = f"{PREFIX}_evicted_blocks"
REFUSED = f"{PREFIX}_refused_blocks"
FAILED = f"{PREFIX}_failed_blocks"
FORGOTTEN = f"{PREFIX}_forgotten_blocks"

_GAUGES = {
    RESIDENT: "Blocks in the disk tier, those being written included.",
    CAPACITY: "Blocks that the disk tier can hold.",
    FILE_BYTES: "Bytes that the slab file takes on its disk, as du says; 0 if it was removed.",
    QUEUED: "Blocks that are waiting to be written, or being written.",
}
_COUNTERS = {
    EVICTED: "Blocks that left the disk tier to make room.",
    REFUSED: "Blocks not stored because all slots of the disk tier were being written or read.",
    FAILED: "Blocks that could not be written.",
    FORGOTTEN: "Blocks that could not be loaded, or were damaged, and are forgotten.",
    **error_counters(PREFIX),
}
COUNTERS = tuple(_COUNTERS)
DEFINITIONS = definitions(_GAUGES, _COUNTERS)
