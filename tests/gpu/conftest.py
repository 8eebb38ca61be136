"""Places to run the CUDA worker's tests in. Without torch there are none."""

from __future__ import annotations

from collections.abc import Iterator
from importlib.util import find_spec
from typing import TYPE_CHECKING

import pytest

from tests.cpu.conftest import _no_directories_of_killed_runs, shm

if TYPE_CHECKING:
    from tests.gpu.places import CPUPlace, Place

__all__ = ["_no_directories_of_killed_runs", "shm"]

# torch is nobody's dependency: it is here where the engine, or `make test`, has brought it.
collect_ignore_glob = [] if find_spec("torch") else ["test_*.py"]


@pytest.fixture(scope="session")
def _kernel_compiled_once() -> Iterator[None]:
    from tests.gpu.places import compile_kernel_once

    with pytest.MonkeyPatch.context() as patch:
        compile_kernel_once(patch)
        yield


def _open(name: str, monkeypatch: pytest.MonkeyPatch) -> Place:
    from tests.gpu import places

    if name == "cuda":
        if not places.has_cuda():
            pytest.skip(places.NO_DEVICE)
        return places.CudaPlace()
    if name == "simulated":
        return places.SimulatedPlace(monkeypatch)
    return places.CPUPlace() if name == "cpu" else places.Place()


@pytest.fixture(params=["host", "cpu", "simulated", "cuda"])
def any_place(
    _kernel_compiled_once: None, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest
) -> Place:
    """Wherever a worker can be, that of caches in host memory among them."""
    return _open(request.param, monkeypatch)


@pytest.fixture(params=["cpu", "simulated", "cuda"])
def place(
    _kernel_compiled_once: None, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest
) -> Place:
    """Wherever the CUDA worker can be."""
    return _open(request.param, monkeypatch)


@pytest.fixture(params=["simulated", "cuda"])
def device_place(
    _kernel_compiled_once: None, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest
) -> Place:
    """Wherever there are streams."""
    return _open(request.param, monkeypatch)


@pytest.fixture
def held_place() -> CPUPlace:
    """Copies wait until they are told to go on."""
    from tests.gpu.places import CPUPlace

    place = CPUPlace()
    place.copies.is_held = True
    return place
