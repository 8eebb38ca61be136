"""Stock vLLM with an fs tier: engines find each other's blocks, and say so where they cannot."""

from __future__ import annotations

import json
import os
import select
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from kvtier.integrations.vllm.tiny_model import LLAMA

pytestmark = pytest.mark.vllm

REPO = Path(__file__).resolve().parents[3]
PATIENCE_S = 300.0
PROMPT_BLOCKS, PROMPT_TOKENS = 16, 512


class Process:
    """A process with vLLM that does what it is told, one thing at a time; see `sharing_engine`."""

    def __init__(self, python: Path, folder: Path, log: Path) -> None:
        environment = os.environ | {"PYTHONPATH": str(REPO / "src"), "TMPDIR": str(folder)}
        environment.pop("PYTHONHASHSEED", None)
        self._log = log
        with log.open("w") as file:
            self._process = subprocess.Popen(
                [python, "-m", "tests.integrations.vllm.sharing_engine", folder],
                cwd=REPO,
                env=environment,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=file,
                text=True,
            )

    def tell(self, call: str, **arguments: Any) -> None:
        """Have it begin something."""
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps({call: arguments}) + "\n")
        self._process.stdin.flush()

    def answer(self) -> Any:
        """What came of it."""
        assert self._process.stdout is not None
        ready, _, _ = select.select([self._process.stdout], [], [], PATIENCE_S)
        line = self._process.stdout.readline() if ready else ""
        assert line, self._log.read_text()[-4000:]
        return json.loads(line)

    def ask(self, call: str, **arguments: Any) -> Any:
        self.tell(call, **arguments)
        return self.answer()

    def end(self) -> None:
        """Let it end; by force, if it does not."""
        try:
            self._process.communicate(timeout=PATIENCE_S)
        except (subprocess.TimeoutExpired, BrokenPipeError):
            self.kill()

    def kill(self) -> None:
        self._process.kill()
        self._process.communicate()


@contextmanager
def two_processes(python: Path, folder: Path) -> Iterator[list[Process]]:
    """At once: loading vLLM takes longer than all that follows."""
    processes: list[Process] = []
    try:
        names = ("first", "second")
        processes.extend(Process(python, folder, folder / f"{name}.log") for name in names)
        yield processes
    except BaseException:
        for process in processes:
            process.kill()
        raise
    for process in processes:
        process.end()


@dataclass
class Story:
    """What became of all engines, by the name of each."""

    plain: dict[str, Any] = field(default_factory=dict)
    answers: dict[str, list[dict[str, Any]]] = field(default_factory=dict)
    ends: dict[str, dict[str, Any]] = field(default_factory=dict)
    root_bytes: int = 0
    """As `du` says, after all of them."""
    left_behind: list[str] = field(default_factory=list)

    def cached(self, *engines: str) -> list[int]:
        """The tokens that were not computed, prompt by prompt."""
        return [answer["cached_tokens"] for engine in engines for answer in self.answers[engine]]

    def figure(self, engine: str, name: str) -> float:
        value: float = self.ends[engine]["figures"].get(name, 0)
        return value

    def told(self, engine: str) -> tuple[str, str]:
        """Level and text of the only thing that the plug-in has said."""
        ((level, text),) = self.ends[engine]["told"]
        return level, text


def run_pair(story: Story, first: Process, second: Process, name: str, **how: str) -> None:
    """Two engines at the same time; what one has stored, the other is asked for."""
    first.tell("start", **how)
    second.tell("start", **how)
    first.answer()
    second.answer()
    for number, process in enumerate((first, second), 1):
        story.answers[f"{name} {number}"] = process.ask("generate", prompts=[0])
    first.tell("stop")
    second.tell("stop")
    story.ends |= {f"{name} 1": first.answer(), f"{name} 2": second.answer()}


@pytest.fixture(scope="module")
def story(vllm_python: Path, tmp_path_factory: pytest.TempPathFactory) -> Story:
    folder = tmp_path_factory.mktemp("vllm-sharing")
    LLAMA.write(folder / "model")
    story = Story()
    with two_processes(vllm_python, folder) as (first, second):
        second.tell("plain")
        first.ask("start")
        story.answers["first"] = first.ask("generate", prompts=[0, 1, 2])
        story.plain = second.answer()
        second.ask("start")
        story.answers["second"] = second.ask("generate", prompts=[0, 1, 2, 3])
        story.answers["first, once more"] = first.ask("generate", prompts=[3])
        story.ends["first"] = first.ask("stop")
        story.ends["second"] = second.ask("stop")

        run_pair(story, first, second, "xxhash", prefix_caching_hash_algo="xxhash")
        run_pair(story, first, second, "seeded", prefix_caching_hash_algo="xxhash", hash_seed="7")

        first.end()
        second.ask("start")
        story.answers["later"] = second.ask("generate", prompts=[0, 1, 2, 3])
        story.ends["later"] = second.ask("stop")
        second.ask("start", hash_seed="8")
        story.answers["other seed"] = second.ask("generate", prompts=[0])
        story.ends["other seed"] = second.ask("stop")
    root = folder / "root"
    story.root_bytes = sum(path.lstat().st_blocks * 512 for path in [root, *root.rglob("*")])
    story.left_behind = [path.name for path in (root / "engines").iterdir()]
    return story


