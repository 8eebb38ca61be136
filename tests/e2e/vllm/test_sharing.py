"""Stock vLLM with an fs tier: engines find each other's blocks, or log why they cannot."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from kvtier.testing.vllm.in_process import Answer
from kvtier.testing.vllm.tiny_model import LLAMA, random_prompts
from tests.e2e.vllm.lasting_tiers import fs_in, over, with_common_hashes
from tests.e2e.vllm.processes import VLLM
from tests.e2e.vllm.reference import Reference
from tests.e2e.vllm.remote_engine import RemoteEngine
from tests.e2e.vllm.subject import Subject

pytestmark = pytest.mark.vllm

PROMPT_BLOCKS, PROMPT_TOKENS = 16, 512
PROMPTS = random_prompts(4, PROMPT_TOKENS, "shared by engines")


@dataclass
class Story:
    """The results of all engines, by name."""

    answers: dict[str, list[Answer]] = field(default_factory=dict)
    prompts: dict[str, list[int]] = field(default_factory=dict)
    figures: dict[str, dict[str, float]] = field(default_factory=dict)
    said: dict[str, list[str]] = field(default_factory=dict)
    root_bytes: int = 0
    """Bytes of the directory after all engines, as `du` counts them."""
    left_behind: list[str] = field(default_factory=list)

    def ask(self, name: str, engine: RemoteEngine, *numbers: int) -> None:
        """Run some of the prompts in an engine."""
        self.prompts[name] = list(numbers)
        self.answers[name] = engine.generate(*(PROMPTS[number] for number in numbers))

    def end(self, name: str, engine: RemoteEngine) -> None:
        self.figures[name] = engine.figures()
        self.said[name] = [text for _, text in engine.told() if "log the same root" in text]
        engine.close()

    def cached(self, name: str) -> list[int]:
        """The cached tokens of each prompt."""
        return [answer.cached_tokens for answer in self.answers[name]]

    def figure(self, name: str, figure: str) -> float:
        return self.figures[name].get(figure, 0)


@pytest.fixture(scope="module")
def story(
    vllm: VLLM, llama: Path, llama_alone: Reference, tmp_path_factory: pytest.TempPathFactory
) -> Story:
    folder = tmp_path_factory.mktemp("vllm-sharing")
    # Host memory for a prompt and a half, and an fs tier for all of them and more.
    options = over(fs_in(folder), Subject(LLAMA, llama, llama_alone), slots=PROMPT_BLOCKS * 3 // 2)
    story = Story()

    def engine(vllm: VLLM, **engine_args: Any) -> RemoteEngine:
        return RemoteEngine(
            vllm, llama, options, device_blocks=256, max_model_len=1024, **engine_args
        )

    common = with_common_hashes(vllm)
    with engine(common) as first, engine(common) as second:
        story.ask("first", first, 0, 1, 2)
        story.ask("second", second, 0, 1, 2, 3)
        story.ask("first, once more", first, 3)
        story.end("first", first)
        story.end("second", second)

    seeded = vllm.but(environment={"PYTHONHASHSEED": "7"})
    with (
        engine(seeded, prefix_caching_hash_algo="xxhash") as first,
        engine(seeded, prefix_caching_hash_algo="xxhash") as second,
    ):
        story.ask("xxhash 1", first, 0)
        story.ask("xxhash 2", second, 0)
        story.end("xxhash 1", first)
        story.end("xxhash 2", second)

    with engine(common) as later:
        story.ask("later", later, 0, 1, 2, 3)
        story.end("later", later)
    with engine(vllm.but(environment={"PYTHONHASHSEED": "8"})) as other:
        story.ask("other seed", other, 0)
        story.end("other seed", other)

    root = folder / "root"
    story.root_bytes = sum(path.lstat().st_blocks * 512 for path in [root, *root.rglob("*")])
    story.left_behind = [path.name for path in (root / "engines").iterdir()]
    return story


def test_an_engine_finds_what_another_has_stored_while_both_run(story: Story) -> None:
    assert story.cached("first") == [0, 0, 0]
    assert story.figure("first", 'tier_blocks{tier="0:fs",direction="store"}') == 3 * PROMPT_BLOCKS
    assert story.cached("second") == [PROMPT_TOKENS] * 3 + [0]
    assert story.figure("second", 'tier_blocks{tier="0:fs",direction="load"}') == 3 * PROMPT_BLOCKS


def test_only_what_is_new_is_stored(story: Story) -> None:
    assert story.figure("second", 'tier_blocks{tier="0:fs",direction="store"}') == PROMPT_BLOCKS
    assert story.figure("second", 'fs_blocks{tier="0:fs"}') == 4 * PROMPT_BLOCKS


def test_the_first_engine_finds_what_the_second_has_stored_meanwhile(story: Story) -> None:
    assert story.cached("first, once more") == [PROMPT_TOKENS]
    assert story.figure("first", 'tier_blocks{tier="0:fs",direction="load"}') == PROMPT_BLOCKS


def test_an_engine_finds_what_a_process_has_stored_that_has_ended(story: Story) -> None:
    assert story.cached("later") == [PROMPT_TOKENS] * 4
    assert story.figure("later", 'tier_blocks{tier="0:fs",direction="load"}') == 4 * PROMPT_BLOCKS
    assert story.figure("later", 'tier_blocks{tier="0:fs",direction="store"}') == 0
    assert story.figure("later", 'fs_forgotten_blocks{tier="0:fs"}') == 0


def test_tokens_and_logprobs_are_those_of_vllm_alone(story: Story, llama_alone: Reference) -> None:
    compared = 0
    for name, answers in story.answers.items():
        llama_alone.check([PROMPTS[number] for number in story.prompts[name]], answers)
        compared += len(answers)
    assert compared == 15


def test_the_root_is_tidy_and_within_its_limit_when_all_have_ended(story: Story) -> None:
    assert story.left_behind == []
    assert 0 < story.root_bytes <= 32 << 20


def test_with_a_common_seed_weak_hashes_are_found_too(story: Story) -> None:
    assert story.cached("xxhash 1") == [0]
    assert story.cached("xxhash 2") == [PROMPT_TOKENS]
    ((said,), (also_said,)) = story.said["xxhash 1"], story.said["xxhash 2"]
    assert said == also_said
    assert "(xxhash, the seed in PYTHONHASHSEED)" in said


def test_engines_with_different_seeds_tell_different_beginnings(vllm: VLLM, story: Story) -> None:
    assert story.cached("other seed") == [0]
    (other,) = story.said["other seed"]
    assert "(sha256, the seed in PYTHONHASHSEED)" in other
    common = {said for name in ("first", "second", "later") for said in story.said[name]}
    (said,) = common
    own_seed = vllm.version >= (0, 32)
    assert f"(sha256, {'vLLM' if own_seed else 'the seed in PYTHONHASHSEED'}" in said
    assert said.split("(")[0] != other.split("(")[0]
