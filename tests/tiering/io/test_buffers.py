"""Memory for disks."""

from __future__ import annotations

import mmap
import os

import pytest

from kvtier.tiering.io.aio import address_of
from kvtier.tiering.io.buffers import make_buffers
from kvtier.tiering.io.payload import Payload


@pytest.mark.parametrize("num_bytes", [4096, 3 << 20])
def test_buffers_are_zero_aligned_and_in_large_pieces(num_bytes: int) -> None:
    memory = make_buffers(num_bytes)
    assert len(memory) == num_bytes
    assert address_of(memory) % (2 << 20) == 0
    assert bytes(memory) == bytes(num_bytes)
    is_huge = num_bytes > 2 << 20 and os.path.exists("/sys/kernel/mm/transparent_hugepage")
    assert ("hg" in _flags_of(address_of(memory))) == is_huge


def test_a_child_has_zeros_and_may_let_go_of_them() -> None:
    """Not a copy, which would be the parent's as soon as it writes, while the disk has the page."""
    memory = make_buffers(1 << 20)
    memory[:] = b"?" * len(memory)
    child = os.fork()
    if child == 0:
        has_zeros = bytes(memory) == bytes(len(memory))
        others = [mmap.mmap(-1, 1 << 20) for _ in range(8)]
        del memory
        for other in others:
            other[:] = b"!" * len(other)
        os._exit(0 if has_zeros else 1)
    assert os.waitpid(child, 0)[1] == 0
    assert bytes(memory) == b"?" * len(memory)


def _flags_of(address: int) -> list[str]:
    """Of the mapping that this address is in."""
    is_here = False
    with open("/proc/self/smaps") as mappings:
        for line in mappings:
            bounds, *_ = line.split()
            if "-" in bounds and not bounds.endswith(":"):
                start, end = (int(bound, 16) for bound in bounds.split("-"))
                is_here = start <= address < end
            elif is_here and bounds == "VmFlags:":
                return line.split()[1:]
    raise AssertionError("not mapped")


@pytest.mark.parametrize("size", [1, 4096, (256 << 10) - 1, 256 << 10, 1 << 20])
def test_a_payload_goes_both_ways(size: int) -> None:
    row, memory = os.urandom(size), bytearray(size)
    Payload(memoryview(memory), memoryview(bytearray(row))).collect()
    assert memory == row
    target = bytearray(size)
    Payload(memoryview(memory), memoryview(target)).deliver()
    assert target == row


def test_a_payload_in_its_row_stays_where_it_is() -> None:
    row = memoryview(bytearray(b"here"))
    payload = Payload(row, row)
    payload.collect()
    payload.deliver()
    assert bytes(row) == b"here"
