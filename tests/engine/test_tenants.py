"""Blocks of a private tenant are found by that tenant alone: in host memory, in every tier, after a
restart, and on storage that engines with other rules share. Whole engines, from prompts to
tokens."""

from __future__ import annotations

import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from kvtier.base import OffloadKey, ReqContext, make_offload_key
from kvtier.engine import Engine, EngineConfig
from kvtier.engine.offloading import make_connector, offloading_config
from kvtier.hints import PrivateNamespace, proof_of
from kvtier.observe.kv_events import BlockRemoved, BlockStored
from tests.engine.models import FULL, random_tokens
from tests.engine.oracle import assert_same
from tests.tiering.valkey.server import valkey_server

SECRET, OTHER_SECRET = bytes(range(32)), bytes(range(1, 33))
ENGINE = EngineConfig(block_tokens=(8,), num_blocks=(24,), token_budget=40)
PROMPT = random_tokens(1, 100)
LOADED = 96
RULES = {"acme": {"share": "private"}, "beta": {"share": "private"}, "chat": {}}
PATIENT = {"load_timeout_ms": 60_000, "store_timeout_ms": 60_000, "lookup_timeout_ms": 60_000}


def credential(name: str, secret: bytes = SECRET) -> str:
    return f"{name}.{proof_of(name, secret)}"


def key_file(folder: Path, secret: bytes = SECRET) -> str:
    path = folder / f"{secret[0]}.keys"
    path.touch(mode=0o600)
    path.write_text(secret.hex())
    return str(path)


@contextmanager
def engine_of(keys: dict[str, Any]) -> Iterator[Engine]:
    extra = {"cpu_bytes_to_use": "4MiB", "prefill_tokens_per_s": 0} | keys
    described = offloading_config(FULL, ENGINE, extra, f"test-{uuid.uuid4().hex}")
    started = Engine(FULL, ENGINE, make_connector(described))
    try:
        yield started
    finally:
        started.shutdown()


def num_loaded(engine: Engine, **hints: Any) -> int:
    """Serve `PROMPT`, from an empty device cache. Checks every token."""
    engine.drop_device_cache()
    [answer] = engine.generate([PROMPT], 4, keep_logits=True, kv_transfer_params=hints or None)
    assert_same(answer, FULL, PROMPT)
    assert engine.drain()
    return answer.num_loaded_tokens


