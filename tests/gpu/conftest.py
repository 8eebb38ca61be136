"""Places to run the CUDA worker's tests in. Without torch there are none."""

from __future__ import annotations

import os
from importlib.util import find_spec
from typing import TYPE_CHECKING

import pytest

from tests.cpu.conftest import _no_directories_of_killed_runs, shm

if TYPE_CHECKING:
    from tests.gpu.places import CPUPlace, Place, SimulatedPlace

__all__ = ["_no_directories_of_killed_runs", "shm"]

# Streams that share a queue to the device wait for each other, which hides that they ought to.
os.environ.setdefault("CUDA_DEVICE_MAX_CONNECTIONS", "32")

# torch is nobody's dependency: it is here where the engine, or `make test`, has brought it.
collect_ignore_glob = [] if find_spec("torch") else ["test_*.py"]


_DEVICES = ["simulated", "simulated, begun at once", "cuda", "cuda, begun at once"]


def _open(name: str, monkeypatch: pytest.MonkeyPatch) -> Place:
    from tests.gpu import places

    name, _, is_begun_at_once = name.partition(", begun")
    if is_begun_at_once:
        places.begin_at_once(monkeypatch)
    if name == "cuda":
        if not places.has_cuda():
            pytest.skip(places.NO_DEVICE)
        return places.CudaPlace()
    if name == "simulated":
        return places.SimulatedPlace(monkeypatch)
    return places.CPUPlace() if name == "cpu" else places.Place()


@pytest.fixture(params=["host", "cpu", *_DEVICES])
def any_place(monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> Place:
    """Wherever a worker can be, that of caches in host memory among them."""
    return _open(request.param, monkeypatch)


@pytest.fixture(params=["cpu", *_DEVICES])
def place(monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> Place:
    """Wherever the CUDA worker can be."""
    return _open(request.param, monkeypatch)


@pytest.fixture(params=_DEVICES)
def device_place(monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> Place:
    """Wherever there are streams."""
    return _open(request.param, monkeypatch)


@pytest.fixture(params=["simulated", "simulated, begun at once"])
def simulated_place(
    monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest
) -> SimulatedPlace:
    """Where all that is asked of the device can be looked into."""
    from tests.gpu.places import SimulatedPlace

    place = _open(request.param, monkeypatch)
    assert isinstance(place, SimulatedPlace)
    return place


@pytest.fixture
def held_place() -> CPUPlace:
    """Copies wait until they are told to go on."""
    from tests.gpu.places import CPUPlace

    place = CPUPlace()
    place.copies.is_held = True
    return place
