"""Two ranks, each in a process of its own with half of every block: one fails, or is killed."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest

from kvtier.testing.vllm.in_process import BLOCK_TOKENS, Answer
from kvtier.testing.vllm.tiny_model import LLAMA, random_prompts
from tests.e2e.vllm.lasting_tiers import disk_in, with_common_hashes
from tests.e2e.vllm.process_tree import descendants, regions_below, regions_of, vllms_own_removed
from tests.e2e.vllm.processes import VLLM, ScenarioFailedError
from tests.e2e.vllm.reference import ROUNDING
from tests.e2e.vllm.remote_engine import RemoteEngine
from tests.e2e.vllm.scenarios.failing_rank import WITH_FAILING_RANK, Copies

pytestmark = pytest.mark.vllm

BLOCKS, TOKENS = 16, 16 * BLOCK_TOKENS
NOT_STORED, NOT_LOADED, NOT_ANSWERED = random_prompts(3, TOKENS, "two ranks, one of them faulty")


@dataclass(frozen=True, slots=True)
class Two:
    """An engine of two ranks, with host memory and a disk below."""

    engine: RemoteEngine
    folder: Path

    @contextmanager
    def failing(self, copies: Copies) -> Iterator[None]:
        """Make copies of this kind fail on the second rank only."""
        (self.folder / copies).touch()
        yield
        (self.folder / copies).unlink()


@pytest.fixture(scope="module")
def two(vllm: VLLM, llama: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Two]:
    folder = tmp_path_factory.mktemp("two")
    options = WITH_FAILING_RANK | {
        "cpu_bytes_to_use": 4 * BLOCKS * LLAMA.bytes_per_block(BLOCK_TOKENS),
        "prefill_tokens_per_s": 0,
        "secondary_tiers": [disk_in(folder)],
        "engine_config": {"faults": str(folder)},
    }
    with RemoteEngine(
        with_common_hashes(vllm).but(environment={"VLLM_CPU_OMP_THREADS_BIND": "nobind"}),
        llama,
        options,
        tensor_parallel_size=2,
        device_blocks=64,
        max_model_len=1024,
    ) as engine:
        yield Two(engine, folder)


def assert_all_computed(answers: list[Answer]) -> None:
    """Equal to the last bit."""
    for answer in answers:
        assert answer.tokens == answers[0].tokens
        assert answer.logprobs == answers[0].logprobs


def assert_loaded(answer: Answer, computed: Answer) -> None:
    assert answer.cached_tokens == TOKENS
    assert answer.tokens == computed.tokens
    assert answer.logprobs == pytest.approx(computed.logprobs, abs=ROUNDING)


def test_what_one_rank_has_not_stored_is_never_served(two: Two) -> None:
    before = two.engine.figures()
    with two.failing("stores"):
        answers = two.engine.generate(NOT_STORED)
    failed = two.engine.figures()
    two.engine.reset_device_cache()
    answers += two.engine.generate(NOT_STORED)
    two.engine.reset_device_cache()
    [loaded] = two.engine.generate(NOT_STORED)
    assert failed["cpu_failed_stores"] == BLOCKS
    resident = 'disk_resident_blocks{tier="0:disk"}'
    assert failed[resident] == before.get(resident, 0)
    assert [answer.cached_tokens for answer in answers] == [0, 0]
    assert_all_computed(answers)
    assert_loaded(loaded, answers[0])


def test_what_one_rank_cannot_load_is_computed_again(two: Two) -> None:
    answers = two.engine.generate(NOT_LOADED)
    two.engine.reset_device_cache()
    with two.failing("loads"):
        answers += two.engine.generate(NOT_LOADED)
    assert two.engine.figures()["failed_loads"] == 1
    two.engine.reset_device_cache()
    [loaded] = two.engine.generate(NOT_LOADED)
    assert_all_computed(answers)
    assert_loaded(loaded, answers[0])


def test_an_engine_ends_when_a_rank_is_killed_and_leaves_nothing(two: Two) -> None:
    pid = two.engine.process.pid
    regions = regions_below(pid)
    assert len(regions) == 1
    *_, rank = filter(regions_of, descendants(pid))
    with vllms_own_removed(pid):
        os.kill(rank, signal.SIGKILL)
        with pytest.raises(ScenarioFailedError, match="Traceback"):
            two.engine.generate(NOT_ANSWERED)
        two.engine.process.end()
    assert not any(region.exists() for region in regions)
