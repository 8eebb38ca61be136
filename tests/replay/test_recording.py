"""A recording of the reference engine: it is replayed with the hits that the engine saw."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from kvtier.base import OffloadKey, make_offload_key
from kvtier.config import ConfigError
from kvtier.cpu.prompt_log import TraceRecorder, _Recorded
from kvtier.cpu.spec import CPUOffloadingSpec
from kvtier.engine.request import RequestResult
from kvtier.replay.engine import Counting
from kvtier.replay.settings import ReplaySettings, TierSettings
from kvtier.replay.trace import Request, TraceError, open_trace
from tests.config.sample import make_config
from tests.cpu.test_prompt_log import manager_of
from tests.engine.models import random_tokens
from tests.engine.test_offloading import CASES, offloading_engine

MODEL, ENGINE = CASES["full"]
BLOCK = 8
ABOUT = {"block_tokens": 16}


def lines_of(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def requests_of(path: Path) -> list[Request]:
    with open_trace(str(path)) as trace:
        return list(trace.requests())


def keys(*blocks: int) -> list[OffloadKey]:
    return [make_offload_key(block.to_bytes(32, "big"), 0) for block in blocks]


def chats() -> list[list[int]]:
    """Prompts of 8 chats that take turns and grow; no prompt ends with a block."""
    system = random_tokens(1, 20)
    prompts = [
        system + random_tokens(100 + chat, 120)[: 29 * turn]
        for turn in range(1, 5)
        for chat in range(8)
    ]
    return [prompt + [1] * (len(prompt) % BLOCK == 0) for prompt in prompts]


def serve(path: Path, host: str) -> tuple[list[RequestResult], float]:
    """Run the chats, and return the results and the slots of host memory."""
    options = {"cpu_bytes_to_use": host, "record_trace": str(path)}
    with offloading_engine(MODEL, ENGINE, options) as engine:
        results = [engine.generate([prompt], 3)[0] for prompt in chats()]
        stats = manager_of(engine).get_stats()
        assert stats is not None
    return results, stats.gauges["kvtier_cpu_slots"]


@pytest.mark.parametrize("host", ["192KiB", "400KiB", "4MiB"])
def test_a_replay_has_the_hits_that_the_engine_saw(tmp_path: Path, host: str) -> None:
    path = tmp_path / "trace.jsonl"
    results, num_slots = serve(path, host)
    header, *_ = lines_of(path)
    requests = requests_of(path)
    assert [request.prompt_tokens for request in requests] == list(map(len, chats()))
    assert [request.output_tokens for request in requests] == [3] * len(results)

    per_token = header["kv_bytes_per_token"]
    settings = ReplaySettings(
        host=TierSettings(
            name="host",
            num_bytes=int(num_slots) * per_token * BLOCK,
            read_bytes_per_s=1e9,
            write_bytes_per_s=1e9,
        ),
        kv_bytes_per_token=per_token,
        is_timed=False,
    )
    counting = Counting(settings, header["block_tokens"])
    for _ in counting.serve(requests):
        pass
    # The device's own cache is smaller than host memory, and has copies.
    seen = sum(result.num_device_tokens + result.num_loaded_tokens for result in results) // BLOCK
    replayed = counting.end().hit_blocks
    assert replayed == seen > 50


def test_only_equality_of_prompts_is_recorded(tmp_path: Path) -> None:
    paths = [tmp_path / "first.jsonl", tmp_path / "second.jsonl"]
    for path in paths:
        serve(path, "4MiB")
        assert path.stat().st_mode & 0o777 == 0o600
    first, second = [
        {block for line in lines_of(path)[1:] for block in line["hash_ids"]} for path in paths
    ]
    assert len(first) == len(second)
    assert not first & second, "the same blocks have other ids in another recording"
    assert max(first) < 2**53
    heads = {line["hash_ids"][0] for line in lines_of(paths[0])[1:]}
    assert len(heads) == 1, "all chats begin with the same block"


KILLED = """
import sys
from pathlib import Path
from kvtier.cpu.prompt_log import TraceRecorder, _Recorded
from kvtier.base import make_offload_key
recorder = TraceRecorder(Path(sys.argv[1]), 1 << 30, {"block_tokens": 16})
keys = [make_offload_key(bytes([n]) * 32, 0) for n in range(200)]
for n in range(50):
    recorder.note(_Recorded(recorder._begun_s + n, 3200, 5, keys))
