"""The code in docs/engines.md runs, and what it makes works."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from kvtier.connector import ScheduledRequest, StepPlan
from tests.connector.rig import Request


class PageRequest(Request):
    """With hashes of as many tokens as the page has them."""

    @property
    def block_hashes(self) -> list[bytes]:
        return [bytes([i]) * 32 for i in range(self.num_tokens // 16)]


PAGE = Path(__file__).resolve().parents[2] / "docs" / "engines.md"


def test_the_start_on_the_page_makes_a_connector_that_works() -> None:
    (listing,) = re.findall(r"```python\n(.*?)```", PAGE.read_text(), re.DOTALL)
    made: dict[str, Any] = {}
    exec(listing, made)  # the page's own code
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
