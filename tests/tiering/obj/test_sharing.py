"""Engines in processes of their own that share an object store or a directory."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import obstore
import pytest
from obstore.store import ObjectStore, from_url

from tests.tiering.obj.engine import engines
from tests.tiering.obj.server import SeaweedProcess, blocks_in
from tests.tiering.patience import wait_until
from tests.tiering.reference import BLOCKS_PER_PROMPT

NUM_PROMPTS = 6
NUM_BLOCKS = NUM_PROMPTS * BLOCKS_PER_PROMPT
NUM_TOKENS = 16 * NUM_BLOCKS


@pytest.fixture(params=["s3", "directory"])
def tier(request: pytest.FixtureRequest, server: SeaweedProcess, tmp_path: Path) -> dict[str, Any]:
    deadlines = {"lookup_timeout_ms": 20_000, "load_timeout_ms": 20_000}
    if request.param == "s3":
        return {**server.keys, **deadlines}
    return {"url": f"file://{tmp_path}/objects", **deadlines}


def store_of(tier: dict[str, Any], server: SeaweedProcess) -> ObjectStore:
    return server.store() if "endpoint" in tier else from_url(tier["url"])


def names(tier: dict[str, Any], server: SeaweedProcess, part: str) -> list[str]:
    """The objects whose names have this in them, without descriptions of namespaces."""
    items = (item for page in obstore.list(store_of(tier, server)) for item in page)
    found = (item["path"] for item in items if "/made-of/" not in item["path"])
    return [path for path in found if part in path]


def test_what_engines_store_at_once_is_written_once_and_found_by_others(
    tier: dict[str, Any], server: SeaweedProcess
) -> None:
    with engines(8 if "endpoint" in tier else 3, tier) as writers:
        for writer in writers:
            writer.begin(NUM_PROMPTS)
        num_stored = sum(writer.result().num_stored for writer in writers)

        def all_are_stored() -> bool:
            """An engine that got no processor for a while may have left out some."""
            nonlocal num_stored
            if num_stored < NUM_BLOCKS:
                for writer in writers:
                    writer.reset()
                    num_stored += writer.serve(NUM_PROMPTS).num_stored
            return num_stored >= NUM_BLOCKS

        wait_until(all_are_stored, "all blocks are stored", 60)
        assert num_stored == NUM_BLOCKS
        assert len(blocks_in(store_of(tier, server))) == NUM_BLOCKS
        assert len(names(tier, server, "")) == NUM_PROMPTS  # these blocks share objects
    with engines(1, tier) as (reader,), engines(1, tier, namespace="other weights") as (other,):
        answer = reader.serve(NUM_PROMPTS)
        assert (answer.num_loaded, answer.num_stored) == (NUM_TOKENS, 0)
        answer = other.serve(NUM_PROMPTS)
        assert (answer.num_loaded, answer.num_stored) == (0, NUM_BLOCKS)


def test_a_reset_makes_an_engines_later_blocks_its_own(
    tier: dict[str, Any], server: SeaweedProcess
) -> None:
    with engines(1, tier, reset_scope="all") as (engine,), engines(1, tier) as (other,):
        engine.serve(1)
        engine.reset()
        answer = engine.serve(2)
        assert (answer.num_loaded, answer.num_stored) == (0, 2 * BLOCKS_PER_PROMPT)
        answer = other.serve(2)
        assert (answer.num_loaded, answer.num_stored) == (16 * BLOCKS_PER_PROMPT, BLOCKS_PER_PROMPT)
        assert names(tier, server, "/private/")
        engine.end()
        assert not names(tier, server, "/private/")
