"""The harness for processes with vLLM works, and a scenario that fails ends its test."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest

from kvtier.testing.vllm.in_process import Answer
from kvtier.testing.vllm.tiny_model import random_prompts
from tests.e2e.vllm.processes import VLLM, ScenarioFailedError
from tests.e2e.vllm.remote_engine import RemoteEngine
from tests.e2e.vllm.scenarios import misbehaving
from tests.tiering.patience import wait_until

pytestmark = pytest.mark.vllm


def is_running(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


def test_every_scenario_has_a_process_group_output_and_environment_of_its_own(vllm: VLLM) -> None:
    with vllm.but(environment={"PYTHONHASHSEED": "7"}).start(misbehaving.where_it_runs) as first:
        found = first.answer()
        assert found["pid"] == found["group"] == first.pid
        assert found["threads"] == 1
        assert found["vllm_is_there"]
        assert found["seed"] == "7"
        assert "to standard output" in first.stdout
        assert "to standard error" in first.stderr
    other = vllm.run(misbehaving.where_it_runs)
    assert other["pid"] != first.pid
    assert other["seed"] is None
    assert other["tmpdir"] != found["tmpdir"]
    assert not Path(found["tmpdir"]).exists()


def test_an_error_is_raised_in_the_test_and_the_process_ends(vllm: VLLM) -> None:
    with pytest.raises(ScenarioFailedError, match=r"ValueError: a text of its own"):
        vllm.run(misbehaving.raise_an_error, "a text of its own")


def test_a_process_that_dies_is_noticed(vllm: VLLM) -> None:
    with pytest.raises(ScenarioFailedError, match=r"ended too soon.*exit_code=3"):
        vllm.run(misbehaving.exit_with, 3)


def test_a_scenario_that_hangs_is_killed_with_its_children_and_shows_where(
    vllm: VLLM, tmp_path: Path
) -> None:
    file = tmp_path / "child"
    with vllm.start(misbehaving.hang, str(file)) as process:
        wait_until(lambda: file.exists() and file.read_text() != "", "it hangs")
        process.patience = 1.0
        with pytest.raises(ScenarioFailedError, match="has not answered within 1 s") as failed:
            process.answer()
    assert "wait_in_vain" in str(failed.value)
    assert not is_running(int(file.read_text()))


def test_a_process_that_does_not_end_is_killed(vllm: VLLM) -> None:
    with vllm.start(misbehaving.leave_a_thread) as process:
        process.answer()
        process.patience = 1.0
        with pytest.raises(ScenarioFailedError, match="has not ended within 1 s"):
            process.end()


def test_a_process_that_leaves_another_behind_is_noticed(vllm: VLLM) -> None:
    process = vllm.but(orphans_patience=0.5).start(misbehaving.leave_a_process)
    left = process.answer()
    with pytest.raises(ScenarioFailedError, match="sleep 600"):
        process.end()
    assert not is_running(left)


def test_a_process_can_be_killed_at_any_time(vllm: VLLM, tmp_path: Path) -> None:
    with vllm.start(misbehaving.hang, str(tmp_path / "child")) as process:
        os.kill(process.pid, signal.SIGKILL)
        assert process.wait().exit_code == -signal.SIGKILL
        process.kill()


def test_a_fork_answers_as_a_new_interpreter_does(vllm: VLLM, llama: Path) -> None:
    prompts = random_prompts(2, 256, "fork or not")
    answers: list[list[Answer]] = []
    for fresh in (False, True):
        engine = RemoteEngine(
            vllm.but(fresh=fresh),
            llama,
            {"cpu_bytes_to_use": "16MiB"},
            device_blocks=64,
            max_model_len=512,
        )
        with engine:
            cold = engine.generate(*prompts)
            engine.reset_device_cache()
            answers.append(cold + engine.generate(*prompts))
            assert engine.figures()["cpu_loaded_blocks"] == 2 * 256 // 32
    forked, new = answers
    assert [answer.cached_tokens for answer in forked] == [0, 0, 256, 256]
    for one, other in zip(forked, new, strict=True):
        assert one.tokens == other.tokens
        assert one.logprobs == other.logprobs
        assert one.cached_tokens == other.cached_tokens
