"""Memory for disks."""

from __future__ import annotations

import os

import pytest

from kvtier.tiering.io.aio import address_of
from kvtier.tiering.io.buffers import make_buffers
from kvtier.tiering.io.payload import Payload


@pytest.mark.parametrize("num_bytes", [4096, 3 << 20])
def test_buffers_are_zero_aligned_and_not_for_children(num_bytes: int) -> None:
    memory = make_buffers(num_bytes)
    assert len(memory) == num_bytes
    assert address_of(memory) % (2 << 20) == 0
    assert bytes(memory) == bytes(num_bytes)
    memory[0] = 1
    flags = _flags_of(address_of(memory))
    assert "dc" in flags, "a fork would share it"
    assert "hg" in flags or not os.path.exists("/sys/kernel/mm/transparent_hugepage")


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
