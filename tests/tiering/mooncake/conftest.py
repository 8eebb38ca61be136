"""The network of these tests: one for the whole process, where nothing else can be reached."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.tiering.mooncake.pool import package_folder
from tests.tiering.networks import Namespace, network_of_process


@pytest.fixture(scope="session")
def network() -> Iterator[Namespace]:
    """A network with nothing but loopback. Fixtures of a wider scope than a test enter it
    themselves."""
    package_folder()
    with pytest.MonkeyPatch.context() as patch:
        # Without it, a client refuses to start where there is no address but loopback.
        patch.setenv("MC_TCP_BIND_ADDRESS", "127.0.0.1")
        yield network_of_process()


@pytest.fixture(autouse=True)
def _in_the_network(network: Namespace) -> Iterator[None]:
    with network.entered():
        yield
