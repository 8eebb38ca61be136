"""A model with several KV-cache groups: a prefix counts only as far as every group has it."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from kvtier.testing.vllm.in_process import Answer
from kvtier.testing.vllm.tiny_model import GEMMA3_HYBRID, random_prompts
from tests.e2e.vllm.lasting_tiers import fs_in, over, with_common_hashes
from tests.e2e.vllm.processes import VLLM
from tests.e2e.vllm.reference import Reference
from tests.e2e.vllm.remote_engine import RemoteEngine
from tests.e2e.vllm.subject import Subject

pytestmark = pytest.mark.vllm

TOKENS = 256
[PROMPT] = random_prompts(1, TOKENS, "half a hit")
HEAD = PROMPT[: TOKENS // 2 + 8]
ENGINE: dict[str, Any] = {"device_blocks": 128, "max_model_len": 512}
GROUPS = range(3)


@dataclass(frozen=True, slots=True)
class Stored:
    """The directory that an engine has left: a file for each block of each group."""

    subject: Subject
    folder: Path
    of_head: frozenset[str]
    """Names of the files for the first half of the prompt."""

    def files_of(self, folder: Path, group: int) -> list[Path]:
        """The group of a file: its name is the key, which ends with the group's number."""
        blocks = folder / "root" / "blocks"
        ends = f"{group:08x}"
        return [path for path in blocks.rglob("*") if path.is_file() and path.stem.endswith(ends)]


def live(vllm: VLLM, subject: Subject, folder: Path, *prompts: list[int]) -> list[Answer]:
    options = over(fs_in(folder), subject)
    with RemoteEngine(with_common_hashes(vllm), subject.path, options, **ENGINE) as engine:
        return engine.generate(*prompts)


@pytest.fixture(scope="module")
def stored(
    vllm: VLLM, hybrid: Path, hybrid_alone: Reference, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Stored]:
    folder = tmp_path_factory.mktemp("stored")
    subject = Subject(GEMMA3_HYBRID, hybrid, hybrid_alone)
    live(vllm, subject, folder, HEAD)
    of_head = frozenset(path.name for path in folder.rglob("*"))
    live(vllm, subject, folder, PROMPT)
    yield Stored(subject, folder, of_head)
    shutil.rmtree(folder)


def served_after_loss(vllm: VLLM, stored: Stored, folder: Path, lost: list[str]) -> Answer:
    """Cached tokens of a new engine on a copy of the directory without these files."""
    shutil.copytree(stored.folder / "root", folder / "root")
    for path in list((folder / "root" / "blocks").rglob("*")):
        if path.name in lost:
            path.unlink()
    [answer] = live(vllm, stored.subject, folder, PROMPT)
    stored.subject.alone.check([PROMPT], [answer], exact=answer.cached_tokens in (0, TOKENS))
    return answer


def test_all_groups_together_are_a_hit(vllm: VLLM, stored: Stored, tmp_path: Path) -> None:
    assert all(stored.files_of(stored.folder, group) for group in GROUPS)
    assert served_after_loss(vllm, stored, tmp_path, []).cached_tokens == TOKENS


@pytest.mark.parametrize("group", GROUPS)
def test_a_group_that_is_lost_leaves_no_hit(
    vllm: VLLM, stored: Stored, tmp_path: Path, group: int
) -> None:
    lost = [path.name for path in stored.files_of(stored.folder, group)]
    assert served_after_loss(vllm, stored, tmp_path, lost).cached_tokens == 0


@pytest.mark.parametrize("group", GROUPS)
def test_a_group_that_has_half_of_a_prompt_leaves_half_a_prompt(
    vllm: VLLM, stored: Stored, tmp_path: Path, group: int
) -> None:
    """Not more than that, although the other groups have all blocks."""
    names = [path.name for path in stored.files_of(stored.folder, group)]
    lost = [name for name in names if name not in stored.of_head]
    assert 0 < len(lost) < len(names)
    assert served_after_loss(vllm, stored, tmp_path, lost).cached_tokens == TOKENS // 2
