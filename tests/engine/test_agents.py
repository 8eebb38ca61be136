"""What an agent's framework knows of its sessions, in whole engines: which of them stay in host
memory, and which leave."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from kvtier.engine import Engine
from kvtier.engine.offloading import offloading_config
from tests.engine.models import FULL, random_tokens
from tests.engine.test_tenants import ENGINE, engine_of

BLOCKS, TOKENS = 12, 8
LOADED = BLOCKS * TOKENS
HEAD = random_tokens(99, 4 * TOKENS)
"""What all sessions begin with: a system prompt and tools."""
SESSIONS = [HEAD + random_tokens(seed, (BLOCKS - 4) * TOKENS + 1) for seed in range(3)]
FIRST, SECOND, THIRD = SESSIONS


@pytest.fixture
def engine() -> Iterator[Engine]:
    """Host memory has room for the blocks of two sessions, and not for those of three."""
    row_bytes = offloading_config(FULL, ENGINE, {"cpu_bytes_to_use": "4MiB"}, "e").row_bytes
    num_blocks = 2 * BLOCKS - 4
    keys = {"cpu_bytes_to_use": num_blocks * row_bytes, "tenants": {}, "max_retained_share": 0.8}
    with engine_of(keys) as started:
        yield started


def turn(engine: Engine, session: list[int], **hints: Any) -> int:
    """One turn of a session, from an empty device cache. Returns the number of loaded tokens."""
    engine.drop_device_cache()
    [answer] = engine.generate([session], 2, kv_transfer_params=hints or None)
    assert engine.drain()
    return answer.num_loaded_tokens


def say(engine: Engine, session: list[int], **hints: Any) -> None:
    """Send a request that never runs."""
    name = engine.add_request(session, 1, kv_transfer_params=hints)
    engine.abort(name)


def test_without_a_hint_the_session_that_was_used_last_stays(engine: Engine) -> None:
    for session in (FIRST, SECOND, FIRST, THIRD):
        turn(engine, session)
    assert turn(engine, FIRST) == LOADED
    assert turn(engine, SECOND) == len(HEAD)


@pytest.mark.parametrize("runs", [True, False])
def test_a_session_that_has_ended_leaves_first_and_what_it_shares_stays(
    runs: bool, engine: Engine
) -> None:
    for session in (FIRST, SECOND, FIRST):
        turn(engine, session)
    if runs:
        turn(engine, FIRST, drop=True)
    else:
        say(engine, FIRST, drop=True)
    turn(engine, THIRD)
    assert turn(engine, SECOND) == LOADED
    assert turn(engine, FIRST) == len(HEAD)


@pytest.mark.parametrize("runs", [True, False])
def test_a_session_that_pauses_stays(runs: bool, engine: Engine) -> None:
    turn(engine, FIRST)
    if runs:
        turn(engine, FIRST, retain_s=600)
    else:
        say(engine, FIRST, retain_s=600)
    for session in (SECOND, SECOND, THIRD):
        turn(engine, session)
    assert turn(engine, FIRST) == LOADED


def test_who_drops_a_session_of_another_tenant_takes_nothing_from_it() -> None:
    row_bytes = offloading_config(FULL, ENGINE, {"cpu_bytes_to_use": "4MiB"}, "e").row_bytes
    num_blocks = 2 * BLOCKS - 4
    rules: dict[str, Any] = {"acme": {}, "chat": {}}
    with engine_of({"cpu_bytes_to_use": num_blocks * row_bytes, "tenants": rules}) as engine:
        for session in (SECOND, FIRST):
            turn(engine, session, tenant="acme")
        say(engine, FIRST, tenant="chat", drop=True)
        turn(engine, THIRD, tenant="acme")
        assert turn(engine, FIRST, tenant="acme") == LOADED
