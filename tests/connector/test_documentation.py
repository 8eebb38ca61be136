"""The code in docs/engines.md runs, and the engine in it works."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from kvtier.connector import ScheduledRequest, StepPlan
from tests.connector.driven_connector import Request


class PageRequest(Request):
    """A request with one hash per 16 tokens, as on the page."""

    @property
    def block_hashes(self) -> list[bytes]:
        return [bytes([i]) * 32 for i in range(self.num_tokens // 16)]


PAGE = Path(__file__).resolve().parents[2] / "docs" / "engines.md"


def listings() -> list[str]:
    """The page's own code: how to start, and the loop."""
    start, loop = re.findall(r"```python\n(.*?)```", PAGE.read_text(), re.DOTALL)
    return [start, loop]


def test_the_start_on_the_page_makes_a_connector_that_works() -> None:
    made: dict[str, Any] = {}
    exec(listings()[0], made)
    scheduler, worker, pages = made["scheduler"], made["worker"], made["pages"]
    request = PageRequest("a", list(range(33)), 33)
    try:
        scheduler.on_new_request(request)
        for page in pages:
            page[:2] = 7
        worker.start_kv_transfers(
            scheduler.build_connector_meta(StepPlan([ScheduledRequest("a", ([0, 1, 2],), 32)]))
        )
        while scheduler.has_pending_push_work():
            scheduler.update_connector_output([worker.get_finished()])
            scheduler.build_connector_meta(StepPlan())
        scheduler.request_finished("a")
        again = PageRequest("b", list(range(33)), 33)
        scheduler.on_new_request(again)
        match = scheduler.get_num_new_matched_tokens(again, 0)
        assert match.num_tokens == 32
        scheduler.update_state_after_alloc(again, ([10, 11, 12],), 0, 32)
        worker.start_kv_transfers(scheduler.build_connector_meta(StepPlan()))
        while not scheduler.update_connector_output([worker.get_finished()]):
            scheduler.build_connector_meta(StepPlan())
        assert all((page[10:12] == 7).all() for page in pages)
        assert list(scheduler.take_events())
    finally:
        worker.shutdown()
        scheduler.shutdown()


def test_the_loop_on_the_page_serves_a_prompt_from_what_it_has_stored(
    capsys: pytest.CaptureFixture[str],
) -> None:
    made: dict[str, Any] = {}
    for listing in listings():
        exec(listing, made)
    assert capsys.readouterr().out == "192 True\n"
    engine, second = made["engine"], made["second"]
    assert len(second.token_ids) == 204
    assert sorted(engine.free) == list(range(made["NUM_BLOCKS"]))


def test_the_loop_on_the_page_serves_many_requests_side_by_side() -> None:
    made: dict[str, Any] = {}
    start, loop = listings()
    exec(start, made)
    definitions, _, _ = loop.partition("\nengine = Engine()\n")
    exec(definitions, made)
    engine, request_cls = made["Engine"](), made["Request"]
    prompts = [[seed, *range(100 + 16 * (seed % 3))] for seed in range(6)]
    first, second = (
        [request_cls(f"{turn}-{place}", list(prompt)) for place, prompt in enumerate(prompts)]
        for turn in range(2)
    )
    try:
        for requests in (first, second):
            engine.serve(*requests)  # the device has blocks for some of them
    finally:
        made["worker"].shutdown()
        made["scheduler"].shutdown()
    for before, after, prompt in zip(first, second, prompts, strict=True):
        assert before.token_ids == after.token_ids
        assert after.num_loaded == len(prompt) // 16 * 16
