"""Real roots of fs tiers with real blocks."""

from __future__ import annotations

import os
from pathlib import Path

from kvtier.base import OffloadKey
from kvtier.tiering.fs.layout import block_path
from kvtier.tiering.fs.ledger import Balance
from kvtier.tiering.fs.survey import read_balance
from tests.cli.store.slabs import NAMESPACE
from tests.tiering.fs.harness import bytes_for, fs_harness

__all__ = ["age", "balance_of", "file_of", "fill_root"]

_MAX_BYTES = bytes_for(2000)


def fill_root(root: Path, keys: list[OffloadKey], namespace: str = NAMESPACE) -> str:
    """Store these blocks. Returns the name of the namespace."""
    with fs_harness(root, namespace=namespace, max_bytes=_MAX_BYTES) as harness:
        for start in range(0, len(keys), 32):
            job = harness.store(keys[start : start + 32])
            assert harness.wait_for(job)[0].result.success
        return harness.fingerprint.hex()


def file_of(root: Path, namespace: str, key: OffloadKey) -> Path:
    return Path(block_path(str(root / "blocks" / namespace), key))


def age(root: Path, namespace: str, seconds: float) -> None:
    """Set the last use of all blocks of a namespace back by `seconds`."""
    for path in (root / "blocks" / namespace).glob("*/*"):
        used_ns = path.stat().st_mtime_ns - int(seconds * 1e9)
        os.utime(path, ns=(used_ns, used_ns))


def balance_of(root: Path) -> Balance:
    balance = read_balance(root)
    assert balance is not None
    return balance
