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

# Streams that share a queue of the device wait for each other, which would hide a missing wait.
os.environ.setdefault("CUDA_DEVICE_MAX_CONNECTIONS", "32")

# torch is not a dependency of kvtier: the engine, or `make test`, installs it.
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
    """Every place for a worker, including the one for caches in host memory."""
    return _open(request.param, monkeypatch)


@pytest.fixture(params=["cpu", *_DEVICES])
def place(monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> Place:
    """Every place for the CUDA worker."""
    return _open(request.param, monkeypatch)


@pytest.fixture(params=_DEVICES)
def device_place(monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> Place:
    """Every place that has streams."""
    return _open(request.param, monkeypatch)


@pytest.fixture(params=["simulated", "simulated, begun at once"])
def simulated_place(
    monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest
) -> SimulatedPlace:
    """A place whose calls to the device can be inspected."""
    from tests.gpu.places import SimulatedPlace

    place = _open(request.param, monkeypatch)
    assert isinstance(place, SimulatedPlace)
    return place


@pytest.fixture
def held_place() -> CPUPlace:
    """A place where copies wait until a test continues them."""
    from tests.gpu.places import CPUPlace

    place = CPUPlace()
    place.copies.is_held = True
    return place
