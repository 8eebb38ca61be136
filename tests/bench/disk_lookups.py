"""How long a tier on disk takes to say which blocks are there, and how much of that the scheduler's
thread is kept from other work."""

from __future__ import annotations

import time
from typing import Any

from tests.bench.disk_subjects import DiskSubject, LookUp
from tests.bench.disk_traffic import STEP_S, Keys

SETTLED_S = 0.05
"""After so long, a tier that was just made has nothing to do."""


def look_up(subject: DiskSubject, keys: Keys, how: LookUp) -> dict[str, dict[str, float]]:
    """Two requests for the same blocks, one after the other has ended. `subject` is new: it has
    heard of no block yet."""
    time.sleep(SETTLED_S)
    return {name: _ask(subject, keys, name, how) for name in ("first", "again")}


def _ask(subject: DiskSubject, keys: Keys, name: str, how: LookUp) -> dict[str, float]:
    context = subject.make_context(name)
    answers: dict[Any, str] = {}
    on_thread, num_steps = 0.0, 0
    begin = time.perf_counter()
    subject.tier.on_new_request(context)
    while True:
        started = time.perf_counter()
        if how.is_prompt:
            found = subject.look_up(keys, context)
            answers = dict(zip(keys, (answer.name for answer in found), strict=False))
        else:
            for key in keys:
                if answers.get(key, "RETRY") == "RETRY":
                    answers[key] = subject.tier.lookup(key, context).name
        is_known = "RETRY" not in answers.values()
        known_at = time.perf_counter()
        subject.tier.on_schedule_end(subject.schedule_end)
        if is_known:
            subject.tier.on_request_finished(context)
        on_thread += time.perf_counter() - started
        num_steps += 1
        if is_known:
            break
        time.sleep(STEP_S)
    expected = "HIT" if how.is_present else "MISS"
    assert set(answers.values()) == {expected}, f"not {expected}: {set(answers.values())}"
    return {"answered_s": known_at - begin, "on_thread_s": on_thread, "steps": num_steps}
