"""One server for the tests of a module, emptied for each test."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.tiering.valkey.server import ValkeyProcess, valkey_server


@pytest.fixture(scope="module")
def running(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ValkeyProcess]:
    with valkey_server(tmp_path_factory.mktemp("valkey")) as server:
        yield server


@pytest.fixture
def server(running: ValkeyProcess) -> ValkeyProcess:
    """A running server without blocks."""
    with running.client() as client:
        client.flushall()
    return running
