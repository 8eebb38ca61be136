"""Without a driver that is new enough there is an error with the remedy."""

from __future__ import annotations

import ctypes
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from kvtier.cpu.cuda.driver import CudaDriver, CudaError, CudaUnavailable, cuda_driver


def has_driver() -> bool:
    try:
        ctypes.CDLL("libcuda.so.1")
    except OSError:
        return False
    return True


@pytest.mark.skipif(has_driver(), reason="this machine has an NVIDIA driver")
def test_a_machine_without_a_driver_says_so() -> None:
    for open_driver in (CudaDriver, cuda_driver):
        with pytest.raises(CudaUnavailable, match=r"no NVIDIA driver.*libcuda\.so\.1"):
            open_driver()


@pytest.mark.parametrize(
    "library",
    [
        SimpleNamespace(),  # before CUDA 12
        SimpleNamespace(cuGetProcAddress_v2=lambda *_: 500),  # before 12.8: not found
        SimpleNamespace(cuGetProcAddress_v2=lambda *_: 0),  # found nothing
    ],
)
def test_a_driver_that_is_too_old_is_refused(library: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    for kind in ("CDLL", "PyDLL"):
        monkeypatch.setattr(ctypes, kind, lambda _: library)
    with pytest.raises(CudaUnavailable, match=r"CUDA 12\.8.*release 570 or later"):
        CudaDriver()


class Library:
    """The part of the driver that the tests need; it notes its arguments."""

    def __init__(self) -> None:
        self.code = 0
        self.copied: list[tuple[list[int], list[int], list[int], int]] = []
        self.unregistered: list[int] = []
        prototype = ctypes.CFUNCTYPE(ctypes.c_int, *self._arguments())
        self._entry = prototype(self._copy)

    @staticmethod
    def _arguments() -> list[Any]:
        pointer, size = ctypes.c_void_p, ctypes.c_size_t
        return [pointer, pointer, pointer, size, pointer, pointer, size, pointer, pointer]

    def _copy(self, targets: int, sources: int, sizes: int, count: int, *rest: int | None) -> int:
        lists = [
            list((ctypes.c_uint64 * count).from_address(at)) for at in (sources, targets, sizes)
        ]
        self.copied.append((lists[0], lists[1], lists[2], rest[-1] or 0))
        return self.code

    def cuGetProcAddress_v2(self, name: bytes, address: Any, *_: Any) -> int:  # noqa: N802
        assert name == b"cuMemcpyBatchAsync"
        address._obj.value = ctypes.cast(self._entry, ctypes.c_void_p).value
        return 0

    def cuGetErrorName(self, code: int, text: Any) -> int:  # noqa: N802
        text._obj.value = b"CUDA_ERROR_INVALID_VALUE"
        return 0

    def cuGetErrorString(self, code: int, text: Any) -> int:  # noqa: N802
        text._obj.value = b"invalid argument"
        return 0

    def cuMemHostRegister_v2(self, *_: Any) -> int:  # noqa: N802
        return self.code

    def cuMemHostGetDevicePointer_v2(self, mapped: Any, *_: Any) -> int:  # noqa: N802
        mapped._obj.value = 0xD0000
        return 0

    def cuMemHostUnregister(self, address: ctypes.c_void_p) -> int:  # noqa: N802
        self.unregistered.append(address.value or 0)
        return 0


@pytest.fixture
def library(monkeypatch: pytest.MonkeyPatch) -> Library:
    library = Library()
    for kind in ("CDLL", "PyDLL"):
        monkeypatch.setattr(ctypes, kind, lambda _: library)
    return library


def test_pages_are_handed_over_as_they_are(library: Library) -> None:
    driver = CudaDriver()
    sources, targets, sizes = np.array([[1, 2, 3], [10, 20, 30], [7, 8, 9]], np.uint64)
    driver.copy_batch(sources, targets, sizes, stream=77)
    driver.copy_batch(sources[:0], targets[:0], sizes[:0], stream=77)  # which the driver refuses
    assert library.copied == [([1, 2, 3], [10, 20, 30], [7, 8, 9], 77)]


def test_an_error_has_the_drivers_words(library: Library) -> None:
    driver = CudaDriver()
    library.code = 1
    one = np.ones(1, np.uint64)
    complaint = r"CUDA_ERROR_INVALID_VALUE \(1\), invalid argument"
    with pytest.raises(CudaError, match=f"cuMemcpyBatchAsync: {complaint}"):
        driver.copy_batch(one, one, one, stream=77)
    with pytest.raises(CudaError, match=f"cuMemHostRegister: {complaint}"):
        driver.register_host(0xD0000, 4096)
    assert library.unregistered == []


def test_memory_that_the_device_sees_elsewhere_is_not_left_pinned(library: Library) -> None:
    driver = CudaDriver()
    driver.register_host(0xD0000, 4096)
    with pytest.raises(CudaError, match="other addresses"):
        driver.register_host(0xE0000, 4096)
    assert library.unregistered == [0xE0000]
