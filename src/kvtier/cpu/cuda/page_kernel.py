"""The kernel that copies the pages of blocks. It is compiled at start, for the device."""

from __future__ import annotations

import ctypes
from functools import cache
from importlib import resources
from typing import Any, NamedTuple

from kvtier.cpu.cuda.driver import CudaDriver

__all__ = [
    "ENTRY_BYTES",
    "MOST_ENTRIES",
    "KernelUnavailable",
    "Launcher",
    "Order",
    "PageKernel",
    "Threads",
    "direct_threads",
    "max_entries",
]

_PIECE_BYTES = 4096
"""Bytes of a piece: pages are cut into pieces, and a warp copies one piece after the other. It has
half of a piece in flight at a time."""
ENTRY_BYTES = 8
"""Bytes of an *entry*: the number of a device block and the number of its slot."""
_FEW_ENTRIES, MOST_ENTRIES = 64, 4000
"""Largest numbers of entries of a small and of a large launch. Entries are launch parameters, which
CUDA limits to 32,764 bytes."""
_MOST_ITEMS = 1 << 31
"""Largest number of *items* of a launch. An item is one piece of one page."""


class Threads(NamedTuple):
    """The number of thread blocks in a launch, and of threads in each. While a thread block runs,
    the model's kernels cannot use its SM."""

    blocks: int
    of_block: int


_DIRECT_LOAD = Threads(4, 512)
"""For reading host memory. Threads wait for reads, so this many are needed to cover the latency of
the bus; more are not faster."""
_DIRECT_STORE, _DIRECT_STORE_OF_SMALL = Threads(2, 288), Threads(2, 352)
"""For writing host memory. Threads do not wait for writes. With more threads than are needed to
keep the bus busy, writes fill the queues between SMs and bus, and the model's kernels take up to
five times as long (H200). KV pages below `_SMALL_PAGE_BYTES` need more threads, because the address
of each has to be translated through the page tables of host memory."""
_SMALL_PAGE_BYTES = 32 << 10
_ON_DEVICE = 512
"""Threads of a thread block, for copies within the device's memory."""


def direct_threads(page_bytes: float, *, is_store: bool) -> Threads:
    """The threads of a launch that reads or writes pages of this size in host memory."""
    if not is_store:
        return _DIRECT_LOAD
    return _DIRECT_STORE_OF_SMALL if page_bytes < _SMALL_PAGE_BYTES else _DIRECT_STORE


class KernelUnavailable(RuntimeError):
    """The kernel cannot be compiled here; the message says what is missing."""


class Order(NamedTuple):
    """The parameters of a launch, except its entries."""

    columns: int
    """Address on the device of `Columns.table`."""
    num_columns: int
    largest: int
    """An upper bound of the page size, in bytes."""
    base: int
    """Address of the first slot: in host memory, or in a buffer on the device."""
    row_bytes: int
    """Bytes from the start of one slot to the start of the next."""
    chunk: int
    """Places in a slot, one for each device block."""
    is_store: bool
    """True: from the blocks to the slots."""
    is_packed: bool
    """True: the slots are adjacent in a buffer, in the order of the entries. The slot numbers in
    the entries are ignored."""

    @property
    def max_entries(self) -> int:
        """The largest number of entries of one launch."""
        return max_entries(self.num_columns, self.largest)