print("noted", flush=True)
sys.stdin.read()
"""


def test_what_ended_a_second_before_kill_9_is_kept(tmp_path: Path) -> None:
    path = tmp_path / "trace.jsonl"
    engine = subprocess.Popen(
        [sys.executable, "-c", KILLED, str(path)], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    )
    assert engine.stdin is not None
    assert engine.stdout is not None
    with engine.stdin, engine.stdout:
        try:
            assert engine.stdout.readline() == b"noted\n"
            deadline = time.monotonic() + 30  # on a busy machine; a second is enough otherwise
            while path.read_bytes().count(b"\n") < 51 and time.monotonic() < deadline:
                time.sleep(0.05)
        finally:
            engine.send_signal(signal.SIGKILL)
            engine.wait()
    assert [request.arrives_s for request in requests_of(path)] == list(range(50))
    whole = path.read_bytes()
    for cut in (1, 10, 2000):
        path.write_bytes(whole[:-cut])
        assert len(requests_of(path)) == 49


def test_requests_are_read_in_order_of_arrival(tmp_path: Path) -> None:
    path = tmp_path / "trace.jsonl"
    recorder = TraceRecorder(path, 1 << 20, ABOUT)
    for seconds in (3, 1, 2):
        recorder.note(
            _Recorded(recorder._begun_s + seconds, 16 * seconds, 1, keys(*range(seconds)))
        )
    recorder.close()
    recorder.close()
    assert recorder.gauges == {
        "kvtier_cpu_recorded_requests": 3,
        "kvtier_cpu_unrecorded_requests": 0,
    }
    requests = requests_of(path)
    assert [request.arrives_s for request in requests] == [1, 2, 3]
    assert all(shorter.keys == longer.keys[:-1] for shorter, longer in pairwise(requests))


def test_the_file_never_grows_beyond_its_limit(tmp_path: Path) -> None:
    path = tmp_path / "trace.jsonl"
    recorder = TraceRecorder(path, 10_000, ABOUT)
    deadline = time.monotonic() + 30
    while not recorder._has_ended and time.monotonic() < deadline:
        recorder.note(_Recorded(recorder._begun_s, 1600, 1, keys(*range(100))))
        time.sleep(0.01)
    recorder.note(_Recorded(recorder._begun_s, 1600, 1, keys(*range(100))))
    recorder.close()
    assert path.stat().st_size <= 10_000
    assert recorder.gauges["kvtier_cpu_unrecorded_requests"] >= 1
    assert len(requests_of(path)) == recorder.gauges["kvtier_cpu_recorded_requests"] >= 3


@pytest.mark.parametrize(("num_blocks", "num_kept"), [(100, 2), (0, 250)])
def test_a_slow_writer_costs_requests_and_no_memory(
    num_blocks: int, num_kept: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("kvtier.cpu.prompt_log._WRITTEN_EVERY_S", 60.0)
    monkeypatch.setattr("kvtier.cpu.prompt_log._MAX_WAITING", 250)
    path = tmp_path / "trace.jsonl"
    recorder = TraceRecorder(path, 1 << 20, ABOUT)
    for _ in range(300):
        recorder.note(_Recorded(recorder._begun_s, 16 * num_blocks, 1, keys(*range(num_blocks))))
    recorder.close()
    assert len(requests_of(path)) == num_kept
    assert recorder.gauges["kvtier_cpu_unrecorded_requests"] == 300 - num_kept


def test_a_full_disk_ends_the_recording_and_nothing_else(
    caplog: pytest.LogCaptureFixture,
) -> None:
    recorder = TraceRecorder.__new__(TraceRecorder)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("os.open", lambda *_: real_open("/dev/full", os.O_WRONLY))
        patch.setattr("os.fchmod", lambda *_: None)
        recorder.__init__(Path("/dev/full"), 1 << 20, ABOUT)  # type: ignore[misc]
        recorder.close()
    recorder.note(_Recorded(recorder._begun_s, 16, 1, keys(1)))
    assert "No space left" in caplog.text
    assert recorder.gauges["kvtier_cpu_unrecorded_requests"] == 1


real_open = os.open


def manager_with(path: Path, **engine: Any) -> Any:
    extra = {"cpu_bytes_to_use": "1MiB", "record_trace": str(path)}
    return CPUOffloadingSpec(make_config(extra, **engine)).get_manager()


def test_a_file_that_exists_stays_and_the_engine_starts(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = tmp_path / "trace.jsonl"
    path.write_text("of an earlier engine")
    manager_with(path).shutdown()
    assert path.read_text() == "of an earlier engine"
    assert "Nothing is recorded" in caplog.text
    link = tmp_path / "link.jsonl"
    link.symlink_to(tmp_path / "elsewhere")
    manager_with(link).shutdown()
    assert not (tmp_path / "elsewhere").exists()


def test_a_place_where_no_file_can_be_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"record_trace: got .*No such file"):
        manager_with(tmp_path / "missing" / "trace.jsonl")


def test_replicas_have_files_of_their_own(tmp_path: Path) -> None:
    from kvtier.config import OffloadingParallelConfig

    parallel = OffloadingParallelConfig(data_parallel_size=2, data_parallel_index=1)
    manager_with(tmp_path / "trace.jsonl", parallel=parallel).shutdown()
    assert [path.name for path in tmp_path.iterdir()] == ["trace-dp1.jsonl"]


DAMAGED: Sequence[tuple[str, str]] = [
    ('{"kvtier_recording":1}\n', "line 1 is damaged"),
    ('{"kvtier_recording":1,"block_tokens":0}\n', "line 1 is damaged"),
    ('{"kvtier_recording":1,"block_tokens":16}\n', "has no requests"),
    ('{"kvtier_recording":1,"block_tokens":16}\nrubbish\n', "line 2 is damaged"),
    (
        '{"kvtier_recording":1,"block_tokens":16}\n{"timestamp":1,"input_length":-1}\n',
        "line 2: input_length is -1",
    ),
]


@pytest.mark.parametrize(("content", "complaint"), DAMAGED)
def test_a_damaged_recording_is_refused(tmp_path: Path, content: str, complaint: str) -> None:
    path = tmp_path / "trace.jsonl"
    path.write_text(content)
    with pytest.raises(TraceError, match=complaint):
        requests_of(path)


def test_the_tokens_of_a_block_are_in_the_file(tmp_path: Path) -> None:
    path = tmp_path / "trace.jsonl"
    TraceRecorder(path, 1 << 20, ABOUT).close()
    with open_trace(str(path), 16) as trace:
        assert trace.block_tokens == 16
    with (
        pytest.raises(TraceError, match="leave --block-tokens out"),
        open_trace(str(path), 512),
    ):
        pass
