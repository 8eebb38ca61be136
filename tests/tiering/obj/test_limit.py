"""`max_bytes` of a real object store that several engines write, some of which are killed."""

from __future__ import annotations

import re
import time
from itertools import count

import obstore

from kvtier.seal import SEAL_BYTES
from kvtier.tiering.obj.janitor import JanitorTimes
from tests.tiering.obj.engine import EngineProcess, engines
from tests.tiering.obj.server import SeaweedProcess, blocks_in
from tests.tiering.patience import wait_until
from tests.tiering.reference import BLOCK_BYTES, BLOCKS_PER_PROMPT

TIMES = JanitorTimes(
    sweep_s=0.3, early_s=0.1, leader_lost_s=2.0, engine_lost_s=4.0, same_age_ms=100
)
DEADLINES = {"lookup_timeout_ms": 20_000, "load_timeout_ms": 20_000}
PART = SEAL_BYTES + BLOCK_BYTES
LIMIT = 10 * BLOCKS_PER_PROMPT * PART
HOT, FIRST = 1, 1000
"""The prompt that is used all the time; the first of those that are used once."""


def size_of(server: SeaweedProcess, part: str = "") -> int:
    """Bytes of all blocks in the bucket."""
    items = (item for page in obstore.list(server.store()) for item in page)
    return sum(item["size"] for item in items if re.search(f"{part}/[0-9a-f]{{32}}/", item["path"]))


def leads(engine: EngineProcess) -> bool:
    """Asked while the engine serves the hot prompt."""
    return 'kvtier_obj_used_bytes{tier="0:obj"}' in engine.serve(1, HOT).figures


def test_the_limit_is_kept_though_leaders_are_killed(server: SeaweedProcess) -> None:
    tier = {**server.keys, "max_bytes": LIMIT, **DEADLINES}
    fresh = count(FIRST)
    num_written = peak = 0
    with engines(3, tier, TIMES, num_slots=64) as alive:

        def is_kept_by_a_leader() -> bool:
            """Asked again and again while engines write."""
            nonlocal num_written, peak
            num_written += alive[0].serve(1, next(fresh)).num_stored
            size = size_of(server)
            peak = max(size, peak)
            time.sleep(0.2)  # blocks are to be seconds old when they leave
            is_led = [leads(engine) for engine in alive]
            return any(is_led) and size <= LIMIT and num_written * PART > LIMIT

        for num_kills in range(3):
            num_written = 0
            wait_until(is_kept_by_a_leader, f"the limit is kept after {num_kills} kills", 60)
            if len(alive) > 1:
                leader = next(engine for engine in alive if leads(engine))
                leader.kill()
                alive.remove(leader)
        assert peak < 4 * LIMIT
        # The hot prompt has stayed, and the oldest ones have left.
        with engines(1, tier, TIMES) as (reader,):
            assert reader.serve(1, HOT).num_loaded == 16 * BLOCKS_PER_PROMPT
            assert reader.serve(1, FIRST).num_loaded == 0


def test_what_a_killed_engine_had_for_itself_is_removed(server: SeaweedProcess) -> None:
    tier = {**server.keys, "max_bytes": 10**9, **DEADLINES}
    with (
        engines(1, tier, TIMES, reset_scope="all") as (dying,),
        engines(1, tier, TIMES) as (other,),
    ):
        other.serve(1)
        dying.reset()
        assert dying.serve(2).num_stored == 2 * BLOCKS_PER_PROMPT
        private = [block for block in blocks_in(server.store()) if block.is_private]
        assert sum(block.num_bytes for block in private) == 2 * BLOCKS_PER_PROMPT * PART
        dying.kill()
        wait_until(lambda: size_of(server, "private/[0-9a-f]+") == 0, "its blocks are removed")
        assert server.num_blocks() == BLOCKS_PER_PROMPT
        wait_until(
            lambda: len([name for name in server.names() if "/engines/" in name]) == 1,
            "its report is removed",
        )
