"""Tenants share a slab: caps are exact to the block, floors are kept, and both are still true in
the next engine, however the last one ended."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from kvtier.base import OffloadKey, make_offload_key
from kvtier.config import ConfigError
from kvtier.config.tenants import TenantRule
from kvtier.cpu.policies.tenants import TenantPolicy, tenant_tag
from kvtier.seal import SEAL_BYTES
from kvtier.tiering.disk.index import IN_HEADER, MAX_INLINE_KEY, IndexTable
from kvtier.tiering.disk.layout import (
    MOST_DESCRIPTION_BYTES,
    SUPERBLOCK_OFFSETS,
    Geometry,
    Superblock,
    encode_stamp,
    read_description,
    read_owner,
    write_slot_header,
)
from kvtier.tiering.disk.manager import DiskSecondaryTierManager
from kvtier.tiering.io.page import BODY_BYTES, PAGE_BYTES
from tests.tiering.disk.engine import configured_engine
from tests.tiering.disk.tenants_engine import (
    ACME,
    BATCH,
    CAP,
    DEFAULT,
    FLOOR,
    NUM_BLOCKS,
    NUM_ROWS,
    RULES,
    prompt,
    shared_engine,
)
from tests.tiering.engine import Engine


def disk_of(engine: Engine) -> DiskSecondaryTierManager:
    assert isinstance(engine.tier, DiskSecondaryTierManager)
    return engine.tier


def charged(engine: Engine) -> dict[str, int]:
    """How many blocks on disk each tenant is charged for."""
    policy = disk_of(engine)._table._policy
    assert isinstance(policy, TenantPolicy)
    counts = {account.name: account.num_blocks for account in policy.accounts}
    table = disk_of(engine)._table
    assert sum(counts.values()) == len(table.readable) + len(table.writing)
    return counts


def serve(engine: Engine, tenant: TenantRule, first: int, num_prompts: int) -> int:
    """Requests of a tenant, one after the other. Returns the number of blocks that were found."""
    num_hits = 0
    for number in range(first, first + num_prompts):
        num_hits += engine.serve(prompt(tenant, number), tenant=tenant)
        engine.settle()
        assert charged(engine)["acme"] <= CAP
    return num_hits


def test_a_cap_is_exact_on_disk_though_slots_are_free(tmp_path: Path) -> None:
    with shared_engine(tmp_path / "kv.slab") as engine:
        serve(engine, ACME, 0, 10)
        assert charged(engine) == {"default": 0, "acme": CAP, "batch": 0}


def test_a_floor_is_not_taken_and_lent_room_returns(tmp_path: Path) -> None:
    with shared_engine(tmp_path / "kv.slab") as engine:
        serve(engine, BATCH, 0, 20)
        assert charged(engine)["batch"] == NUM_BLOCKS
        serve(engine, ACME, 0, 4)
        assert charged(engine) == {"default": 0, "acme": FLOOR, "batch": NUM_BLOCKS - FLOOR}
        serve(engine, BATCH, 100, 20)
        serve(engine, DEFAULT, 0, 20)
        assert charged(engine)["acme"] == FLOOR
        assert serve(engine, ACME, 0, 4) == 4 * 4


def test_the_next_engine_knows_whose_blocks_they_are(tmp_path: Path) -> None:
    path = tmp_path / "kv.slab"
    with shared_engine(path) as engine:
        serve(engine, ACME, 0, 10)
        serve(engine, BATCH, 0, 3)
        before = charged(engine)
    with shared_engine(path) as engine:
        assert charged(engine) == before
        serve(engine, ACME, 20, 10)
        assert charged(engine)["acme"] == CAP
        serve(engine, BATCH, 10, 40)
        assert charged(engine)["acme"] in range(FLOOR, CAP + 1)


def test_a_block_that_was_handed_over_stays_with_its_new_owner(tmp_path: Path) -> None:
    """Otherwise what another tenant uses would take the floor of the one that stored it."""
    path = tmp_path / "kv.slab"
    with shared_engine(path) as engine:
        serve(engine, ACME, 0, 2)
        for number in range(2):
            engine.serve(prompt(ACME, number), tenant=BATCH)
            engine.settle()
        serve(engine, ACME, 10, CAP // 4)
        before = charged(engine)
        assert before == {"default": 0, "acme": CAP, "batch": 8}
        for number in range(2):
            engine.serve(prompt(ACME, number), tenant=BATCH)
            engine.settle()
    with shared_engine(path) as engine:
        assert charged(engine) == before


def test_a_lower_cap_drops_the_least_recently_used_blocks_at_the_start(tmp_path: Path) -> None:
    path = tmp_path / "kv.slab"
    with shared_engine(path) as engine:
        serve(engine, ACME, 0, 6)
        assert charged(engine)["acme"] == CAP
    rules = {"acme": {"disk": {"cap": "12.5%"}}, "batch": {}}
    with shared_engine(path, rules) as engine:
        assert charged(engine)["acme"] == NUM_BLOCKS // 8
        assert serve(engine, ACME, 4, 2) == 8
        serve(engine, BATCH, 0, 30)
        assert sum(charged(engine).values()) == NUM_BLOCKS


@pytest.mark.parametrize("num_left", [6, 9])
def test_moved_blocks_keep_their_owners(num_left: int, tmp_path: Path) -> None:
    """A slab gets smaller. Its keys are too long for the index."""
    path = tmp_path / "kv.slab"
    rules: dict[str, Any] = {"acme": {}, "batch": {}}

    def keys_of(tenant: TenantRule) -> list[OffloadKey]:
        return [make_offload_key(f"{tenant.name:-^60}{n}".encode(), 0) for n in range(6)]

    with configured_engine(path, num_rows=NUM_ROWS, num_blocks=12, tenants=rules) as engine:
        for tenant in (BATCH, ACME):
            engine.serve(keys_of(tenant), tenant=tenant)
            engine.settle()
        assert charged(engine) == {"default": 0, "acme": 6, "batch": 6}
    with configured_engine(path, num_rows=NUM_ROWS, num_blocks=num_left, tenants=rules) as engine:
        assert charged(engine) == {"default": 0, "acme": 6, "batch": num_left - 6}


def test_blocks_of_a_tenant_without_a_rule_are_those_of_the_default(tmp_path: Path) -> None:
    path = tmp_path / "kv.slab"
    with shared_engine(path) as engine:
        serve(engine, ACME, 0, 4)
    with shared_engine(path, {"team": {}, "acme-2": {"disk": {"cap": "10%"}}}) as engine:
        policy = disk_of(engine)._table._policy
        assert isinstance(policy, TenantPolicy)
        assert [account.num_blocks for account in policy.accounts] == [16, 0, 0]


def test_a_killed_engine_leaves_caps_and_floors_true(tmp_path: Path) -> None:
    path = tmp_path / "kv.slab"
    command = [sys.executable, "-m", "tests.tiering.disk.tenants_engine", str(path)]
    for num_served in (12, 3, 20):
        with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
            try:
                assert process.stdout is not None
                for _ in range(num_served):
                    assert process.stdout.readline() == "served\n"
            finally:
                process.kill()
        with shared_engine(path) as engine:
            counts = charged(engine)
            assert 0 < counts["acme"] <= CAP
            assert counts["default"] == 0
            assert counts["batch"] > 0


def test_headers_tell_whose_blocks_they_are_where_the_index_is_damaged(tmp_path: Path) -> None:
    path = tmp_path / "kv.slab"
    with shared_engine(path) as engine:
        serve(engine, ACME, 0, 6)
        serve(engine, BATCH, 0, 3)
        before = charged(engine)
    with path.open("r+b") as file:
        file.seek(SUPERBLOCK_OFFSETS[0])
        geometry = Superblock.decode(file.read(PAGE_BYTES)).geometry
        file.seek(geometry.index_offset)
        file.write(b"\xff" * PAGE_BYTES * geometry.num_index_pages)
    with shared_engine(path) as engine:
        assert charged(engine) == before


def test_an_engine_without_tenants_uses_the_slab_and_keeps_its_owners(tmp_path: Path) -> None:
    path = tmp_path / "kv.slab"
    with shared_engine(path) as engine:
        serve(engine, ACME, 0, 4)
    with configured_engine(path, num_blocks=NUM_BLOCKS) as engine:
        assert engine.serve(prompt(ACME, 0)) == 4
    with shared_engine(path) as engine:
        assert charged(engine)["acme"] == FLOOR


def test_floors_that_do_not_fit_are_refused(tmp_path: Path) -> None:
    rules = {"acme": {"disk": {"floor": "400KiB"}}, "batch": {"disk": {"floor": "60%"}}}
    with pytest.raises(ConfigError, match=r"acme, batch of 8[78] blocks together in 0:disk"):
        shared_engine(tmp_path / "kv.slab", rules)


def test_retained_blocks_stay_on_disk_and_dropped_ones_leave(tmp_path: Path) -> None:
    with shared_engine(tmp_path / "kv.slab") as engine:
        engine.serve(prompt(BATCH, 900), tenant=BATCH, retain_s=3600.0)
        engine.serve(prompt(BATCH, 901), tenant=BATCH)
        engine.settle()
        serve(engine, BATCH, 0, 40)
        table = disk_of(engine)._table
        assert all(key in table.readable for key in prompt(BATCH, 900))
        assert not any(key in table.readable for key in prompt(BATCH, 901))
        engine.serve(prompt(BATCH, 900), tenant=BATCH, drop=True)
        engine.settle()
        serve(engine, BATCH, 100, 2)
        assert not any(key in table.readable for key in prompt(BATCH, 900))


@pytest.mark.parametrize("policy", ["lru", "arc"])
def test_a_flood_leaves_a_victim_the_hits_of_its_floor(policy: str, tmp_path: Path) -> None:
    """Host memory is too small for anything, so all hits are the disk's."""
    chats = [prompt(ACME, chat) for chat in range(4)]

    def hits(engine: Engine, num_rounds: int, flood: bool) -> int:
        num_hits = number = 0
        for turn in range(num_rounds * len(chats)):
            num_hits += engine.serve(chats[turn % len(chats)], tenant=ACME)
            for _ in range(10 if flood else 0):
                number += 1
                engine.serve(prompt(BATCH, number), tenant=BATCH)
            engine.settle()
        return num_hits

    def engine_at(name: str, num_blocks: int, tenants: dict[str, object]) -> Engine:
        return configured_engine(
            tmp_path / name,
            num_rows=6,
            num_blocks=num_blocks,
            tenants=tenants,
            eviction_policy=policy,
        )

    with engine_at("alone", FLOOR, {"acme": {}, "batch": {}}) as engine:
        alone = hits(engine, 5, flood=False)
    with engine_at("beside", 40, {"acme": {"disk": {"floor": "40%"}}, "batch": {}}) as engine:
        beside = hits(engine, 5, flood=True)
    with engine_at("without", 40, {"acme": {}, "batch": {}}) as engine:
        assert disk_of(engine).capacity_blocks == 40
        without = hits(engine, 1, flood=True)
    assert alone == 4 * 4 * 4, "the floor holds all chats"
    assert beside >= alone * 0.98
    assert without == 0


