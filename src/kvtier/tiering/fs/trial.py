"""Trials of the fs tier: in the configured root, as one more engine with a private namespace.

Such an engine evicts only its own blocks, and every engine removes what a killed one has left. If
there is no root yet, a trial makes one of its own, so that none is left behind.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from kvtier.config.sizes import as_size
from kvtier.tiering.fs.access import is_root
from kvtier.tiering.fs.layout import block_file_bytes
from kvtier.tiering.fs.options import FsOptions
from kvtier.tiering.fs.quota import Limits, free_bytes
from kvtier.tiering.fs.survey import read_balance
from kvtier.tiering.trial import TrialBlocks, TrialProblem

__all__ = ["trial_root"]

_OVERHEAD_BYTES = 1 << 20
"""Upper bound for directories, the ledger and the presence of a trial."""


@contextmanager
def trial_root(keys: Mapping[str, Any], blocks: TrialBlocks) -> Iterator[Mapping[str, Any]]:
    """Yield the keys for a tier in the configured root, or in one beside or below it that is
    removed at the end."""
    options = FsOptions.parse(keys)
    options.require_place()
    root = options.root_dir.resolve()
    needed = blocks.count * block_file_bytes(blocks.payload_bytes) + _OVERHEAD_BYTES
    is_there = root.is_dir()
    _require_room(root if is_there else root.parent, needed, options)
    if is_there and is_root(root):
        _require_quota(root, needed, options)
        yield keys
        return
    name = f".{root.name}.kvtier-trial-{os.getpid()}"
    own = root / name if is_there else root.with_name(name)
    try:
        yield {**keys, "root_dir": str(own), "max_bytes": max(options.max_bytes, 2 * needed)}
    finally:
        shutil.rmtree(own, ignore_errors=True)


def _require_room(directory: Path, needed: int, options: FsOptions) -> None:
    free = free_bytes(directory)
    if free < needed + options.min_free_bytes:
        kept = ""
        if options.min_free_bytes:
            kept = f", of which min_free_bytes keeps {as_size(options.min_free_bytes)}"
        raise TrialProblem(
            f"the disk is full: the file system of {directory} has {as_size(free)} free{kept}, and "
            f"the trial takes {as_size(needed)}",
            "Make room there, or give a directory on another file system",
            is_full=True,
        )


def _require_quota(root: Path, needed: int, options: FsOptions) -> None:
    balance = read_balance(root)
    if balance is None:
        return
    limit = Limits(options.max_bytes, options.min_free_bytes).apply(root, balance)
    if balance.total + needed > limit:
        raise TrialProblem(
            f"the quota is full: {as_size(balance.total)} of {as_size(options.max_bytes)} are used "
            f"in {root}, so nothing was written. An engine makes room by evicting blocks of its "
            "own namespace; if it has none there, it stores nothing",
            f"See whose blocks they are (kvtier store stat {root}), remove those of models that "
            "are no longer served (kvtier store gc), or give more max_bytes",
            is_full=True,
        )
