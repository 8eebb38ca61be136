"""What the journal says of simulated lives is true, and every reason occurs."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Iterator, Sequence
from typing import Any

import pytest

from kvtier.base import OffloadKey, ReqContext
from kvtier.observe.explanation import Explainer
from kvtier.observe.journal import Event, Journal, What
from tests.tiering.simulation.explained_life import ExplainedLife
from tests.tiering.simulation.violation import Violation

NUM_LIVES = 120

AT_LEAST = {
    "all_found": 100,
    "being_computed": 10,
    "cut_off": 50,
    "differs": 50,
    "evicted": 5,
    "evicted_by_tier": 5,
    "first_block_new": 50,
    "hint": 10,
    "late_load": 10,
    "late_lookup": 10,
    "lost": 10,
    "never_stored": 5,
    "never_stored_in_tier": 50,
    "no_room": 20,
    "not_used": 20,
    "refused": 20,
    "reset": 20,
    "stale": 20,
    "too_many": 5,
    "waited": 10,
}


@pytest.fixture(autouse=True)
def _no_logs() -> Iterator[None]:
    """The tiers misbehave in every way, so warnings are expected."""
    logging.disable()
    yield
    logging.disable(logging.NOTSET)


def test_everything_that_is_explained_is_true() -> None:
    reasons: Counter[str] = Counter()
    num_events = 0
    for seed in range(NUM_LIVES):
        life = ExplainedLife(seed)
        life.run()
        reasons += life.reasons
        num_events += life.num_events
    assert num_events > 50_000
    assert not {name: reasons[name] for name, least in AT_LEAST.items() if reasons[name] < least}
    assert not reasons["stored"], "no block has left without a record"
    # These engines look up every request, but now and then do not use what they have found.
    assert reasons["not_looked_up"] < reasons.total() / 25


def _without_evictions(
    journal: Journal,
    what: What,
    place: int,
    keys: Sequence[OffloadKey],
    context: ReqContext | None = None,
) -> None:
    if what is not What.EVICTED and keys:
        journal._note(what, place, keys, 0)


def _nothing_seen(explainer: Explainer, *args: Any) -> list[Event]:
    return []


@pytest.mark.parametrize(
    ("broken", "method", "replacement", "seen"),
    [
        (Journal, "note", _without_evictions, "the journal is wrong"),
        (Journal, "history", _nothing_seen, "came"),
        (Explainer, "_loaded_tokens", lambda *_: {"host": 1}, "do not add up"),
        (Journal, "reset_between", lambda *_: None, "the journal is wrong"),
    ],
)
def test_a_wrong_journal_is_seen(
    broken: type, method: str, replacement: Any, seen: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(broken, method, replacement)
    violations = []
    for seed in range(40):
        try:
            ExplainedLife(seed).run()
        except Violation as violation:
            violations.append(str(violation))
            if seen in str(violation):
                return
    pytest.fail(f"nobody saw {seen!r}: {violations[:3]}")
