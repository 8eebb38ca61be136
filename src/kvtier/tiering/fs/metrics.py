"""The figures of the fs tier."""

from __future__ import annotations

from kvtier.tiering.io.errors import error_counters
from kvtier.tiering.io.figures import definitions

__all__ = [
    "BLOCKS",
    "COUNTERS",
    "DEFINITIONS",
    "EVICTED",
    "FAILED",
    "FORGOTTEN",
    "LIMIT_BYTES",
    "PREFIX",
    "QUEUED",
    "REFUSED",
    "USED_BYTES",
]

PREFIX = "kvtier_fs"
USED_BYTES = f"{PREFIX}_used_bytes"
LIMIT_BYTES = f"{PREFIX}_limit_bytes"
BLOCKS = f"{PREFIX}_blocks"
QUEUED = f"{PREFIX}_queued_blocks"
EVICTED = f"{PREFIX}_evicted_blocks"
REFUSED = f"{PREFIX}_refused_blocks"
FAILED = f"{PREFIX}_failed_blocks"
FORGOTTEN = f"{PREFIX}_forgotten_blocks"

_GAUGES = {
    USED_BYTES: "Bytes in the root directory, of all engines, with what they have reserved; when "
    "nobody stores, as du says.",
    LIMIT_BYTES: "Bytes that this engine lets the root directory have.",
    BLOCKS: "Blocks in the root directory, of all engines and models.",
    QUEUED: "Blocks of this engine that are waiting to be written, or being written.",
}
_COUNTERS = {
    EVICTED: "Blocks that this engine removed to make room.",
    REFUSED: "Blocks not stored because there was no room, or their keys are too long.",
    FAILED: "Blocks that could not be written.",
    FORGOTTEN: "Blocks that could not be loaded, or were damaged, and are forgotten.",
    **error_counters(PREFIX),
}
COUNTERS = tuple(_COUNTERS)
DEFINITIONS = definitions(_GAUGES, _COUNTERS)
