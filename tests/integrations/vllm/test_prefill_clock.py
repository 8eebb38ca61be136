"""The time that an engine takes for prompts, measured by its steps."""

from __future__ import annotations

import pytest

from tests.e2e.vllm.processes import VLLM
from tests.integrations.vllm import clock_probe

pytestmark = pytest.mark.vllm

BACK = None
"""Event: the output of a step comes back."""

DECODES = {f"decoding {number}": (500, 1) for number in range(100)}

STORIES: dict[str, tuple[clock_probe.Story, list[list[float]]]] = {
    "one step after the other": (
        [
            (1.0, {"a": (0, 128)}),
            (1.5, BACK),
            (2.0, {"a": (128, 128)}),
            (2.25, BACK),
        ],
        [[128, 64.0, 0.5], [128, 192.0, 0.25]],
    ),
    "the next is scheduled while one is computed": (
        [
            (1.0, {"a": (0, 128)}),
            (1.1, {"a": (128, 128)}),
            (2.0, BACK),
            (2.1, {"a": (256, 128)}),
            (3.5, BACK),
            (4.0, BACK),
        ],
        [[128, 64.0, 1.0], [128, 192.0, 1.5], [128, 320.0, 0.5]],
    ),
    "decodes alone": (
        [(1.0, DECODES), (2.0, BACK), (2.0, DECODES), (3.0, BACK)],
        [],
    ),
    "drafts of a few tokens each": (
        # Too few tokens per request to count as prefill.
        [(1.0, {"a": (500, 5), "b": (600, 4)} | DECODES), (2.0, BACK)],
        [],
    ),
    "a decode before a prompt, overlapping": (
        [
            (1.0, DECODES),
            (1.1, {"a": (0, 128)}),
            (3.0, BACK),
            (3.5, BACK),
        ],
        [[128, 64.0, 0.5]],
    ),
    "a late output of a decode": (
        # The prompt is being computed since 2.2 at the latest, and maybe since 2.0.
        [
            (1.0, DECODES),
            (1.2, BACK),
            (2.0, DECODES),
            (2.1, {"a": (0, 128)}),
            (2.6, BACK),
            (3.2, BACK),
        ],
        [[128, 64.0, 1.0]],
    ),
    "prompts among decodes": (
        # One is new, one continues after a cached prefix; decodes are not counted.
        [(1.0, {"a": (64, 64), "b": (1000, 192)} | DECODES), (1.5, BACK)],
        [[256, (64 * 96 + 192 * 1096) / 256, 0.5]],
    ),
    "an idle engine": (
        [
            (1.0, {"a": (0, 128)}),
            (1.5, BACK),
            (1000.0, {"b": (0, 128)}),
            (1000.5, BACK),
        ],
        [[128, 64.0, 0.5], [128, 64.0, 0.5]],
    ),
    "steps that compute nothing": (
        # vLLM takes them only to collect finished copies.
        [
            (1.0, {}),
            (1.5, BACK),
            (2.0, {"a": (0, 128)}),
            (2.5, BACK),
            (3.0, {}),
            (3.5, BACK),
        ],
        [[128, 64.0, 0.5]],
    ),
    "outputs of steps that nobody saw": (
        [(1.0, BACK), (1.5, {"a": (0, 128)}), (2.0, BACK), (3.0, BACK)],
        [[128, 64.0, 0.5]],
    ),
    "a step that never comes back": (
        [(1.0, {"a": (0, 128)})],
        [],
    ),
}


@pytest.mark.parametrize("what", STORIES)
def test_the_time_of_a_step_is_that_of_its_prompt_tokens(vllm: VLLM, what: str) -> None:
    _, expected = STORIES[what]
    heard = vllm.once(clock_probe.all_heard, [story for story, _ in STORIES.values()])
    assert heard[list(STORIES).index(what)] == [pytest.approx(note) for note in expected]
