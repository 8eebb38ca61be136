"""What to say to users who give a tier a key of its neighbour, or of the engine, or too few."""

from __future__ import annotations

from collections.abc import Mapping

from kvtier.config import USER_KEYS

__all__ = ["example_of", "misplaced_keys"]

_LOCATION = 'Here it is "{}"'.format
_ALWAYS_LRU = "Remove it; in a shared directory it is always the least recently used that leave"
_MEANT: Mapping[str, Mapping[str, str]] = {
    "fs": {
        "path": _LOCATION("root_dir"),
        "dir": _LOCATION("root_dir"),
        "directory": _LOCATION("root_dir"),
        "root": _LOCATION("root_dir"),
        "root_path": _LOCATION("root_dir"),
        "io_threads": 'Here it is "n_read_threads" and "n_write_threads"',
        "n_threads": 'Here it is "n_read_threads" and "n_write_threads"',
        "eviction_policy": _ALWAYS_LRU,
        "use_o_direct": "Remove it; whether there is O_DIRECT is tried at the start",
    },
    "disk": {
        "root_dir": 'Here it is "path", which names a file',
        "n_read_threads": _LOCATION("io_threads"),
        "n_write_threads": _LOCATION("io_threads"),
        "min_free_bytes": "Remove it; a slab takes all of its room at the start",
    },
}
_EXAMPLES: Mapping[str, Mapping[str, str]] = {
    "fs": {"root_dir": '"/mnt/shared/kv"', "max_bytes": '"2TiB"'},
    "disk": {"path": '"/mnt/nvme/kv.slab"', "max_bytes": '"500GiB"'},
}


def misplaced_keys(tier_type: str) -> dict[str, str]:
    """Keys that are not this tier's, each with what to do about it."""
    outside = dict.fromkeys(USER_KEYS, "Move it out of secondary_tiers, beside cpu_bytes_to_use")
    return outside | dict(_MEANT.get(tier_type, {}))


def example_of(tier_type: str, key: str) -> str:
    """How to write a key that is missing, in words that follow "add it"."""
    example = _EXAMPLES.get(tier_type, {}).get(key)
    return "" if example is None else f', such as "{key}": {example}'
