"""The kernel compiles for every supported device, or an error says why not. Its parameters have the
right layout."""

from __future__ import annotations

import ctypes
import struct
import sys
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import pytest

from kvtier.cpu.cuda.page_kernel import (
    KernelUnavailable,
    Launcher,
    Order,
    Threads,
    _machine_code,
    direct_threads,
)

NO_COMPILER = "no CUDA compiler: install the extra `cuda`"


def require_compiler() -> None:
    try:
        from cuda.bindings import nvrtc

        nvrtc.nvrtcVersion()
    except (ImportError, RuntimeError):
        pytest.skip(NO_COMPILER)


@pytest.mark.parametrize("capability", [(8, 0), (8, 9), (9, 0), (10, 0), (12, 0)])
def test_the_kernel_compiles(capability: tuple[int, int]) -> None:
    require_compiler()
    code = _machine_code(capability, 64, 4000)
    assert code.startswith(b"\x7fELF")
    for name in (b"copy_few_blocks", b"copy_many_blocks"):
        assert name in code


def test_a_device_that_the_compiler_does_not_know_is_named() -> None:
    require_compiler()
    with pytest.raises(KernelUnavailable, match="NVRTC"):
        _machine_code((1, 0), 64, 4000)


def test_without_a_compiler_the_remedy_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "cuda.bindings", None)
    with pytest.raises(KernelUnavailable, match="extra `cuda`"):
        _machine_code((1, 1), 64, 4000)


ORDER = struct.Struct("=3Q8I")
"""The struct of page_kernel.cu, which has no padding."""
ENTRY = struct.Struct("=II")
CAPACITIES = {"few": 64, "many": 4000}


@dataclass
class Launch:
    """The parameters that the driver got, as the device sees them."""

    function: str
    blocks: int
    threads: int
    stream: int
    order: tuple[int, ...]
    entries: list[tuple[int, int]]
    """As many entries as the kernel has parameters for."""
    address: int


class Driver:
    def __init__(self) -> None:
        self.launches: list[Launch] = []

    def launch(self, function: Any, blocks: int, threads: int, stream: int, arguments: Any) -> None:
        (address,) = arguments
        size = ORDER.size + ENTRY.size * CAPACITIES[function]
        memory = ctypes.string_at(address, size)
        entries = list(ENTRY.iter_unpack(memory[ORDER.size :]))
        order = ORDER.unpack(memory[: ORDER.size])
        self.launches.append(Launch(function, blocks, threads, stream, order, entries, address))


def new_launcher(driver: Any) -> Launcher:
    functions: Any = list(CAPACITIES)
    return Launcher(driver, functions)


def entries_of(count: int, first: int) -> list[tuple[int, int]]:
    return [(first + i, 2**32 - 1 - i) for i in range(count)]


def packed(entries: list[tuple[int, int]]) -> memoryview:
    return memoryview(b"".join(ENTRY.pack(*entry) for entry in entries))


@pytest.mark.parametrize("is_store", [True, False])
@pytest.mark.parametrize("is_packed", [True, False])
def test_the_kernel_is_told_what_to_do(is_store: bool, is_packed: bool) -> None:
    """Independent of earlier launches. The smaller kernel is launched where it suffices."""
    driver = Driver()
    launcher = new_launcher(driver)
    for turn, count in enumerate((4000, 1, 64, 65, 2, 64, 1, 4000, 65, 63)):
        largest = (16, 4096, 4097, 3 * 4096)[turn % 4]
        order = Order(
            columns=(1 << 60) + turn,
            num_columns=32 + turn,
            largest=largest,
            base=(1 << 61) + turn,
            row_bytes=(1 << 40) + turn,
            chunk=5 + turn,
            is_store=is_store,
            is_packed=is_packed,
        )
        entries = entries_of(count, 1000 * turn)
        threads = Threads(4 + turn, 32 * turn)
        launcher.launch(order, packed(entries), turn % 5, 70 + turn, threads)
        launch = driver.launches[-1]
        assert launch.function == ("few" if count <= 64 else "many")
        assert (launch.blocks, launch.threads) == threads
        assert launch.stream == 70 + turn
        columns, base, row_bytes, num_columns, num_entries, *rest = launch.order
        assert (columns, base, row_bytes) == (order.columns, order.base, order.row_bytes)
        assert (num_columns, num_entries) == (order.num_columns, count)
        pieces, piece_bytes, chunk, first_place, told_store, told_packed = rest
        assert (pieces - 1) * piece_bytes < largest <= pieces * piece_bytes
        assert (chunk, first_place) == (order.chunk, turn % 5)
        assert (told_store, told_packed) == (is_store, is_packed)
        assert launch.entries[:count] == entries
    assert len(driver.launches) == 10


def test_launchers_do_not_share_what_they_tell_the_kernel() -> None:
    """Stores and loads are launched by two threads at the same time."""
    driver = Driver()
    launchers = [new_launcher(driver) for _ in range(2)]
    order = Order(1, 1, 16, 1, 1, 1, True, False)
    for count in (3, 100):
        for launcher in launchers:
            launcher.launch(order, packed(entries_of(count, 0)), 0, 7, Threads(4, 512))
    ranges = sorted(
        (launch.address, launch.address + ORDER.size + ENTRY.size * CAPACITIES[launch.function])
        for launch in driver.launches
    )
    assert all(end <= begin for (_, end), (begin, _) in pairwise(ranges))


def test_a_launch_takes_no_more_than_its_parameters_have_room_for() -> None:
    launcher = new_launcher(Driver())
    order = Order(1, 1, 16, 1, 1, 1, True, False)
    assert order.max_entries == CAPACITIES["many"]
    with pytest.raises(ValueError, match="different structures"):
        launcher.launch(order, packed(entries_of(order.max_entries + 1, 0)), 0, 7, Threads(4, 512))


def test_a_store_takes_few_threads_and_more_for_small_pages() -> None:
    """Kernels that write slow down the model."""
    threads = [
        direct_threads(kib << 10, is_store=is_store)
        for is_store, kib in ((False, 16), (False, 64), (True, 16), (True, 64))
    ]
    loads, stores = threads[:2], threads[2:]
    assert loads[0] == loads[1]
    assert all(t.blocks <= 2 and t.of_block % 32 == 0 for t in stores)
    assert stores[1].of_block < stores[0].of_block < loads[0].blocks * loads[0].of_block
