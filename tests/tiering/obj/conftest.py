"""One server for all tests of this folder, emptied for each test."""

from __future__ import annotations

import logging
from collections.abc import Iterator

import pytest

from kvtier.tiering.obj import runs
from tests.tiering.obj.front import Front
from tests.tiering.obj.server import SECRETS, SeaweedProcess, seaweed


@pytest.fixture(scope="session")
def running(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SeaweedProcess]:
    with seaweed(tmp_path_factory.mktemp("seaweed")) as server:
        yield server


@pytest.fixture(params=["alone", "in runs"])
def layout(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Whether blocks have objects of their own, or share them."""
    if request.param == "alone":
        monkeypatch.setattr(runs, "_LARGE_BLOCK_BYTES", 0)
    return str(request.param)


@pytest.fixture
def server(running: SeaweedProcess) -> SeaweedProcess:
    """A running server without blocks."""
    running.empty()
    return running


@pytest.fixture
def front(server: SeaweedProcess) -> Iterator[Front]:
    with Front(server.port) as front:
        yield front


@pytest.fixture(autouse=True)
def _nothing_secret_is_written(
    caplog: pytest.LogCaptureFixture, capfd: pytest.CaptureFixture[str]
) -> Iterator[None]:
    """Neither keys nor signatures are in any log line or output of any test here."""
    caplog.set_level(logging.DEBUG)
    yield
    written = "".join(capfd.readouterr()) + caplog.text
    assert not [secret for secret in SECRETS if secret in written]
