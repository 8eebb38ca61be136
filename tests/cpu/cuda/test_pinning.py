"""A region is pinned as a whole, or a warning has the remedy."""

from __future__ import annotations

import resource
from typing import cast

import pytest

from kvtier.cpu.cuda.driver import CudaDriver, CudaError
from kvtier.cpu.gpu_worker import pin_region
from tests.cpu.region_process import RegionMaker


class Driver:
    """Notes registered memory, or refuses it."""

    def __init__(self, error: CudaError | None = None) -> None:
        self.registered: list[tuple[int, int]] = []
        self._error = error

    def register_host(self, address: int, size: int) -> None:
        if self._error is not None:
            raise self._error
        self.registered.append((address, size))


def test_all_of_the_region_is_pinned(make: RegionMaker, caplog: pytest.LogCaptureFixture) -> None:
    region, driver = make(rank=1), Driver()
    assert pin_region(region, cast(CudaDriver, driver))
    assert driver.registered == [(region.address, region.size_bytes)]
    assert caplog.messages == []  # of warnings


@pytest.mark.parametrize(
    ("limit", "remedies"),
    [
        (4096, ["4096 bytes", "ulimit -l unlimited", "LimitMEMLOCK", "--ulimit memlock=-1"]),
        (resource.RLIM_INFINITY, ["does not seem to be the reason", "cpu_bytes_to_use", "dmesg"]),
        (1 << 60, ["does not seem to be the reason", "cpu_bytes_to_use", "dmesg"]),
    ],
)
def test_a_region_that_cannot_be_pinned_comes_with_the_remedy(
    limit: int,
    remedies: list[str],
    make: RegionMaker,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    monkeypatch.setattr(resource, "getrlimit", lambda which: (limit, limit))
    driver = Driver(CudaError("cuMemHostRegister: out of memory (2)"))
    assert not pin_region(make(rank=0), cast(CudaDriver, driver))
    (message,) = caplog.messages
    for part in ("could not be pinned", "cuMemHostRegister: out of memory (2)", *remedies):
        assert part in message