def max_entries(num_columns: int, largest: int) -> int:
    """The largest number of entries of one launch: at most `MOST_ENTRIES`, and fewer if there
    would be more than `_MOST_ITEMS` items, because the kernel counts items with 32 bits.
    `largest`: size of the largest page, in bytes.
    """
    pieces = -(-largest // _PIECE_BYTES)
    return max(1, min(MOST_ENTRIES, _MOST_ITEMS // (num_columns * pieces)))


class PageKernel:
    """The compiled kernel, loaded on the device. Any thread may use it."""

    def __init__(self, driver: CudaDriver, properties: Any, stream: int) -> None:
        """`properties`: torch's properties of the current device; `stream`: any of its streams.

        Raises `KernelUnavailable` or `CudaError`.
        """
        self._driver = driver
        self.all_threads = Threads(properties.multi_processor_count, _ON_DEVICE)
        """One thread block on every SM, for short launches."""
        capability = (properties.major, properties.minor)
        module = driver.load_module(_machine_code(capability, _FEW_ENTRIES, MOST_ENTRIES))
        self._functions = [
            driver.find_function(module, name) for name in ("copy_few_blocks", "copy_many_blocks")
        ]
        # The first launch loads the code and waits for all running kernels, so it is done at start.
        launcher = self.launcher()
        for count in (_FEW_ENTRIES, MOST_ENTRIES):
            nothing = Order(0, 0, _PIECE_BYTES, 0, 0, 1, False, False)
            launcher.launch(
                nothing, memoryview(bytes(ENTRY_BYTES * count)), 0, stream, _DIRECT_LOAD
            )

    def launcher(self) -> Launcher:
        return Launcher(self._driver, self._functions)


class Launcher:
    """Launches the kernel. One thread at a time."""

    def __init__(self, driver: CudaDriver, functions: list[ctypes.c_void_p]) -> None:
        self._driver = driver
        self._sizes = [_Parameters(capacity) for capacity in (_FEW_ENTRIES, MOST_ENTRIES)]
        self._functions = functions

    def launch(
        self, order: Order, entries: memoryview, first_place: int, stream: int, threads: Threads
    ) -> None:
        """Copy pages in stream order. Never waits.

        Addresses and sizes must be multiples of `ALIGNMENT`. `entries`: for each of at most
        `order.max_entries` blocks, the block number and the slot number, as unsigned integers of
        four bytes; the caller may reuse this memory after the call. `first_place`: place of the
        first block in its slot.
        """
        is_many = len(entries) > ENTRY_BYTES * _FEW_ENTRIES
        parameters = self._sizes[is_many]
        parameters.fill(order, entries, first_place)
        self._driver.launch(self._functions[is_many], *threads, stream, parameters.pointers)


class _Order(ctypes.Structure):
    """`Order` in page_kernel.cu."""

    _fields_ = (
        ("columns", ctypes.c_uint64),
        ("base", ctypes.c_uint64),
        ("row_bytes", ctypes.c_uint64),
        ("num_columns", ctypes.c_uint32),
        ("num_entries", ctypes.c_uint32),
        ("pieces", ctypes.c_uint32),
        ("piece_bytes", ctypes.c_uint32),
        ("chunk", ctypes.c_uint32),
        ("first_place", ctypes.c_uint32),
        ("is_store", ctypes.c_uint32),
        ("is_packed", ctypes.c_uint32),
    )


class _Parameters:
    """The memory from which the driver reads the parameters of a launch."""

    def __init__(self, capacity: int) -> None:
        self._memory = ctypes.create_string_buffer(ctypes.sizeof(_Order) + ENTRY_BYTES * capacity)
        self._order = _Order.from_buffer(self._memory)
        self._entries = memoryview(self._memory).cast("B")[ctypes.sizeof(_Order) :]
        self.pointers = (ctypes.c_void_p * 1)(ctypes.addressof(self._memory))

    def fill(self, order: Order, entries: memoryview, first_place: int) -> None:
        parameters = self._order
        parameters.columns = order.columns
        parameters.base = order.base
        parameters.row_bytes = order.row_bytes
        parameters.num_columns = order.num_columns
        parameters.num_entries = len(entries) // ENTRY_BYTES
        parameters.pieces = -(-order.largest // _PIECE_BYTES)
        parameters.piece_bytes = _PIECE_BYTES
        parameters.chunk = order.chunk
        parameters.first_place = first_place
        parameters.is_store = order.is_store
        parameters.is_packed = order.is_packed
        # Unlike numpy, this keeps the interpreter lock.
        self._entries[: len(entries)] = entries


@cache
def _machine_code(capability: tuple[int, int], few: int, many: int) -> bytes:
    try:
        from cuda.bindings import nvrtc
    except ImportError as error:
        raise KernelUnavailable(
            f"no CUDA compiler ({error}): install kvtier with the extra `cuda`"
        ) from error
    source = resources.files(__package__).joinpath("page_kernel.cu").read_bytes()
    options = [
        f"--gpu-architecture=sm_{capability[0]}{capability[1]}".encode(),
        f"-DFEW={few}".encode(),
        f"-DMANY={many}".encode(),
    ]
    try:
        _, program = nvrtc.nvrtcCreateProgram(source, b"page_kernel.cu", 0, [], [])
        (result,) = nvrtc.nvrtcCompileProgram(program, len(options), options)
        if result != nvrtc.nvrtcResult.NVRTC_SUCCESS:
            raise KernelUnavailable(f"NVRTC: {result.name}: {_log(nvrtc, program)}")
        _, size = nvrtc.nvrtcGetCUBINSize(program)
        code = bytes(size)
        nvrtc.nvrtcGetCUBIN(program, code)
        nvrtc.nvrtcDestroyProgram(program)
    except RuntimeError as error:  # the NVRTC library cannot be loaded
        if isinstance(error, KernelUnavailable):
            raise
        raise KernelUnavailable(
            f"NVRTC cannot be used: {error}. Install cuda-bindings and nvidia-cuda-nvrtc of the "
            "CUDA that torch is built with (torch.version.cuda)"
        ) from error
    return code


def _log(nvrtc: object, program: object) -> str:
    _, size = nvrtc.nvrtcGetProgramLogSize(program)  # type: ignore[attr-defined]
    text = bytes(size)
    nvrtc.nvrtcGetProgramLog(program, text)  # type: ignore[attr-defined]
    return text.decode(errors="replace").strip("\0 \n")
