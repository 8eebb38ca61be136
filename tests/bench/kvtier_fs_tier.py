"""kvtier's tier of files, made to be measured: with seals and a quota, and its own choice of
threads."""

from __future__ import annotations

import os
from functools import partial

from kvtier.tiering.fs.block_file import block_file_bytes
from kvtier.tiering.fs.manager import FsSecondaryTierManager
from kvtier.tiering.fs.names import block_path
from kvtier.tiering.fs.root import allows_o_direct
from tests.bench.block_files import BlockFiles
from tests.bench.disk_subjects import Case, DiskSubject
from tests.bench.kvtier_tier_subject import as_subject, bench_spec

MiB = 1 << 20
DIRECTORY_BYTES = 8 * MiB
BLOCKS_UNDER_WAY = 256
"""Room for them is reserved. While the tier is filled, nothing may be evicted for it."""
MOST_UNDER_WAY = 192 * MiB
WIDE = 1 << 40
"""A limit that is never met."""


def make_subject(case: Case, view: memoryview) -> DiskSubject:
    file_bytes = block_file_bytes(case.block_bytes)
    under_way = min(BLOCKS_UNDER_WAY * file_bytes, MOST_UNDER_WAY)
    full = case.num_blocks * file_bytes + under_way + DIRECTORY_BYTES
    tier = FsSecondaryTierManager(
        bench_spec(case.block_bytes, view),
        view,
        "fs",
        root_dir=os.path.join(case.directory, "kvtier-fs"),
        max_bytes=WIDE if case.grows else full,
    )
    is_direct = allows_o_direct(tier._books)
    subject = as_subject(tier, {"threads": len(tier._lanes), "o_direct": is_direct})
    files = BlockFiles(partial(block_path, str(tier._namespace)), case.block_bytes, is_direct)
    subject.cool = files.cool
    if case.grows:
        subject.forget = files.forget
    return subject
