"""The namespaces of an fs root by the names that people give."""

from __future__ import annotations

from collections.abc import Sequence

from kvtier.cli.store.refusal import no_such_namespace
from kvtier.tiering.fs.reader import SeenNamespace

__all__ = ["matching"]


def matching(namespaces: Sequence[SeenNamespace], wanted: str | None) -> list[SeenNamespace]:
    """Those whose fingerprints begin with `wanted`, or all. Raises `StoreRefused` if there is
    none."""
    if wanted is None:
        return list(namespaces)
    found = [space for space in namespaces if space.name.startswith(wanted.lower())]
    if not found:
        raise no_such_namespace(wanted, [space.name for space in namespaces])
    return found
