"""Notes of learnt costs are read as they were written, or not at all."""

from __future__ import annotations

import json
import socket
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvtier.tiering.cost import (
    MOST_NOTE_BYTES,
    CostLine,
    Learnt,
    PrefillRate,
    TransferEstimate,
    read_note,
    write_note,
)

OURS = bytes(range(16))
NOTHING = Learnt(None, None)
FIGURE = st.floats(0, 1e12)


@given(
    loads=st.none() | st.tuples(FIGURE, FIGURE, FIGURE, FIGURE, FIGURE),
    prefill=st.none() | st.builds(CostLine, FIGURE, FIGURE, FIGURE),
)
def test_a_note_says_what_was_learnt(
    loads: tuple[float, ...] | None, prefill: CostLine | None
) -> None:
    note = write_note(Learnt(loads, prefill), OURS)
    assert len(note) <= MOST_NOTE_BYTES
    assert read_note(note, OURS) == Learnt(loads, prefill)


def test_a_note_of_another_engine_or_host_says_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    note = write_note(Learnt((1.0,) * 5, CostLine(1.0, 0.0, 0.0)), OURS)
    assert read_note(note, bytes(16)) == NOTHING
    monkeypatch.setattr(socket, "gethostname", lambda: "elsewhere")
    assert read_note(note, OURS) == NOTHING


@given(note=st.none() | st.binary() | st.text() | st.integers())
def test_what_is_no_note_says_nothing(note: object) -> None:
    assert read_note(note, OURS) == NOTHING


JSON = st.recursive(
    st.none() | st.booleans() | st.floats() | st.integers() | st.text(),
    lambda inner: st.lists(inner, max_size=6) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=8,
)


@given(field=st.sampled_from(["format", "fingerprint", "host", "loads", "prefill"]), value=JSON)
def test_a_damaged_note_does_no_harm(field: str, value: Any) -> None:
    fields = json.loads(write_note(Learnt((1.0,) * 5, CostLine(1e-4, 0.0, 0.0)), OURS))
    learnt = read_note(json.dumps(fields | {field: value}).encode(), OURS)
    estimate, rate = TransferEstimate(), PrefillRate(None)
    if learnt.loads is not None:
        estimate.recall(learnt.loads)
        assert (estimate.predict(100) or 0.0) >= 0
    if learnt.prefill is not None:
        rate.recall(learnt.prefill)
        assert not rate.is_known or rate.seconds_for(100, 50) > 0


@pytest.mark.parametrize("field", ["loads", "prefill"])
def test_a_figure_that_no_float_can_hold_does_no_harm(field: str) -> None:
    fields = json.loads(write_note(Learnt((1.0,) * 5, CostLine(1e-4, 0.0, 0.0)), OURS))
    fields[field][0] = 10**400
    assert read_note(json.dumps(fields).encode(), OURS) == NOTHING


def test_what_is_recalled_gives_way_to_what_is_measured() -> None:
    before, after = TransferEstimate(), TransferEstimate()
    for n in range(1, 100):
        before.note(n, 0.01 + 0.001 * n)
    assert before.sums is not None
    after.recall(before.sums)
    assert after.predict(50) == pytest.approx(0.06)
    for _ in range(3):
        after.note(50, 1.0)
    assert (after.predict(50) or 0.0) == pytest.approx(1.0)

    rate = PrefillRate(None)
    rate.recall(CostLine(1e-4, 0.0, 0.0))
    assert rate.seconds_for(1000, 500) == pytest.approx(0.1)
    for _ in range(8):
        rate.note_prefill(1000, 500, 0.02)
    assert rate.seconds_for(1000, 500) == pytest.approx(0.02)


@pytest.mark.parametrize("configured", [0, 5000.0])
def test_what_is_configured_is_not_recalled(configured: float) -> None:
    rate = PrefillRate(configured)
    rate.recall(CostLine(1.0, 0.0, 0.0))
    assert rate.tokens_per_s == (configured or None)
