"""Stock vLLM with a disk tier: a restarted process is warm, and answers the same."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import pytest

from kvtier.testing.vllm.in_process import Answer, PlugIn
from kvtier.testing.vllm.tiny_model import random_prompts
from tests.e2e.vllm.lasting_tiers import disk_in, over, with_common_hashes
from tests.e2e.vllm.processes import VLLM
from tests.e2e.vllm.remote_engine import RemoteEngine
from tests.e2e.vllm.subject import Subject

pytestmark = pytest.mark.vllm

PROMPT_BLOCKS, PROMPT_TOKENS = 16, 512
PROMPTS = random_prompts(3, PROMPT_TOKENS, "two lives")
BLOCKS, TOKENS = 3 * PROMPT_BLOCKS, 3 * PROMPT_TOKENS


@dataclass(frozen=True, slots=True)
class Life:
    """Answers and metrics of a process that runs every prompt once."""

    answers: list[Answer]
    figures: dict[str, float]

    @property
    def cached_tokens(self) -> int:
        return sum(answer.cached_tokens for answer in self.answers)


def live(
    vllm: VLLM,
    subject: Subject,
    folder: Path,
    plug_in: PlugIn,
    eviction: str = "lru",
    write: str = "through",
) -> Life:
    """Run the prompts with host memory for one and a half of them, and a disk tier for all."""
    options = over(disk_in(folder) | {"write": write}, subject, slots=PROMPT_BLOCKS * 3 // 2)
    options["eviction_policy"] = eviction
    options["cache_namespace"] = "random weights, seed 0"
    with RemoteEngine(
        with_common_hashes(vllm),
        subject.path,
        options,
        plug_in=plug_in,
        device_blocks=256,
        max_model_len=1024,
    ) as engine:
        return Life(engine.generate(*PROMPTS), engine.figures())


@pytest.mark.parametrize("plug_in", ["connector", "spec"])
@pytest.mark.parametrize("subject", ["llama"], indirect=True)
def test_a_second_process_has_all_from_the_disk_that_the_first_has_stored(
    vllm: VLLM, subject: Subject, tmp_path: Path, plug_in: PlugIn
) -> None:
    first = live(vllm, subject, tmp_path, plug_in)
    second = live(vllm, subject, tmp_path, plug_in)

    assert first.cached_tokens == 0
    assert first.figures.get('tier_blocks{tier="0:disk",direction="load"}', 0) == 0
    assert first.figures['tier_blocks{tier="0:disk",direction="store"}'] == BLOCKS
    assert first.figures['disk_resident_blocks{tier="0:disk"}'] == BLOCKS

    assert second.cached_tokens == TOKENS
    assert second.figures['tier_blocks{tier="0:disk",direction="load"}'] == BLOCKS
    assert second.figures["cpu_promoted_blocks"] == BLOCKS
    assert second.figures.get('tier_blocks{tier="0:disk",direction="store"}', 0) == 0
    assert second.figures['disk_resident_blocks{tier="0:disk"}'] == BLOCKS
    assert second.figures.get('disk_forgotten_blocks{tier="0:disk"}', 0) == 0

    subject.alone.check(PROMPTS, first.answers)
    subject.alone.check(PROMPTS, second.answers)
    assert [path.name for path in tmp_path.iterdir()] == ["kv.slab"]


@pytest.mark.parametrize("subject", ["llama"], indirect=True)
@pytest.mark.parametrize(("eviction", "write"), [("density", "adaptive"), ("lru", "on_evict")])
def test_no_policy_changes_an_answer(
    vllm: VLLM, subject: Subject, tmp_path: Path, eviction: str, write: str
) -> None:
    for is_restarted in (False, True):
        life = live(vllm, subject, tmp_path, "connector", eviction, write)
        subject.alone.check(PROMPTS, life.answers)
        assert (life.cached_tokens > 0) == is_restarted