def test_an_engine_finds_what_another_has_stored_while_both_run(story: Story) -> None:
    assert story.cached("first") == [0, 0, 0]
    assert story.figure("first", "tier_0_fs_stored_blocks") == 3 * PROMPT_BLOCKS
    assert story.cached("second") == [PROMPT_TOKENS] * 3 + [0]
    assert story.figure("second", "tier_0_fs_loaded_blocks") == 3 * PROMPT_BLOCKS


def test_only_what_is_new_is_stored(story: Story) -> None:
    assert story.figure("second", "tier_0_fs_stored_blocks") == PROMPT_BLOCKS
    assert story.figure("second", "fs_blocks") == 4 * PROMPT_BLOCKS


def test_the_first_engine_finds_what_the_second_has_stored_meanwhile(story: Story) -> None:
    assert story.cached("first, once more") == [PROMPT_TOKENS]
    assert story.figure("first", "tier_0_fs_loaded_blocks") == PROMPT_BLOCKS


def test_an_engine_finds_what_a_process_has_stored_that_has_ended(story: Story) -> None:
    assert story.cached("later") == [PROMPT_TOKENS] * 4
    assert story.figure("later", "tier_0_fs_loaded_blocks") == 4 * PROMPT_BLOCKS
    assert story.figure("later", "tier_0_fs_stored_blocks") == 0
    assert story.figure("later", "fs_forgotten_blocks") == 0


def test_tokens_and_logprobs_are_those_of_vllm_alone(story: Story) -> None:
    numbers = {"first": [0, 1, 2], "second": [0, 1, 2, 3], "first, once more": [3]}
    numbers |= {"later": [0, 1, 2, 3]}
    compared = 0
    for engine, prompts in numbers.items():
        for number, answer in zip(prompts, story.answers[engine], strict=True):
            cold, device = story.plain["cold"][number], story.plain["device"][number]
            assert answer["tokens"] == cold["tokens"]
            # To the last bit, where as many tokens were computed.
            reference = device if answer["cached_tokens"] else cold
            assert answer["cached_tokens"] == reference["cached_tokens"]
            assert answer["logprobs"] == reference["logprobs"]
            compared += 1
    assert compared == 12


def test_the_root_is_tidy_and_within_its_limit_when_all_have_ended(story: Story) -> None:
    assert story.left_behind == []
    assert 0 < story.root_bytes <= 64 << 20


def test_random_hashes_are_not_found_and_the_operator_is_told_why(story: Story) -> None:
    assert story.cached("xxhash 1", "xxhash 2") == [0, 0]
    for engine in ("xxhash 1", "xxhash 2"):
        level, text = story.told(engine)
        assert level == "WARNING"
        assert text.startswith("no other process will find the blocks that this one stores in fs")
        assert "--prefix-caching-hash-algo sha256_cbor" in text
        assert "PYTHONHASHSEED=0" in text


def test_with_a_common_seed_they_are_found_and_nobody_is_warned(story: Story) -> None:
    assert story.cached("seeded 1", "seeded 2") == [0, PROMPT_TOKENS]
    told = {story.told(engine) for engine in ("seeded 1", "seeded 2")}
    ((level, text),) = told
    assert level == "INFO"
    assert "(xxhash, the seed in PYTHONHASHSEED)" in text


def test_engines_with_different_seeds_tell_different_beginnings(story: Story) -> None:
    assert story.cached("other seed") == [0]
    level, text = story.told("other seed")
    assert level == "INFO"
    assert "(sha256, the seed in PYTHONHASHSEED)" in text
    own_seed = {story.told(engine) for engine in ("first", "second", "later")}
    ((level, common),) = own_seed
    assert level == "INFO"
    assert "(sha256, vLLM's own seed)" in common
    assert text.split("(")[0] != common.split("(")[0]
