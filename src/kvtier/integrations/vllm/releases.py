"""Which releases of vLLM kvtier is made for. Needs no vLLM."""

from __future__ import annotations

__all__ = [
    "FIRST_WITH_FIXED_HASHES",
    "SUPPORTED",
    "is_supported",
    "release_of",
    "supported_in_words",
]

SUPPORTED = ((0, 26), (0, 28), (0, 32))
"""Major and minor version of those that kvtier is tested with. Any other is tried, with one
warning; one that lacks a name that kvtier needs is refused."""

FIRST_WITH_FIXED_HASHES = (0, 32)
"""Before this one, block hashes are random unless `PYTHONHASHSEED` is set. Only for advice without
a running vLLM: an engine is looked at itself, see `differences`."""


def release_of(version: str) -> tuple[int, ...]:
    """Major and minor of a version text; shorter, if it has none."""
    release: list[int] = []
    for part in version.split(".")[:2]:
        if not part.isdecimal():
            break
        release.append(int(part))
    return tuple(release)


def is_supported(version: str) -> bool:
    """Whether kvtier is tested with this version."""
    return release_of(version) in SUPPORTED


def supported_in_words() -> str:
    """All of them, for a message."""
    return ", ".join(".".join(map(str, release)) for release in SUPPORTED)
