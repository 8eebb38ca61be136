"""`PrefillClock` with a simulated clock."""

from __future__ import annotations

from typing import Any

Scheduled = dict[str, tuple[int, int]]
"""A step: for each request, the position of its first token and the number of tokens."""


Story = list[tuple[float, Scheduled | None]]
"""Times and events: a step is scheduled, or (None) the output of the oldest step comes back. A
request is new to vLLM in its first step."""

Notes = list[tuple[int, float, float]]
"""Tokens, mean position and seconds."""


def all_heard(stories: list[Story]) -> list[Notes]:
    """The notes of each story."""
    return [_heard(story) for story in stories]


def _heard(story: Story) -> Notes:
    from kvtier.integrations.vllm.connector import PrefillClock

    notes: Notes = []
    now = 0.0
    clock = PrefillClock(lambda *note: notes.append(note), lambda: now)
    known: set[str] = set()
    for when, scheduled in story:
        now = when
        if scheduled is None:
            clock.step_ended()
        else:
            clock.step_scheduled(_output(scheduled, known))
            known |= scheduled.keys()
    return notes


def _output(scheduled: Scheduled, known: set[str]) -> Any:
    """The same step as an output of vLLM's scheduler."""
    from vllm.v1.core.sched.output import NewRequestData, SchedulerOutput

    output = SchedulerOutput.make_empty()
    output.num_scheduled_tokens = {name: count for name, (_, count) in scheduled.items()}
    output.total_num_scheduled_tokens = sum(output.num_scheduled_tokens.values())
    for name, (start, _) in scheduled.items():
        if name in known:
            output.scheduled_cached_reqs.req_ids.append(name)
            output.scheduled_cached_reqs.num_computed_tokens.append(start)
            continue
        output.scheduled_new_reqs.append(
            NewRequestData(
                req_id=name,
                prompt_token_ids=None,
                mm_features=[],
                sampling_params=None,
                pooling_params=None,
                block_ids=([],),
                num_computed_tokens=start,
                lora_request=None,
            )
        )
    return output
