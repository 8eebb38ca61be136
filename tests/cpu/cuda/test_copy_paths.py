"""Pages of each size are copied by the path that was measured to be the quickest."""

from __future__ import annotations

import pytest

from kvtier.cpu.cuda.copies import CopyPath, choose_path

KIB, MIB = 1 << 10, 1 << 20


@pytest.mark.parametrize(
    ("page_bytes", "num_pages", "run_bytes", "path"),
    [
        (16 * KIB, 1, 0, CopyPath.KERNEL),
        (16 * KIB, 4096, 0, CopyPath.KERNEL),
        (16 * KIB, 4096, 32 * 16 * KIB, CopyPath.STAGED),
        (16 * KIB, 64, 32 * 16 * KIB, CopyPath.KERNEL),  # ends before the second stage begins
        (16 * KIB, 4096, 32 * KIB, CopyPath.KERNEL),  # too few adjacent bytes
        (16 * KIB, 65536, 64 * MIB, CopyPath.KERNEL),  # more than there is room for
        (64 * KIB, 8, 0, CopyPath.ENGINES),
        (64 * KIB, 1024, 0, CopyPath.KERNEL),
        (64 * KIB, 1024, 2 * MIB, CopyPath.STAGED),
        (256 * KIB, 8, 0, CopyPath.ENGINES),
        (256 * KIB, 512, 8 * MIB, CopyPath.ENGINES_TWICE),
        (1 * MIB, 8, 0, CopyPath.ENGINES),
        (1 * MIB, 512, 0, CopyPath.ENGINES),
        (2 * MIB, 512, 8 * MIB, CopyPath.ENGINES),
        (0.0, 0, 0, CopyPath.KERNEL),
    ],
)
def test_path(page_bytes: float, num_pages: int, run_bytes: int, path: CopyPath) -> None:
    assert choose_path(page_bytes, num_pages, run_bytes) is path


@pytest.mark.parametrize("num_pages", [1, 16, 64, 100_000])
def test_large_pages_never_take_an_sm_from_the_model(num_pages: int) -> None:
    for page_bytes in (256 * KIB, 512 * KIB, 1 * MIB, 2 * MIB):
        for run_bytes in (0, page_bytes, 16 * MIB):
            path = choose_path(page_bytes, num_pages, run_bytes)
            assert path in {CopyPath.ENGINES, CopyPath.ENGINES_TWICE}
