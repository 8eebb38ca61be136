"""Stock vLLM and a reference engine on three hosts, with one pool of memory: engines load what
others have computed, with the same tokens; and while a host is lost, the others serve."""

from __future__ import annotations

import subprocess
import time
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

import pytest

from kvtier.testing.vllm.tiny_model import LLAMA, random_prompts
from tests.e2e.vllm.lasting_tiers import figure_of, over, with_common_hashes
from tests.e2e.vllm.processes import VLLM
from tests.e2e.vllm.reference import Reference
from tests.e2e.vllm.remote_engine import RemoteEngine
from tests.e2e.vllm.subject import Subject
from tests.tiering.mooncake.pool import Master, Segment, mooncake_master, package_folder, segment
from tests.tiering.mooncake.serving import Start, engines, tier_on
from tests.tiering.networks import Host, Lan, Link, lan

pytestmark = pytest.mark.vllm

BLOCKS, TOKENS = 16, 512
PROMPTS = random_prompts(3, TOKENS, "shared through a pool")
PATIENCE_S = 60.0
SEGMENT_BYTES = 64 << 20
NETWORK = Link(delay_s=0.001, bytes_per_s=50e6, loss=0.001)


@dataclass
class Fleet:
    """Three hosts, of which the first two lend memory, and the master of their pool on the third.
    Processes that lend stand for engines that have ended."""

    lan: Lan
    master: Master
    lent: list[Segment]

    def engine(self, vllm: VLLM, model: Path, subject: Subject, number: int) -> RemoteEngine:
        """Stock vLLM on a host that lends memory."""
        host = self.lan.hosts[number]
        tier = tier_on(self.master, hostname=host.address)
        del tier["enable_kv_events"]
        there = with_common_hashes(vllm).but(environment={"MC_TCP_BIND_ADDRESS": host.address})
        return RemoteEngine(
            there,
            model,
            over(tier, subject, slots=BLOCKS * 3 // 2),
            network=f"/proc/{self.lent[number].pid}/ns/net",
            device_blocks=64,
            max_model_len=1024,
        )


@pytest.fixture
def fleet(vllm: VLLM, tmp_path: Path) -> Iterator[Fleet]:
    package_folder()
    found = subprocess.run([vllm.python, "-c", "import mooncake.store"], check=False, timeout=60)
    if found.returncode:
        pytest.skip("needs mooncake in vLLM's environment")
    with lan(3) as made, ExitStack() as stack:
        *lenders, central = made.hosts
        master = stack.enter_context(mooncake_master(tmp_path, central, address=central.address))
        lent = [
            stack.enter_context(segment(master, SEGMENT_BYTES, host, host.address))
            for host in lenders
        ]
        yield Fleet(made, master, lent)


def loaded(engine: RemoteEngine) -> float:
    return engine.figures().get(figure_of("0:mooncake", "loaded_blocks"), 0)


def heals(engine: RemoteEngine, alone: Reference) -> None:
    """Serve until no prompt is computed in one round. Host memory has room for half of them."""
    deadline = time.monotonic() + PATIENCE_S
    while True:
        assert time.monotonic() < deadline, engine.figures()
        before = loaded(engine)
        engine.reset_device_cache()
        answers = engine.generate(*PROMPTS)
        alone.check(PROMPTS, answers, exact=False)
        is_whole = all(answer.cached_tokens == TOKENS for answer in answers)
        if is_whole and loaded(engine) - before >= BLOCKS:
            return


def test_engines_on_three_hosts(
    vllm: VLLM, llama: Path, llama_alone: Reference, fleet: Fleet
) -> None:
    subject = Subject(LLAMA, llama, llama_alone)
    for host in fleet.lan.hosts:
        host.link(NETWORK)
    third: Host = fleet.lan.hosts[2]
    reference = Start(
        third,
        tier_on(fleet.master, hostname=third.address),
        third.address,
        options={"namespace": "reference"},
    )
    with (
        engines(reference) as (beside,),
        fleet.engine(vllm, llama, subject, 0) as first,
        fleet.engine(vllm, llama, subject, 1) as second,
    ):
        llama_alone.check(PROMPTS, first.generate(*PROMPTS))
        answers = second.generate(*PROMPTS)
        assert [answer.cached_tokens for answer in answers] == [TOKENS] * len(PROMPTS)
        assert loaded(second) == BLOCKS * len(PROMPTS)
        llama_alone.check(PROMPTS, answers)
        beside.serve_until_loaded(2)

        first.kill()
        fleet.lent[0].kill()
        fleet.lan.hosts[0].link(Link(loss=1.0))
        began = time.monotonic()
        second.reset_device_cache()
        during = second.generate(*PROMPTS)
        beside.serve(2)
        # Each of them waits for its deadlines at most; the engine of these tests is slow itself.
        assert time.monotonic() - began < PATIENCE_S
        llama_alone.check(PROMPTS, during, exact=False)
        heals(second, llama_alone)
        beside.serve_until_loaded(2)
        beside.end()
