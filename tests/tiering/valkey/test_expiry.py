"""`ttl_s`: blocks expire, and every use renews them."""

from __future__ import annotations

from tests.tiering.patience import wait_until
from tests.tiering.valkey.server import ValkeyProcess, block_keys
from tests.tiering.valkey.serving import BLOCKS, PROMPTS, TOKENS, Serving, serving

TTL_S = 1000
SOON_MS = 50_000
LATER_MS = 900_000
HOUR_MS = 3_600_000


def remaining_ms(server: ValkeyProcess) -> list[int]:
    """How long each block stays; -1 for ever."""
    with server.client() as client:
        return [int(client.pttl(key)) for key in block_keys(client)]


def let_time_pass(server: ValkeyProcess) -> None:
    with server.client() as client:
        for key in block_keys(client):
            client.pexpire(key, SOON_MS)


def test_without_it_blocks_do_not_expire(server: ValkeyProcess) -> None:
    with serving(server.url) as engine:
        engine.serve_until_loaded()
        engine.step_for(0.7)
        assert set(remaining_ms(server)) == {-1}


def test_blocks_expire(server: ValkeyProcess) -> None:
    with serving(server.url, ttl_s=1) as engine, server.client() as client:
        before = client.info("stats")["expired_keys"]
        engine.serve(PROMPTS[0])
        wait_until(
            lambda: client.info("stats")["expired_keys"] == before + BLOCKS,
            "the blocks have expired",
        )
    with serving(server.url, ttl_s=TTL_S) as engine:
        assert engine.serve(PROMPTS[0]) == 0
        engine.serve_until_loaded()
        assert all(LATER_MS < each <= TTL_S * 1000 for each in remaining_ms(server))


def test_a_load_renews_blocks(server: ValkeyProcess) -> None:
    with serving(server.url, ttl_s=TTL_S) as engine:
        engine.serve_until_loaded()
    # So that no report of a use is under way, another engine loads.
    with serving(server.url, ttl_s=TTL_S) as engine:
        let_time_pass(server)
        assert engine.serve(PROMPTS[0]) == TOKENS
        assert engine.serve(PROMPTS[1]) == TOKENS
        renewed = [each for each in remaining_ms(server) if each > LATER_MS]
        assert len(renewed) == 2 * BLOCKS


def _is_renewed_from_host_memory(engine: Serving, server: ValkeyProcess, least_ms: int) -> bool:
    assert engine.serve(PROMPTS[0]) == TOKENS
    return len([each for each in remaining_ms(server) if each > least_ms]) == BLOCKS


def test_a_use_from_host_memory_renews_blocks(server: ValkeyProcess) -> None:
    with serving(server.url, ttl_s=TTL_S) as engine:
        engine.serve(PROMPTS[0])
        wait_until(lambda: len(remaining_ms(server)) == BLOCKS, "all are stored")
        engine.step_for(0.7)
        let_time_pass(server)
        loads = engine.figures.get('kvtier_tier_blocks{tier="0:valkey",direction="load"}')
        wait_until(
            lambda: _is_renewed_from_host_memory(engine, server, LATER_MS), "the use is reported"
        )
        assert engine.figures.get('kvtier_tier_blocks{tier="0:valkey",direction="load"}') == loads


def test_private_blocks_expire_an_hour_after_their_last_use(server: ValkeyProcess) -> None:
    """Nobody else finds what was stored after a reset, so nobody else would remove it."""
    with serving(server.url) as engine:
        engine.engine.reset_cache()
        engine.serve_until_loaded()
        assert all(LATER_MS < each <= HOUR_MS for each in remaining_ms(server))
        engine.step_for(0.7)
        let_time_pass(server)
        assert engine.serve_all() == [TOKENS] * len(PROMPTS)
        assert all(each > LATER_MS for each in remaining_ms(server))
