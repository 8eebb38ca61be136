"""The reference engine over an obj tier whose server ends, stands still, loses everything, or
cannot be reached: answers stay right, no request waits longer than its deadlines, and the tier is
used again without a restart of the engine."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest

from kvtier.tiering.obj import objects
from tests.tiering.obj.server import SeaweedProcess
from tests.tiering.patience import wait_until
from tests.tiering.proxy import Direction, Proxy, proxy_to
from tests.tiering.reference import BLOCK_BYTES, BLOCKS_PER_PROMPT, ReferenceEngine, prompts

pytestmark = pytest.mark.usefixtures("layout")
PROMPTS = prompts(4)
DEADLINES = {"lookup_timeout_ms": 250, "load_timeout_ms": 500}
PATIENT_S = 20
"""How long the client waits for an answer in these tests: much longer than a request may wait."""
HELD_S = 10.0
"""A request that waits for so long was not released by its deadlines."""


@pytest.fixture
def proxy(server: SeaweedProcess) -> Iterator[Proxy]:
    with proxy_to(server.port) as proxy:
        yield proxy


@pytest.fixture(autouse=True)
def _patient_client(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(objects, "_SILENCE_S", getattr(request, "param", PATIENT_S))


@pytest.fixture
def engine(server: SeaweedProcess, proxy: Proxy) -> Iterator[ReferenceEngine]:
    """An engine that has stored the prompts, and loads them."""
    keys = {**server.keys, "endpoint": f"http://127.0.0.1:{proxy.port}"}
    with ReferenceEngine({"type": "obj", **keys, **DEADLINES}) as engine:
        engine.serve(PROMPTS)
        engine.settle()
        assert server.num_blocks() == len(PROMPTS) * BLOCKS_PER_PROMPT
        wait_for_recovery(engine)
        yield engine


def serve_in_trouble(engine: ReferenceEngine) -> None:
    engine.slowest_s = 0.0
    engine.serve_from_tiers(PROMPTS)
    assert engine.slowest_s < HELD_S


def wait_for_recovery(engine: ReferenceEngine, patience_s: float = 60.0) -> None:
    """All prompts come from the tier again."""
    wanted = len(PROMPTS) * BLOCKS_PER_PROMPT * 16

    def is_used_again() -> bool:
        loaded = engine.serve_from_tiers(PROMPTS)
        engine.settle()
        return loaded == wanted

    wait_until(is_used_again, "all prompts are loaded again", patience_s)


@pytest.mark.parametrize(
    "start",
    [
        pytest.param(SeaweedProcess.start_empty, id="empty"),
        # Starting with what was stored takes the server up to 20 s.
        pytest.param(SeaweedProcess.start, id="with its data", marks=pytest.mark.soak),
    ],
)
def test_the_server_is_killed_and_starts_again(
    server: SeaweedProcess, engine: ReferenceEngine, start: Callable[[SeaweedProcess], None]
) -> None:
    server.kill()
    serve_in_trouble(engine)
    assert engine.figures()['kvtier_obj_failures_unreachable{tier="0:obj"}'] > 0
    assert engine.figures()['kvtier_obj_failures_silent{tier="0:obj"}'] == 0
    start(server)
    wait_for_recovery(engine)


def test_the_server_stands_still(server: SeaweedProcess, engine: ReferenceEngine) -> None:
    with server.standing_still():
        serve_in_trouble(engine)
    wait_for_recovery(engine)


ANSWERS = Direction.FROM_SERVER
HALF_A_BLOCK = 5 * BLOCK_BYTES // 2
TROUBLES: dict[str, Callable[[Proxy], None]] = {
    "cut": lambda proxy: proxy.cut(ANSWERS),
    "stalled": lambda proxy: proxy.stall(ANSWERS),
    "cut in the middle of a block": lambda proxy: proxy.cut(ANSWERS, HALF_A_BLOCK),
    "stalled in the middle of a block": lambda proxy: proxy.stall(ANSWERS, HALF_A_BLOCK),
}


@pytest.mark.parametrize("trouble", TROUBLES)
def test_the_network(engine: ReferenceEngine, proxy: Proxy, trouble: str) -> None:
    TROUBLES[trouble](proxy)
    serve_in_trouble(engine)
    assert proxy.is_holding
    proxy.heal()
    wait_for_recovery(engine)


@pytest.mark.parametrize("_patient_client", [1], indirect=True)
def test_connections_that_bring_nothing_any_more_are_given_up(
    engine: ReferenceEngine, proxy: Proxy
) -> None:
    proxy.forget_connections()
    serve_in_trouble(engine)
    wait_for_recovery(engine, PATIENT_S)
