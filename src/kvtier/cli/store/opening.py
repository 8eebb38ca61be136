"""Which kind of store is at a path."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from kvtier.cli.store.fs_store import FsStore
from kvtier.cli.store.slab_store import SlabStore
from kvtier.cli.store.store import Store

__all__ = ["open_store"]


@contextmanager
def open_store(path: Path) -> Iterator[Store]:
    """The store at `path`, for as long as the context lasts. Raises `StoreRefused` or `OSError`."""
    if path.is_dir():
        yield FsStore(path)
    else:
        with SlabStore(path) as slab:
            yield slab
