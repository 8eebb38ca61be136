"""The figures of the disk tier."""

from __future__ import annotations

from kvtier.base import MetricDefinition, MetricKind

__all__ = [
    "CAPACITY",
    "COUNTERS",
    "DEFINITIONS",
    "EVICTED",
    "FAILED",
    "FILE_BYTES",
    "FORGOTTEN",
    "QUEUED",
    "REFUSED",
    "RESIDENT",
    "error_counter",
]

RESIDENT = "kvtier_disk_resident_blocks"
CAPACITY = "kvtier_disk_capacity_blocks"
FILE_BYTES = "kvtier_disk_file_bytes"
QUEUED = "kvtier_disk_queued_blocks"
EVICTED = "kvtier_disk_evicted_blocks"
REFUSED = "kvtier_disk_refused_blocks"
FAILED = "kvtier_disk_failed_blocks"
FORGOTTEN = "kvtier_disk_forgotten_blocks"

_NAMED_ERRORS = ("EIO", "ENOSPC", "EROFS", "EMFILE", "EACCES", "ENODATA")
_OTHER = "other"


def error_counter(kind: str) -> str:
    """The counter of errors of this kind, by the name of the error number."""
    return f"kvtier_disk_errors_{(kind if kind in _NAMED_ERRORS else _OTHER).lower()}"


_GAUGES = {
    RESIDENT: "Blocks in the disk tier, those being written included.",
    CAPACITY: "Blocks that the disk tier can hold.",
    FILE_BYTES: "Bytes that the slab file takes on its disk, as du says.",
    QUEUED: "Blocks that are waiting to be written, or being written.",
}
_COUNTERS = {
    EVICTED: "Blocks that left the disk tier to make room.",
    REFUSED: "Blocks not stored because the disk tier had no room, or could not keep up.",
    FAILED: "Blocks that could not be written.",
    FORGOTTEN: "Blocks that could not be loaded, or were damaged, and are forgotten.",
    **{
        error_counter(kind): f"Reads and writes of the disk tier that failed with {kind}."
        for kind in (*_NAMED_ERRORS, _OTHER)
    },
}
COUNTERS = tuple(_COUNTERS)
DEFINITIONS = {
    **{name: MetricDefinition(MetricKind.GAUGE, text) for name, text in _GAUGES.items()},
    **{name: MetricDefinition(MetricKind.COUNTER, text) for name, text in _COUNTERS.items()},
}
