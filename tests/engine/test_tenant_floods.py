"""A tenant floods host memory and a disk with ten times the prompts of another one, which still
finds what its floors alone would give, also in the next engine. Whole engines, from prompts to
tokens."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from kvtier.config import ConfigError
from kvtier.engine import Engine
from kvtier.engine.offloading import offloading_config
from kvtier.tiering.disk.layout import Geometry
from tests.engine.models import FULL, random_tokens
from tests.engine.oracle import assert_same
from tests.engine.test_tenants import ENGINE, PATIENT, engine_of

NUM_CHATS, ROUNDS = 3, 3
PROMPTS = [random_tokens(seed, 48) for seed in range(NUM_CHATS)]
PER_PROMPT = 48 // 8
FLOOR = NUM_CHATS * PER_PROMPT
ROW_BYTES = offloading_config(FULL, ENGINE, {"cpu_bytes_to_use": "4MiB"}, "size").row_bytes


def keys_of(path: Path | None, num_host: int, num_disk: int, floor: str) -> dict[str, Any]:
    keys: dict[str, Any] = {"cpu_bytes_to_use": num_host * ROW_BYTES}
    quota = {"floor": floor}
    rule: dict[str, Any] = {"host": quota}
    if path is not None:
        slab = {"type": "disk", "path": str(path), **PATIENT}
        keys["secondary_tiers"] = [slab | {"max_bytes": Geometry(ROW_BYTES, num_disk).needed_bytes}]
        rule["disk"] = quota
    return keys | {"tenants": {"victim": rule, "flood": {}}}


def num_found(engine: Engine, rounds: int, *, has_flood: bool) -> int:
    """The tokens that the victim loads, in chats that take turns."""
    found = number = 0
    for turn in range(rounds * NUM_CHATS):
        prompt = PROMPTS[turn % NUM_CHATS]
        engine.drop_device_cache()
        hints = {"tenant": "victim"}
        [answer] = engine.generate([prompt], 4, keep_logits=True, kv_transfer_params=hints)
        assert_same(answer, FULL, prompt)
        found += answer.num_loaded_tokens
        for _ in range(10 if has_flood else 0):
            number += 1
            flood = random_tokens(1000 + number, 48)
            engine.generate([flood], 1, kv_transfer_params={"tenant": "flood"})
        assert engine.drain()
    return found


@pytest.mark.parametrize("place", ["host", "disk"])
def test_a_flood_leaves_a_victim_what_its_floor_gives(place: str, tmp_path: Path) -> None:
    is_disk = place == "disk"
    sizes = (2 * PER_PROMPT, 2 * FLOOR) if is_disk else (2 * FLOOR, 0)
    path = tmp_path / "kv.slab" if is_disk else None
    with engine_of(keys_of(path and path.with_suffix(".alone"), *sizes, "0%")) as engine:
        alone = num_found(engine, ROUNDS, has_flood=False)
    assert alone > 0
    with engine_of(keys_of(path, *sizes, "50%")) as engine:
        assert num_found(engine, ROUNDS, has_flood=True) >= 0.98 * alone
    if path is not None:
        with engine_of(keys_of(path, *sizes, "50%")) as engine:  # the next one is warm
            assert num_found(engine, 1, has_flood=True) >= 0.98 * alone / (ROUNDS - 1)
    with engine_of(keys_of(path and path.with_suffix(".without"), *sizes, "0%")) as engine:
        assert num_found(engine, ROUNDS, has_flood=True) < 0.5 * alone, "it would hurt nobody"


@pytest.mark.parametrize("tier", ["example", "fs"])
def test_quotas_that_a_tier_cannot_keep_are_refused(tier: str, tmp_path: Path) -> None:
    own = {"root_dir": str(tmp_path / "root"), "max_bytes": "16MiB"}
    entry = {"type": tier} | (own if tier == "fs" else {})
    keys = {"secondary_tiers": [entry], "tenants": {"acme": {tier: {"cap": "50%"}}}}
    with pytest.raises(ConfigError, match=rf"tenants\.acme\.0:{tier}"), engine_of(keys):
        pass
