"""`kvtier plan`: what it prints, and what it refuses."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from kvtier.cli import main
from tests import traces
from tests.replay.test_plan import LLAMA_3_8B, written
from tests.test_architecture import REPO
from tests.traces import TRACES

CHATS = str(traces.CHATS)
PAGE = REPO / "docs" / "replay.md"
SIZE = ["--kv-bytes-per-token", "128KiB"]


def plan(capsys: pytest.CaptureFixture[str], *arguments: str) -> dict[str, Any]:
    assert main(["plan", *arguments, "--json"]) == 0
    printed = capsys.readouterr()
    assert printed.err == ""
    document: dict[str, Any] = json.loads(printed.out)
    return document


def test_a_model_and_its_bytes_give_the_same_plan(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    options = ["--host", "64GiB", "--tier", "disk:2TiB,read_speed=6GB"]
    document = plan(capsys, written(tmp_path, LLAMA_3_8B), *options)
    assert document == plan(capsys, *SIZE, *options)
    assert document["kv_bytes_per_token"] == 131_072
    host, disk = document["tiers"]
    assert (host["num_tokens"], host["num_conversations"]) == (524_288, 64)
    assert disk["break_even_tokens_per_s"] == pytest.approx(6e9 / 131_072, rel=0.01)
    assert document["sweep"] == []


def test_with_a_prefill_speed_it_compares(capsys: pytest.CaptureFixture[str]) -> None:
    options = ["--tier", "quick:2TiB,read_speed=6GB", "--tier", "slow:2TiB,read_speed=1GB"]
    assert main(["plan", *SIZE, *options, "--prefill", "26000"]) == 0
    quick, slow = capsys.readouterr().out.splitlines()[-2:]
    assert quick.endswith("1.8x faster")
    assert slow.endswith("3.4x slower")


def test_windows_are_pointed_out(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = written(tmp_path, LLAMA_3_8B | {"sliding_window": 4096})
    assert main(["plan", path]) == 0
    assert "long prompts need less" in capsys.readouterr().out
    assert plan(capsys, path)["is_upper_bound"] is True


def test_a_sweep_has_the_hits_of_replays(capsys: pytest.CaptureFixture[str]) -> None:
    document = plan(capsys, *SIZE, "--host", "1GiB", "--trace", CHATS, "--tier", "disk:4GiB")
    sizes = [point["host_bytes"] for point in document["sweep"]]
    assert sizes == [(1 << 27) << n for n in range(7)]
    for point in document["sweep"][::3]:
        options = ["--no-timing", "--host", str(point["host_bytes"]), "--tier", "disk:4GiB"]
        assert main(["replay", CHATS, *options, "--json"]) == 0
        replayed = json.loads(capsys.readouterr().out)
        assert point["tiers"] == replayed["tiers"]
    sweep = plan(capsys, *SIZE, "--host", "1GiB", "--trace", CHATS)["sweep"]
    hits = [point["hit_percent"] for point in sweep]
    assert hits == sorted(hits)
    assert main(["plan", *SIZE, "--host", "1GiB", "--trace", CHATS]) == 0
    assert len(capsys.readouterr().out.splitlines()) > 12


WRONG: dict[str, tuple[list[str], str]] = {
    "nothing": ([], "or else --kv-bytes-per-token"),
    "both": (["config.json", *SIZE], "or else --kv-bytes-per-token"),
    "no such model": (["gone.json"], "there is no gone.json: give the path of a model's"),
    "a directory": ([str(TRACES)], "is a directory"),
    "a trace as a model": ([CHATS], "give a model's config.json"),
    "an unknown type": ([*SIZE, "--kv-dtype", "int3"], "give one of float32"),
    "no conversation": ([*SIZE, "--conversation", "0"], "above 0"),
    "no prefill": ([*SIZE, "--prefill", "0"], "above 0"),
    "no requests": ([*SIZE, "--limit", "0"], "above 0"),
    "no such trace": ([*SIZE, "--trace", "gone.jsonl"], "there is no gone.jsonl"),
    "host memory too small": ([*SIZE, "--trace", CHATS, "--host", "1MiB"], "one block of 512"),
    "host memory too large": (
        ["--kv-bytes-per-token", "1", "--trace", CHATS, "--host", "100TiB"],
        "give at most",
    ),
    "an unknown policy": ([*SIZE, "--trace", CHATS, "--policy", "random"], "random"),
    "a wrong tier": ([*SIZE, "--tier", "disk"], "NAME:SIZE"),
    "a wrong speed": ([*SIZE, "--host-speed", "fast"], "8GiB"),
}


@pytest.mark.parametrize("case", WRONG)
def test_wrong_input_is_refused_with_a_remedy(
    case: str, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments, remedy = WRONG[case]
    assert main(["plan", *arguments]) == 2
    printed = capsys.readouterr()
    assert printed.out == ""
    assert remedy in " ".join(printed.err.split())


def test_the_page_explains_every_option_and_key(capsys: pytest.CaptureFixture[str]) -> None:
    page = PAGE.read_text().partition("## kvtier plan")[2]
    assert main(["plan", "--help"]) == 0
    words = set(re.findall(r"--[a-z][\w-]*", capsys.readouterr().out)) - {"--help"}
    assert [word for word in sorted(words) if f"`{word}" not in page] == []
    document = plan(capsys, *SIZE, "--trace", CHATS)
    keys = {*document, *document["tiers"][0], "host_bytes"}
    assert [key for key in sorted(keys) if f"`{key}`" not in page] == []


ENGINE = """
import sys
from kvtier.base import ReqContext, make_offload_key
from kvtier.cpu.prompt_log import PromptLog
from tests.config.sample import make_config
log = PromptLog(make_config({"cpu_bytes_to_use": "1MiB"}, engine_id="planned\\x1b[2J"))
log.curve._random = __import__("random").Random(1).random
chats = [[make_offload_key(bytes([n, b]) * 16, 0) for b in range(6)] for n in range(4)]
def serve(num_requests):
    for n in range(num_requests):
        log.note(chats[n % 4], ReqContext(str(n)), 6 * 16 + 5, 3)
    log._show_at = 0.0
    log._show()
    print(n, flush=True)
