"""The kernel that copies pages, compiled for the device at hand."""

from __future__ import annotations

import ctypes
from functools import cache
from importlib import resources
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kvtier.cpu.cuda.driver import CudaDriver

__all__ = ["DIRECT_BLOCKS", "KernelUnavailable", "PageKernel"]

DIRECT_BLOCKS = 4
"""For pages in host memory, as many SMs as it takes. On an H200, 4 blocks of 512 threads have
64 x 2 KiB under way: enough for 92 % of the bus in both directions, and more are not faster."""
_NUM_THREADS = 512
_PIECE_BYTES = 4096
"""What a warp copies at a time: twice what it has under way."""


class KernelUnavailable(RuntimeError):
    """The kernel cannot be compiled here; the message says what is missing."""


class PageKernel:
    """Copies pages by the device's own threads."""

    def __init__(self, driver: CudaDriver, properties: Any, stream: int) -> None:
        """`properties`: what torch says of the device that is current; `stream`: any of it.

        Raises `KernelUnavailable` or `CudaError`.
        """
        self._driver = driver
        self.num_multiprocessors: int = properties.multi_processor_count
        capability = (properties.major, properties.minor)
        self._function = driver.load_function(_machine_code(capability), "copy_pages")
        # Code reaches the device with the first launch, which waits for all kernels: now, then.
        self.launch(np.empty((3, 0), np.uint64), 0, stream, 1)

    def launch(self, pages: NDArray[np.uint64], largest: int, stream: int, blocks: int) -> None:
        """Copy pages in stream order, by so many blocks of threads. Any thread.

        Addresses and sizes are multiples of `ALIGNMENT`.
        `pages`: rows (sources, targets, sizes) in pinned memory, which must stay as it is until
        the copy is done. `largest`: a bound on the sizes.
        """
        sources, targets, sizes = (ctypes.c_uint64(row.ctypes.data) for row in pages)
        scalars = (
            ctypes.c_uint32(pages.shape[1]),
            ctypes.c_uint32(-(-largest // _PIECE_BYTES)),
            ctypes.c_uint32(_PIECE_BYTES),
        )
        arguments = (ctypes.c_void_p * 6)(
            *map(ctypes.addressof, (sources, targets, sizes, *scalars))
        )
        self._driver.launch(self._function, blocks, _NUM_THREADS, stream, arguments)


@cache
def _machine_code(capability: tuple[int, int]) -> bytes:
    try:
        from cuda.bindings import nvrtc
    except ImportError as error:
        raise KernelUnavailable(
            f"no CUDA compiler ({error}): install kvtier with the extra `cuda`"
        ) from error
    source = resources.files(__package__).joinpath("page_kernel.cu").read_bytes()
    options = [f"--gpu-architecture=sm_{capability[0]}{capability[1]}".encode()]
    try:
        _, program = nvrtc.nvrtcCreateProgram(source, b"page_kernel.cu", 0, [], [])
        (result,) = nvrtc.nvrtcCompileProgram(program, len(options), options)
        if result != nvrtc.nvrtcResult.NVRTC_SUCCESS:
            raise KernelUnavailable(f"NVRTC: {result.name}: {_log(nvrtc, program)}")
        _, size = nvrtc.nvrtcGetCUBINSize(program)
        code = bytes(size)
        nvrtc.nvrtcGetCUBIN(program, code)
        nvrtc.nvrtcDestroyProgram(program)
    except RuntimeError as error:  # its library is not to be had
        if isinstance(error, KernelUnavailable):
            raise
        raise KernelUnavailable(f"NVRTC cannot be used: {error}") from error
    return code


def _log(nvrtc: object, program: object) -> str:
    _, size = nvrtc.nvrtcGetProgramLogSize(program)  # type: ignore[attr-defined]
    text = bytes(size)
    nvrtc.nvrtcGetProgramLog(program, text)  # type: ignore[attr-defined]
    return text.decode(errors="replace").strip("\0 \n")
