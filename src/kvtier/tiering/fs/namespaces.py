"""Why an engine will find nothing in a root that is not empty."""

from __future__ import annotations

import time
from collections.abc import Iterator
from itertools import islice
from pathlib import Path

from kvtier.config import NamespaceDescription
from kvtier.tiering.fs.access import NoFollowTree
from kvtier.tiering.fs.layout import namespaces_in, read_description, read_shard, shards_in
from kvtier.tiering.namespaces import (
    FoundNamespace,
    StartLook,
    by_closeness,
    explain_cold_start,
    explain_other_root,
)

__all__ = ["FsStartLook"]

_LONGEST_S = 5.0
_MOST_COUNTED = 10_000
_MOST_DESCRIBED = 256
"""Namespaces whose descriptions are read."""


class FsStartLook(StartLook):
    """Looks into the root when an engine starts. The description itself is written by the
    transaction that makes the namespace (`Transaction.make_namespace`)."""

    def __init__(self, root: Path, tree: NoFollowTree, own: NamespaceDescription) -> None:
        super().__init__("kvtier-fs-namespaces")
        self._root = root
        self._tree = tree
        self._own = own
        self._deadline = 0.0
        # Read before the engine publishes a block, which replaces the description.
        self._kept = read_description(tree, root / "blocks" / own.namespace)

    def look(self) -> None:
        self._deadline = time.monotonic() + _LONGEST_S
        where, own = str(self._root), self._own
        blocks = self._root / "blocks"
        num_own, _ = self._count(blocks / own.namespace)
        if num_own:
            self.remark = explain_other_root(where, own, self._kept, num_own)
            return
        others = (path for path in namespaces_in(self._tree, blocks) if path.name != own.namespace)
        described = [
            FoundNamespace(path.name, 0, read_description(self._tree, path))
            for path in islice(others, _MOST_DESCRIBED)
            if not self._is_late
        ]
        for other in by_closeness(own, described):
            count, is_whole = self._count(blocks / other.name)
            if count:
                closest = other._replace(num_blocks=count, is_counted=is_whole)
                self.remark = explain_cold_start(where, own, closest)
                return

    def _count(self, namespace: Path) -> tuple[int, bool]:
        """Number of blocks, up to a limit; and whether these are all."""
        count = sum(1 for _ in islice(self._blocks(namespace), _MOST_COUNTED))
        return count, count < _MOST_COUNTED and not self._is_late

    def _blocks(self, namespace: Path) -> Iterator[object]:
        for shard in shards_in(self._tree, namespace):
            if self._is_late:
                return
            yield from read_shard(self._tree, namespace, shard.name)

    @property
    def _is_late(self) -> bool:
        return self.is_stopping or time.monotonic() > self._deadline
