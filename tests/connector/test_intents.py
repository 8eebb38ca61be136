"""What an agent's framework says about a session without running it: keep it, drop it, bring it
up."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

from kvtier.base import OffloadKey, ReqContext
from kvtier.config import AttentionKind, OffloadingGroupConfig
from kvtier.cpu.manager import CPUOffloadingManager
from kvtier.hints import RequestHints, hints_of
from tests.connector.driven_connector import DrivenConnector


class NotingManager(CPUOffloadingManager):
    """Notes the uses that end with a request, as its eviction policy sees them."""

    def __init__(self) -> None:
        super().__init__(64)
        self.ended: dict[str, tuple[list[OffloadKey], RequestHints]] = {}
        policy = self.slots.policy
        end = policy.on_request_finished

        def on_request_finished(keys: Collection[OffloadKey], req_context: ReqContext) -> None:
            self.ended[req_context.req_id] = list(keys), hints_of(req_context)
            end(keys, req_context)

        policy.on_request_finished = on_request_finished  # type: ignore[method-assign]


def keys_of(manager: NotingManager, name: str) -> list[OffloadKey]:
    return manager.ended[name][0]


def send(connector: DrivenConnector, name: str, num_tokens: int, **hints: Any) -> None:
    """A request that only says something: it is announced, and ends."""
    connector.request(name, num_tokens, **hints)
    connector.connector.request_finished(name)


def test_an_announced_request_that_never_runs_says_what_to_keep_and_what_to_drop() -> None:
    manager = NotingManager()
    connector = DrivenConnector(manager=manager)
    connector.serve(connector.request("turn", 16))
    send(connector, "keep", 16, retain_s=40)
    send(connector, "end", 16, drop=True)
    for name in ("keep", "end"):
        assert keys_of(manager, name) == keys_of(manager, "turn")
        assert len(keys_of(manager, name)) == 4
    assert manager.ended["keep"][1].retain_s == 40
    assert manager.ended["end"][1].drop


def test_without_such_a_hint_a_request_that_never_runs_uses_nothing() -> None:
    manager = NotingManager()
    connector = DrivenConnector(manager=manager)
    connector.serve(connector.request("turn", 16))
    send(connector, "plain", 16)
    send(connector, "important", 16, priority=9)
    send(connector, "skipped", 16, drop=True, skip=True)
    for name in ("plain", "important", "skipped"):
        assert keys_of(manager, name) == []


def test_the_blocks_of_all_groups_come_in_the_order_of_the_prompt() -> None:
    groups = (
        OffloadingGroupConfig(4, ("a",)),
        OffloadingGroupConfig(
            8, ("b",), group_id=1, kind=AttentionKind.SLIDING_WINDOW, window_tokens=9
        ),
    )
    manager = NotingManager()
    connector = DrivenConnector(groups, manager=manager)
    send(connector, "keep", 16, retain_s=40)
    assert [key[-1] for key in keys_of(manager, "keep")] == [0, 0, 1, 0, 0, 1]


def test_what_nobody_will_ask_for_again_is_not_stored() -> None:
    connector = DrivenConnector(manager=(manager := NotingManager()))
    connector.serve(connector.request("first turn", 8))
    connector.serve(connector.request("last turn", 16, drop=True))
    stats = manager.get_stats()
    assert stats.counters["kvtier_cpu_stored_blocks"] == 2
    again = connector.request("again", 16)
    assert connector.connector.get_num_new_matched_tokens(again, 0).num_tokens == 8