# --- the format ---------------------------------------------------------------------------------


def test_a_header_has_the_owner_beside_a_description() -> None:
    tag = tenant_tag("acme")
    page = bytearray(PAGE_BYTES)
    stamp = encode_stamp(bytes(16), 1, 2)
    for length in (0, 1, MOST_DESCRIPTION_BYTES - 11, MOST_DESCRIPTION_BYTES - 10):
        write_slot_header(page, bytes(SEAL_BYTES), stamp, b"d" * length, tag)
        assert read_owner(page) == tag
        assert read_description(page) == (b"d" * length or None)
    write_slot_header(page, bytes(SEAL_BYTES), stamp, b"d" * MOST_DESCRIPTION_BYTES, tag)
    assert read_owner(page) == tag
    assert read_description(page) is None, "what does not fit is left out"


def test_a_long_description_of_an_earlier_release_is_no_owner() -> None:
    page = bytearray(PAGE_BYTES)
    description = (b"OWNRxxxxxx" * (MOST_DESCRIPTION_BYTES // 10 + 1))[-MOST_DESCRIPTION_BYTES:]
    write_slot_header(page, bytes(SEAL_BYTES), encode_stamp(bytes(16), 1, 2), description)
    assert bytes(page[BODY_BYTES - 10 : BODY_BYTES - 6]) == b"OWNR"
    assert read_owner(page) == 0
    assert read_description(page) == description


def test_the_index_has_the_owner_behind_the_key() -> None:
    geometry = Geometry(PAGE_BYTES, 100)
    index = IndexTable(geometry, bytes(16))
    tag = tenant_tag("acme")
    short, longest, long = b"k" * 36, b"k" * MAX_INLINE_KEY, b"l" * 37
    index.put(1, 1, 7, short, tag)
    index.put(2, 2, 7, longest)
    index.put(3, 3, 7, long, tag)
    index.put(4, 4, 7, short)
    entries = index.entries()
    slots = np.array([1, 2, 3, 4])
    assert index.owners(entries, slots) == [tag, 0, tag, 0]
    assert index.keys(entries, slots) == [short, longest, long, short]
    assert entries["state"][3] == IN_HEADER
    index.clear(3)
    assert index.long_owners == {}


def test_tags_are_the_same_in_every_release() -> None:
    """They are in files."""
    assert tenant_tag("default") == 0
    assert tenant_tag("acme") == 75512376810888
    assert len({tenant_tag(f"tenant-{n}") for n in range(1000)}) == 1000


@pytest.mark.parametrize("write", ["on_evict", "adaptive"])
def test_blocks_that_are_written_when_they_leave_are_charged_to_their_tenant(
    write: str, tmp_path: Path
) -> None:
    path = tmp_path / "kv.slab"
    with configured_engine(
        path, num_rows=NUM_ROWS, num_blocks=NUM_BLOCKS, tenants=RULES, write=write
    ) as engine:
        for number in range(20):
            engine.serve(prompt(ACME, number), tenant=ACME)
            engine.serve(prompt(BATCH, number), tenant=BATCH)
            engine.settle()
        engine.serve(prompt(ACME, 0), tenant=ACME)
    with shared_engine(path) as engine:  # shutdown has written what was warm
        counts = charged(engine)
        assert counts["default"] == 0
        assert counts["batch"] > 0
        assert 0 < counts["acme"] <= CAP
