"""Engines on three hosts whose links have latency, limits and loss. What one has computed, the
others load; and while a host is lost, the others serve, and the pool heals."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import pytest

from tests.tiering.mooncake.harness import SEGMENT_BYTES
from tests.tiering.mooncake.pool import Master, mooncake_master
from tests.tiering.mooncake.serving import TOKENS, EngineProcess, Start, engines, tier_on
from tests.tiering.networks import Host, Lan, Link, Namespace, lan
from tests.tiering.patience import wait_until

NUM_PROMPTS = 3
ALL = [TOKENS] * NUM_PROMPTS
NETWORK = Link(delay_s=0.001, bytes_per_s=50e6, loss=0.001)
PROMPT_BYTES = 128 << 10
SLOW_LINK = Link(bytes_per_s=0.5e6)
"""A prompt takes 0.26 s."""
FAR_AWAY = Link(delay_s=0.05)
"""A round trip takes 0.1 s, and a load some of them."""
SLOW_GPU, FAST_GPU = 50.0, 20_000.0
"""Tokens a second: a prompt takes 2.6 s, or 6 ms."""
LINKS = [
    pytest.param(SLOW_LINK, id="slow link"),
    pytest.param(FAR_AWAY, id="far away", marks=pytest.mark.soak),
]
ROUNDS = 5


@pytest.fixture(scope="module")
def hosts(network: Namespace) -> Iterator[Lan]:
    """The master's host, and three for engines."""
    with lan(4) as made:
        yield made


@pytest.fixture(scope="module")
def master(
    hosts: Lan, network: Namespace, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Master]:
    central = hosts.hosts[0]
    directory = tmp_path_factory.mktemp("master")
    with mooncake_master(directory, central, address=central.address) as running:
        yield running


@pytest.fixture(autouse=True)
def _perfect_links(hosts: Lan) -> Iterator[None]:
    yield
    for host in hosts.hosts:
        host.link(Link())


def start_on(host: Host, master: Master, *, namespace: str, **keys: Any) -> Start:
    options = {name: keys.pop(name) for name in ("prefill_tokens_per_s",) if name in keys}
    tier = tier_on(master, hostname=host.address, **keys)
    return Start(host, tier, host.address, options={"namespace": namespace, **options})


def received(host: Host) -> int:
    """Bytes that have come to a host."""
    with host.entered():
        lines = Path("/proc/thread-self/net/dev").read_text(encoding="ascii").splitlines()
    (line,) = (line for line in lines if line.strip().startswith("eth0:"))
    return int(line.split()[1])


def heals(*some: EngineProcess) -> None:
    for engine in some:
        engine.serve_until_loaded(NUM_PROMPTS)


@contextmanager
def lending(master: Master, namespace: str, *some: Host) -> Iterator[list[EngineProcess]]:
    """Engines that lend memory, each on a host."""
    starts = [
        start_on(host, master, namespace=namespace, segment_bytes=SEGMENT_BYTES) for host in some
    ]
    with engines(*starts) as started:
        yield started


def test_what_one_host_computes_the_others_load_until_it_is_lost(
    hosts: Lan, master: Master
) -> None:
    _, first, second, third = hosts.hosts
    for host in hosts.hosts:
        host.link(NETWORK)
    with ExitStack() as stack:
        one, two, three = stack.enter_context(lending(master, "shared", first, second, third))
        served = one.serve(NUM_PROMPTS)
        assert (served.loaded, served.num_stored) == ([0] * NUM_PROMPTS, NUM_PROMPTS * 8)
        for engine in (two, three):
            assert engine.serve(NUM_PROMPTS).loaded == ALL

        with first.cut_off():
            one.kill()
            for engine in (two, three, two, three):
                engine.serve(NUM_PROMPTS)
            heals(two, three)
            (back,) = stack.enter_context(lending(master, "shared", second))
            assert back.serve(NUM_PROMPTS).loaded == ALL
        (again,) = stack.enter_context(lending(master, "shared", first))
        heals(again)
        two.end()


@pytest.mark.parametrize(
    "is_cut_off",
    [pytest.param(False, id="killed", marks=pytest.mark.soak), pytest.param(True, id="cut off")],
)
def test_a_host_is_lost_in_the_middle_of_a_load(
    hosts: Lan, master: Master, is_cut_off: bool
) -> None:
    _, first, second, _ = hosts.hosts
    namespace = f"in the middle, {is_cut_off}"
    with (
        lending(master, namespace, first) as (lender,),
        engines(
            start_on(
                second,
                master,
                namespace=namespace,
                segment_bytes=SEGMENT_BYTES,
                load_timeout_ms=5000,
            )
        ) as (engine,),
    ):
        lender.serve(NUM_PROMPTS)
        assert engine.serve(NUM_PROMPTS).loaded == ALL
        first.link(Link(bytes_per_s=0.1e6))
        before = received(second)
        engine.begin(NUM_PROMPTS)
        wait_until(lambda: received(second) > before + PROMPT_BYTES / 4, "blocks arrive")
        if is_cut_off:
            first.link(Link(loss=1.0))
        lender.kill()
        assert engine.result().loaded[0] < TOKENS
        heals(engine)
        engine.end()


def shares_loaded(
    hosts: Lan, master: Master, link: Link, prefill_tokens_per_s: float, namespace: str
) -> tuple[float, float]:
    """Which part of the prompts an engine loads over this link, and how many blocks it has not
    loaded because computing them is faster."""
    _, first, second, _ = hosts.hosts
    patient = {f"{what}_timeout_ms": 10_000 for what in ("lookup", "load", "store")}
    with lending(master, namespace, first) as (lender,):
        lender.serve(NUM_PROMPTS)
        first.link(link)
        start = start_on(
            second,
            master,
            namespace=namespace,
            prefill_tokens_per_s=prefill_tokens_per_s,
            **patient,
        )
        with engines(start) as (engine,):
            engine.serve(NUM_PROMPTS)
            loaded = [count for _ in range(ROUNDS) for count in engine.serve(NUM_PROMPTS).loaded]
            declined = engine.figure("tier_declined_blocks", reason="slower")
    return sum(loaded) / (len(loaded) * TOKENS), declined


@pytest.mark.parametrize("link", LINKS)
def test_the_link_brings_blocks_sooner_than_a_slow_gpu(
    hosts: Lan, master: Master, link: Link
) -> None:
    share, _ = shares_loaded(hosts, master, link, SLOW_GPU, f"slow GPU, {link}")
    assert share >= 0.7


@pytest.mark.parametrize("link", LINKS)
def test_a_fast_gpu_does_not_wait_for_the_link(hosts: Lan, master: Master, link: Link) -> None:
    share, declined = shares_loaded(hosts, master, link, FAST_GPU, f"fast GPU, {link}")
    assert share <= 0.3
    assert declined > 0
