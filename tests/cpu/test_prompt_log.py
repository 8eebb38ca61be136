"""What an engine reports of its prompts, and how other processes see its hit curve."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from kvtier.base import ReqContext, make_offload_key
from kvtier.connector import OffloadingConnectorScheduler
from kvtier.cpu.hit_curve import CurveBoard, read_boards
from kvtier.cpu.prompt_log import PromptLog, PromptWatching, num_prompt_blocks
from kvtier.cpu.spec import CPUOffloadingSpec
from kvtier.engine import Engine
from kvtier.tiering.spec import TieringOffloadingSpec
from tests.config.sample import make_config
from tests.engine.models import random_tokens
from tests.engine.test_offloading import CASES, offloading_engine

ENGINE = """
import sys
from kvtier.cpu.prompt_log import PromptLog
from tests.config.sample import make_config
log = PromptLog(make_config(engine_id="of another process"))
print("ready", flush=True)
sys.stdin.read()
"""


def boards_of(pid: int) -> list[str]:
    return [board["engine_id"] for board in read_boards() if board["pid"] == pid]


def test_another_process_sees_an_engine_until_it_is_killed() -> None:
    engine = subprocess.Popen(
        [sys.executable, "-c", ENGINE], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    )
    assert engine.stdin is not None
    assert engine.stdout is not None
    with engine.stdin, engine.stdout:
        try:
            assert engine.stdout.readline() == b"ready\n"
            assert boards_of(engine.pid) == ["of another process"]
        finally:
            engine.send_signal(signal.SIGKILL)
            engine.wait()
    assert boards_of(engine.pid) == []


def test_a_child_does_not_show_the_board_of_its_parent() -> None:
    board = CurveBoard()
    board.show({"engine_id": "parent"})
    reader, writer = os.pipe()
    child = os.fork()
    if not child:
        os.read(reader, 1)
        os._exit(0)
    try:
        assert "parent" in boards_of(os.getpid())
        assert boards_of(child) == []
    finally:
        os.write(writer, b"x")
        os.waitpid(child, 0)
        os.close(reader)
        os.close(writer)
        board.close()
    assert "parent" not in boards_of(os.getpid())


def is_board(path: Path) -> bool:
    try:
        return "kvtier-curve" in str(path.readlink())
    except FileNotFoundError:  # the descriptor that lists the directory
        return False


def own_boards() -> set[Path]:
    return set(filter(is_board, Path("/proc/self/fd").iterdir()))


def test_only_the_owner_may_read_and_other_files_are_not_boards(tmp_path: Path) -> None:
    others = own_boards()
    board = CurveBoard()
    board.show({"engine_id": "mine"})
    (link,) = own_boards() - others
    assert link.stat().st_mode & 0o777 == 0o600
    with (tmp_path / "memfd:kvtier-curve (deleted)").open("wb"):
        assert boards_of(os.getpid()).count("mine") == 1
    link.chmod(0o644)
    assert "mine" not in boards_of(os.getpid())
    board.close()


def test_an_unfinished_write_is_not_shown(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvtier.cpu.hit_curve._BETWEEN_TRIES_S", 0.0)
    before = boards_of(os.getpid())
    board = CurveBoard()
    assert boards_of(os.getpid()) == before
    board.show({"engine_id": "first"})
    board._memory[12:16] = b"????"
    assert boards_of(os.getpid()) == before
    board.show({"engine_id": "second"})
    board.show({"engine_id": "too long " * 10_000})
    assert sorted(boards_of(os.getpid())) == sorted([*before, "second"])
    board.close()


def manager_of(engine: Engine) -> PromptWatching:
    assert engine._connector is not None
    scheduler = engine._connector.scheduler
    assert isinstance(scheduler, OffloadingConnectorScheduler)
    assert isinstance(scheduler.manager, PromptWatching)
    return scheduler.manager


def log_of(engine: Engine) -> PromptLog:
    log = manager_of(engine).prompts
    assert log is not None
    return log


@pytest.mark.parametrize("case", CASES)
def test_the_reference_engine_reports_its_prompts(case: str) -> None:
    """Two requests of 100 tokens with the same prompt: 12 blocks of 8 tokens each."""
    model, engine_config = CASES[case]
    with offloading_engine(model, engine_config, {"cpu_bytes_to_use": "4MiB"}) as engine:
        prompt = random_tokens(0, 100)
        for _ in range(2):
            engine.generate([prompt], 10)
        (board,) = [
            board
            for board in read_boards()
            if board["pid"] == os.getpid() and board["model"] == "kvtier-reference"
        ]
        assert board["block_tokens"] == 8
        log = log_of(engine)
        assert log.curve.num_blocks == 24
    assert board["engine_id"] not in boards_of(os.getpid())


def test_requests_that_must_not_count() -> None:
    """A request with `skip`, and a prefetch."""
    model, engine_config = CASES["full"]
    with offloading_engine(model, engine_config, {"cpu_bytes_to_use": "4MiB"}) as engine:
        log = log_of(engine)
        for hint in ("skip", "prefetch"):
            engine.generate([random_tokens(1, 60)], 2, kv_transfer_params={hint: True})
        assert log.curve.num_blocks == 0


def test_groups_share_host_memory() -> None:
    """A block of 8 tokens, and two blocks of 4 tokens in the other group, for the same tokens."""
    model, engine_config = CASES["hybrid"]
    with offloading_engine(model, engine_config, {"cpu_bytes_to_use": "4MiB"}) as engine:
        log = log_of(engine)
        same = [size.num_blocks for size, _ in log.curve.points() if size.factor == 1]
        stats = manager_of(engine).get_stats()
        assert stats is not None
        assert same == [stats.gauges["kvtier_cpu_slots"] // 3]


def test_every_size_is_declared_as_a_metric() -> None:
    extra = {
        "cpu_bytes_to_use": "1MiB",
        "secondary_tiers": [
            {"type": "example", "max_blocks": 40},
            {"type": "example", "max_blocks": 100, "write": "on_evict"},
        ],
    }
    spec = TieringOffloadingSpec(make_config(extra, engine_id="curve of tiers"))
    manager = spec.get_manager()
    assert manager.prompts is not None
    sizes = {size.gauge: size.num_blocks for size, _ in manager.prompts.curve.points()}
    assert sizes == {
        "kvtier_cpu_estimated_hit_ratio_half": 8,
        "kvtier_cpu_estimated_hit_ratio": 16,
        "kvtier_cpu_estimated_hit_ratio_double": 32,
        "kvtier_cpu_estimated_hit_ratio_quadruple": 64,
        "kvtier_tier_0_example_estimated_hit_ratio": 40,
        "kvtier_tier_0_example_estimated_hit_ratio_double": 80,
        "kvtier_tier_1_example_estimated_hit_ratio": 140,
        "kvtier_tier_1_example_estimated_hit_ratio_double": 240,
    }
    assert sizes.keys() <= spec.build_metric_definitions(extra).keys()
    manager.shutdown()


def test_the_manager_reports_the_estimates() -> None:
    spec = CPUOffloadingSpec(make_config({"cpu_bytes_to_use": "1MiB"}))
    manager = spec.get_manager()
    keys = [make_offload_key(bytes([n]) * 32, 0) for n in range(8)]
    for n in range(300):
        manager.note_prompt(keys, ReqContext(str(n)), 8 * 16 + 3)
    assert manager.get_stats().gauges["kvtier_cpu_estimated_hit_ratio"] > 0.9
    manager.reset_cache()
    manager.shutdown()
    manager.shutdown()


def test_a_system_without_memfd_goes_without_a_board(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(_: str) -> int:
        raise OSError("not here")

    monkeypatch.setattr("os.memfd_create", refuse)
    log = PromptLog(make_config({"cpu_bytes_to_use": "1MiB"}))
    log.note([make_offload_key(b"x" * 32, 0)], ReqContext("r"), 16, 0)
    assert num_prompt_blocks(make_config({"cpu_bytes_to_use": "1MiB"}), 16) == 16
    log.close()
