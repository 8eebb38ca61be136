"""Counting hits: the figures of a plain loop over the manager, and of an independent model."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from itertools import islice

import pytest

from kvtier.config.options import WritePolicyName
from kvtier.cpu.manager import CPUOffloadingManager
from kvtier.replay.engine import Counting
from kvtier.replay.figures import Figures
from kvtier.replay.settings import ReplaySettings
from kvtier.replay.trace import Request, open_trace
from tests.replay.oracle import BLOCK_TOKENS, Oracle, settings_for, some_requests
from tests.trace_replay import replay
from tests.traces import CONVERSATION, conversation


def counted(requests: Iterable[Request], settings: ReplaySettings) -> Figures:
    counting = Counting(settings, BLOCK_TOKENS)
    for _ in counting.serve(requests):
        pass
    return counting.end()


@pytest.mark.parametrize(("num_blocks", "policy"), [(8000, "lru"), (3000, "arc")])
def test_the_conversation_trace_has_the_hits_of_a_plain_loop(num_blocks: int, policy: str) -> None:
    expected = replay(conversation(), CPUOffloadingManager(num_blocks, cache_policy=policy))
    counting = Counting(settings_for(num_blocks, policy=policy), BLOCK_TOKENS)
    with open_trace(str(CONVERSATION)) as trace:
        for _ in counting.serve(trace.requests()):
            pass
    figures = counting.end()
    assert figures.num_requests == 12_031
    assert figures.num_references == expected.num_references
    assert figures.hit_blocks == expected.num_hits
    (host,) = figures.places
    assert host.evicted_blocks == sum(map(len, expected.evicted))
    assert host.read_blocks == expected.num_hits
    assert host.written_blocks == host.evicted_blocks + num_blocks


@pytest.mark.parametrize("seed", range(20))
@pytest.mark.parametrize("tier_blocks", [30, 60, 150])
def test_a_tier_below_has_the_hits_of_an_independent_model(seed: int, tier_blocks: int) -> None:
    requests = some_requests(seed, 400, longest=10)
    oracle = Oracle(40, tier_blocks)
    counting = Counting(settings_for(40, tier_blocks), BLOCK_TOKENS)
    host, tier = counting.figures.places
    num_in_host = num_in_tier = 0
    serving = counting.serve(requests)
    for number, request in enumerate(requests):
        hits = oracle.serve(request.keys)
        num_in_host, num_in_tier = num_in_host + hits[0], num_in_tier + hits[1]
        next(serving)
        assert (host.hit_blocks, tier.hit_blocks) == (num_in_host, num_in_tier), number
    counting.end()
    assert num_in_tier > 0 or tier_blocks < 40
    assert host.written_blocks + host.promoted_blocks == oracle.host.num_written
    assert tier.read_blocks == host.promoted_blocks == oracle.num_promoted
    assert tier.written_blocks == oracle.tier.num_written


def conversation_hits(policy: str, write: str) -> Figures:
    """A part of the conversation trace, with host memory and a tier four times as large."""
    settings = settings_for(1500, 6000, policy=policy)
    tier = replace(settings.tiers[0], policy="lru", write_policy=WritePolicyName(write))
    counting = Counting(replace(settings, tiers=(tier,)), BLOCK_TOKENS)
    with open_trace(str(CONVERSATION)) as trace:
        for _ in counting.serve(islice(trace.requests(), 4000)):
            pass
    return counting.end()


@pytest.mark.parametrize("write", ["through", "on_evict"])
def test_density_above_a_larger_tier_costs_no_hits(write: str) -> None:
    """What host memory does not keep still reaches the tier."""
    lru, density = (conversation_hits(policy, write) for policy in ("lru", "density"))
    assert density.hit_blocks >= lru.hit_blocks - 0.01 * lru.num_references
    assert density.places[0].hit_blocks > 1.1 * lru.places[0].hit_blocks