@pytest.fixture(params=["example", "disk", "fs", "obj", "valkey"])
def tier(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[dict[str, Any]]:
    kinds: dict[str, dict[str, Any]] = {
        "example": {},
        "disk": {"path": str(tmp_path / "kv.slab"), "max_bytes": "16MiB"},
        "fs": {"root_dir": str(tmp_path / "root"), "max_bytes": "16MiB"},
        "obj": {"url": f"file://{tmp_path / 'objects'}"},
    }
    if request.param == "valkey":
        with valkey_server(tmp_path) as server:
            yield {"type": "valkey", "url": server.url} | PATIENT
        return
    yield {"type": request.param} | kinds[request.param] | PATIENT


@pytest.mark.parametrize("owner_first", [True, False])
def test_in_host_memory_each_finds_its_own(owner_first: bool, tmp_path: Path) -> None:
    keys = {"tenants": RULES, "tenant_key_file": key_file(tmp_path)}
    everyone = [{"tenant": credential("acme")}, {"tenant": credential("beta")}, {}]
    everyone.append({"tenant": "chat"})
    everyone = everyone if owner_first else everyone[::-1]
    with engine_of(keys) as engine:
        found = [num_loaded(engine, **hints) for hints in everyone]
        again = [num_loaded(engine, **hints) for hints in everyone]
    # "chat" and requests without a tenant share; of these two, the second one finds the first's.
    assert sorted(found) == [0, 0, 0, LOADED]
    assert again == [LOADED] * 4


def test_no_tier_gives_a_private_block_to_another_tenant(
    tier: dict[str, Any], tmp_path: Path
) -> None:
    """Host memory has room for one prompt alone: what is found comes from the tier."""
    row_bytes = offloading_config(FULL, ENGINE, {"cpu_bytes_to_use": "4MiB"}, "e").row_bytes
    keys = {
        "cpu_bytes_to_use": 14 * row_bytes,
        "secondary_tiers": [tier],
        "tenants": RULES,
        "tenant_key_file": key_file(tmp_path),
    }
    with engine_of(keys) as engine:
        assert num_loaded(engine, tenant=credential("acme")) == 0
        [_] = engine.generate([random_tokens(2, 104)], 4)  # takes acme's place in host memory
        assert engine.drain()
        assert num_loaded(engine, tenant=credential("beta")) == 0
        assert num_loaded(engine) == 0
        assert num_loaded(engine, tenant="acme") == 0  # guessed
        assert num_loaded(engine, tenant=credential("acme", OTHER_SECRET)) == 0
        assert num_loaded(engine, tenant=credential("acme")) == LOADED


@pytest.mark.parametrize("kind", ["disk", "fs"])
def test_after_a_restart_the_same_secret_finds_the_blocks_and_no_other_does(
    kind: str, tmp_path: Path
) -> None:
    where = (
        {"path": str(tmp_path / "kv.slab")}
        if kind == "disk"
        else {"root_dir": str(tmp_path / "root")}
    )
    below = {"secondary_tiers": [{"type": kind, "max_bytes": "16MiB"} | where | PATIENT]}
    ours = below | {"tenants": RULES, "tenant_key_file": key_file(tmp_path)}
    theirs = below | {"tenants": RULES, "tenant_key_file": key_file(tmp_path, OTHER_SECRET)}
    with engine_of(ours) as engine:
        assert num_loaded(engine, tenant=credential("acme")) == 0
    with engine_of(theirs) as engine:
        assert num_loaded(engine, tenant=credential("acme", OTHER_SECRET)) == 0
    with engine_of(below) as engine:  # without any rules
        assert num_loaded(engine) == 0
        assert num_loaded(engine, tenant=credential("acme")) == LOADED  # its own, of a moment ago
    with engine_of(ours) as engine:
        assert num_loaded(engine, tenant=credential("acme")) == LOADED
        assert num_loaded(engine, tenant=credential("beta")) == 0


def test_engines_with_other_rules_share_fs_and_not_what_is_private(tmp_path: Path) -> None:
    """Three engines at once: one where acme is private, one where it is not, one without rules."""
    fs = {"type": "fs", "root_dir": str(tmp_path / "root"), "max_bytes": "16MiB"} | PATIENT
    below = {"secondary_tiers": [fs]}
    secret = {"tenant_key_file": key_file(tmp_path)}
    with (
        engine_of(below | {"tenants": RULES} | secret) as private,
        engine_of(below | {"tenants": {"acme": {}}} | secret) as shared,
        engine_of(below) as plain,
    ):
        assert num_loaded(private, tenant=credential("acme")) == 0
        assert num_loaded(shared, tenant=credential("acme")) == 0
        assert num_loaded(plain, tenant=credential("acme")) == LOADED  # shared's, without rules
        assert num_loaded(private, tenant=credential("beta")) == 0
        assert num_loaded(private) == LOADED  # what the other two share
        # Where the operator has not made it private, the tenant itself may ask for it.
        asked = {"tenant": credential("acme"), "share": "private"}
        assert num_loaded(shared, **asked) == LOADED


def _work_for_beta(keys: dict[str, Any], acme_was_here: bool) -> tuple[int, dict[str, float]]:
    """The steps that the engine takes for a request of beta, and what the manager counts for it."""
    with engine_of(keys) as engine:
        if acme_was_here:
            num_loaded(engine, tenant=credential("acme"))
        scheduler: Any = engine._connector.scheduler  # type: ignore[union-attr]
        scheduler.get_stats()
        engine.drop_device_cache()
        engine.add_request(PROMPT, 4, kv_transfer_params={"tenant": credential("beta")})
        num_steps = 0
        while engine.has_requests:
            engine.step()
            num_steps += 1
        assert engine.drain()
        stats = scheduler.get_stats()
    return num_steps, {
        name: value for name, value in stats.counters.items() if "seconds" not in name
    }


def test_a_private_prompt_changes_nothing_for_another_who_sends_it(tmp_path: Path) -> None:
    """The engine takes the same steps, and the manager does the same work, whether or not the
    private tenant has sent the prompt before."""
    keys = {
        "secondary_tiers": [{"type": "example"}],
        "tenants": RULES,
        "tenant_key_file": key_file(tmp_path),
    }
    steps, counted = _work_for_beta(keys, acme_was_here=True)
    assert (steps, counted) == _work_for_beta(keys, acme_was_here=False)
    assert counted["kvtier_cpu_stored_blocks"] == 100 // 8


def test_who_claims_a_private_tenant_without_proof_uses_no_cache(tmp_path: Path) -> None:
    keys = {"tenants": RULES, "tenant_key_file": key_file(tmp_path)}
    with engine_of(keys) as engine:
        for _ in range(2):
            assert num_loaded(engine, tenant="acme") == 0
        assert num_loaded(engine) == 0  # nothing of it was stored where others look


def test_a_forged_key_finds_nothing_and_a_true_one_does(tmp_path: Path) -> None:
    """Whoever can ask the manager itself, below the connector, still has to make the key."""
    keys = {"tenants": RULES, "tenant_key_file": key_file(tmp_path)}
    with engine_of(keys) as engine:
        num_loaded(engine, tenant=credential("acme"))
        manager = engine._connector.scheduler.manager  # type: ignore[union-attr]
        context = ReqContext("forger")
        manager.on_new_request(context)
        plain = _key_of_first_block(engine)

        def hits(key: OffloadKey) -> int:
            return int(manager.lookup_prefix([key], context).num_hits)

        assert hits(plain) == 0
        assert hits(PrivateNamespace(SECRET, "beta").key_of(plain)) == 0
        assert hits(PrivateNamespace(OTHER_SECRET, "acme").key_of(plain)) == 0
        assert hits(PrivateNamespace(SECRET, "acme").key_of(plain)) == 1


def _key_of_first_block(engine: Engine) -> OffloadKey:
    from kvtier.engine.request import extend_chain

    chain: list[bytes] = []
    extend_chain(chain, PROMPT, engine.config.tokens_per_hash)
    return make_offload_key(chain[0], 0)


def test_events_of_private_blocks_have_no_tokens_and_no_hash_of_the_engine(tmp_path: Path) -> None:
    keys = {"tenants": RULES, "tenant_key_file": key_file(tmp_path)}
    disk = {"type": "disk", "path": str(tmp_path / "kv.slab"), "max_bytes": "16MiB"} | PATIENT
    config = offloading_config(
        FULL,
        ENGINE,
        {"cpu_bytes_to_use": "4MiB", "secondary_tiers": [disk | {"enable_kv_events": True}]} | keys,
        f"test-{uuid.uuid4().hex}",
        enable_kv_cache_events=True,
    )
    engine = Engine(FULL, ENGINE, make_connector(config))
    try:
        assert num_loaded(engine, tenant=credential("acme")) == 0
        scheduler = engine._connector.scheduler  # type: ignore[union-attr]
        private = list(scheduler.take_events())
        assert num_loaded(engine) == 0
        shared = list(scheduler.take_events())
    finally:
        engine.shutdown()
    hashes = [_hashes(events) for events in (private, shared)]
    assert len(hashes[0]) == len(hashes[1]) > 0
    assert hashes[0].isdisjoint(hashes[1])
    for event in private:
        assert isinstance(event, BlockStored | BlockRemoved)
        if isinstance(event, BlockStored):
            assert event.token_ids == []
            assert event.parent_block_hash is None
    assert any(isinstance(event, BlockStored) and event.token_ids for event in shared)


def _hashes(events: list[Any]) -> set[bytes]:
    return {block for event in events for block in event.block_hashes}
