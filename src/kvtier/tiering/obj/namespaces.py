"""What an object store has for each namespace."""

from __future__ import annotations

import re
from collections.abc import Sequence
from itertools import islice

from kvtier.config.namespace import DESCRIPTION_BYTES
from kvtier.tiering.obj.objects import BLOCKS, Objects, description_name
from kvtier.tiering.remote.namespaces import NamespaceStorage

__all__ = ["ObjNamespaces"]

_NAMESPACE = re.compile("[0-9a-f]{32}")
_MOST_PAGES = 10


class ObjNamespaces(NamespaceStorage):
    """The namespaces below one URL. Listing them costs a request for each thousand. An object with
    several blocks counts as one."""

    def __init__(self, objects: Objects) -> None:
        self._objects = objects

    def count_blocks(self, namespace: str) -> tuple[int, bool]:
        pages = self._objects.below(f"{BLOCKS}/{namespace}")
        count = sum(len(page) for page in islice(pages, _MOST_PAGES))
        return count, next(pages, None) is None

    def namespaces(self) -> Sequence[str]:
        return [name for name in self._objects.folders_in(BLOCKS) if _NAMESPACE.fullmatch(name)]

    def read_description(self, namespace: str) -> bytes | None:
        content = self._objects.read_range(description_name(namespace), 0, DESCRIPTION_BYTES + 1)
        return None if content is None else bytes(content)

    def write_description(self, namespace: str, content: bytes) -> None:
        self._objects.write(description_name(namespace), content)
