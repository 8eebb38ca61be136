"""One server for the tests of a module, emptied for each test."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.tiering.obj.server import SeaweedProcess, seaweed


@pytest.fixture(scope="module")
def running(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SeaweedProcess]:
    with seaweed(tmp_path_factory.mktemp("seaweed")) as server:
        yield server


@pytest.fixture
def server(running: SeaweedProcess) -> SeaweedProcess:
    """A running server without blocks."""
    running.empty()
    return running