for line in sys.stdin:
    serve(int(line))
"""
"""Four chats of 6 blocks take turns, and host memory has 16 blocks."""


def test_a_running_engine_says_what_more_memory_would_bring(
    capsys: pytest.CaptureFixture[str],
) -> None:
    engine = subprocess.Popen(
        [sys.executable, "-c", ENGINE], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert engine.stdin is not None
    assert engine.stdout is not None
    with engine.stdin, engine.stdout:
        try:
            printed = ""
            for num_requests in (1, 4000):
                print(num_requests, file=engine.stdin, flush=True)
                engine.stdout.readline()
                assert main(["plan", "--engine"]) == 0
                shown = capsys.readouterr().out
                (printed,) = re.findall(rf"(?ms)^process {engine.pid}, .*?(?=^process|\Z)", shown)
                assert ("Too few requests have ended" in printed) == (num_requests == 1)
            assert "my-model, engine planned?[2J" in printed
            assert "With twice the host memory, 100 % of the blocks of prompts" in printed
            assert "instead of 0 %" in printed
            found = plan(capsys, "--engine")["engines"]
            (its,) = [board for board in found if board["pid"] == engine.pid]
            assert its["num_blocks"] == 4001 * 6
            assert [size["factor"] for size in its["sizes"]] == [0.5, 1.0, 2.0, 4.0]
        finally:
            engine.kill()
            engine.wait()


def test_without_an_engine_it_says_where_to_look(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("kvtier.cli.plan.command.read_boards", list)
    assert main(["plan", "--engine"]) == 2
    assert "no engine with kvtier runs here" in capsys.readouterr().err


@pytest.mark.parametrize("other", [["config.json"], ["--trace", CHATS], SIZE])
def test_an_engine_needs_no_model(other: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", "--engine", *other]) == 2
    assert "give it alone" in capsys.readouterr().err
