"""`kvtier replay`: what it prints, what it refuses, and how it ends."""

from __future__ import annotations

import json
import os
import re
import shlex
import signal
from pathlib import Path
from typing import Any

import pytest

from kvtier.cli import main
from kvtier.cpu.manager import CPUOffloadingManager
from kvtier.replay import calibration, trace
from tests import traces
from tests.test_architecture import REPO
from tests.trace_replay import replay
from tests.traces import TRACES, conversation

CHATS, CONVERSATION = str(traces.CHATS), str(traces.CONVERSATION)
PAGE = REPO / "docs" / "replay.md"


def run_json(capsys: pytest.CaptureFixture[str], *arguments: str) -> dict[str, Any]:
    assert main(["replay", *arguments, "--json"]) == 0
    printed = capsys.readouterr()
    assert printed.err == ""
    document: dict[str, Any] = json.loads(printed.out)
    return document


# --- the result --------------------------------------------------------------------------------


def test_pure_counting_gives_the_hits_of_a_plain_loop(capsys: pytest.CaptureFixture[str]) -> None:
    document = run_json(capsys, CONVERSATION, "--host", "512GiB", "--no-timing")
    expected = replay(conversation(), CPUOffloadingManager(8192))
    assert document["hit_blocks"] == expected.num_hits
    assert document["block_references"] == expected.num_references
    assert document["saved_tokens"] == expected.num_hits * 512
    assert document["timing"] is None


def test_the_document_adds_up(capsys: pytest.CaptureFixture[str]) -> None:
    document = run_json(capsys, CHATS, "--host", "2GiB", "--tier", "disk:16GiB,read_speed=20GB")
    assert document["complete"] is True
    assert document["requests"] == document["timing"]["answered"] == 40
    tiers = document["tiers"]
    assert [tier["name"] for tier in tiers] == ["host", "disk"]
    assert sum(tier["hit_blocks"] for tier in tiers) == document["hit_blocks"]
    assert document["hit_blocks"] + document["computed_blocks"] == document["block_references"]
    assert [tier["capacity_blocks"] for tier in tiers] == [32, 256]
    assert tiers[0]["promoted_bytes"] == tiers[1]["read_bytes"] > 0
    ttft = document["timing"]["ttft_s"]
    assert ttft["p50"] <= ttft["p90"] <= ttft["p99"]
    assert document["settings"]["tiers"][0]["read_bytes_per_s"] == 20e9


def test_limit_and_speed(capsys: pytest.CaptureFixture[str]) -> None:
    slow = run_json(capsys, CHATS, "--limit", "10")
    fast = run_json(capsys, CHATS, "--limit", "10", "--speed-up", "4")
    assert slow["requests"] == fast["requests"] == 10
    assert fast["timing"]["virtual_seconds"] < slow["timing"]["virtual_seconds"] / 2


def test_other_policies_and_block_sizes(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    lru, arc = (
        run_json(capsys, CHATS, "--host", "2GiB", "--no-timing", "--policy", policy)
        for policy in ("lru", "arc")
    )
    assert lru["hit_blocks"] != arc["hit_blocks"]
    line = {"timestamp": 0, "input_length": 40, "output_length": 1, "hash_ids": [1, 2, 3]}
    path = tmp_path / "small.jsonl"
    path.write_text(json.dumps(line) + "\n")
    document = run_json(capsys, str(path), "--block-tokens", "16", "--no-timing")
    assert (document["block_references"], document["block_tokens"]) == (2, 16)
    assert document["block_bytes"] == 16 * 128 * 1024


def test_the_gpu_keeps_hits_from_the_tiers(capsys: pytest.CaptureFixture[str]) -> None:
    without = run_json(capsys, CHATS, "--host", "2GiB")
    document = run_json(capsys, CHATS, "--host", "2GiB", "--gpu", "1GiB")
    assert without["gpu"] is None
    assert document["gpu"]["capacity_blocks"] == 16
    hits = document["gpu"]["hit_blocks"], document["tiers"][0]["hit_blocks"]
    assert sum(hits) == document["hit_blocks"]
    assert min(hits) > 0
    assert main(["replay", CHATS, "--host", "2GiB", "--gpu", "1GiB"]) == 0
    assert "\ngpu        1 GiB" in capsys.readouterr().out


def test_measured_times_take_the_place_of_a_speed(capsys: pytest.CaptureFixture[str]) -> None:
    document = run_json(capsys, CHATS, "--prefill-times", "8192:212ms,32768:1.22s")
    engine = document["settings"]["engine"]
    assert engine["prefill_tokens_per_s"] > 8192 / 0.212
    assert engine["attention_s"] > 0


def test_write_policies_decide_what_is_written(capsys: pytest.CaptureFixture[str]) -> None:
    tiers = {}
    for write in ("through", "second_use", "on_evict", "adaptive"):
        option = f"disk:4GiB,write={write}"
        document = run_json(capsys, CHATS, "--host", "2GiB", "--tier", option, "--no-timing")
        tiers[write] = document["tiers"][1]
        assert tiers[write]["write_policy"] == write
    written = {write: tier["written_bytes"] for write, tier in tiers.items()}
    assert written["second_use"] < written["on_evict"] < written["through"]
    hits = {write: tier["hit_blocks"] for write, tier in tiers.items()}
    assert hits["on_evict"] > hits["through"]
    assert tiers["second_use"]["left_out_blocks"] > 0


def test_a_write_budget_is_kept(capsys: pytest.CaptureFixture[str]) -> None:
    options = [CHATS, "--host", "2GiB", "--tier", "disk:16GiB,write_budget=1TiB"]
    document = run_json(capsys, *options)
    disk, seconds = document["tiers"][1], document["timing"]["virtual_seconds"]
    seconds += 30  # the trace begins some seconds before its first request
    assert 0 < disk["written_bytes"] <= (1 << 40) * seconds / 86_400
    assert disk["over_budget_blocks"] > 0
    assert main(["replay", *options]) == 0
    assert "to keep its write_budget" in capsys.readouterr().out


def test_an_overloaded_engine_is_pointed_out(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["replay", CHATS, "--speed-up", "1000"]) == 0
    assert "A lower --speed-up lowers the load" in capsys.readouterr().out
    assert main(["replay", CHATS, "--speed-up", "0.1"]) == 0
    assert "--speed-up" not in capsys.readouterr().out


def test_a_tier_that_is_cut_off_is_named_on_standard_error(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert main(["replay", CHATS, "--tier", "nas:16GiB,write_speed=1MB", "--json"]) == 0
    printed = capsys.readouterr()
    assert "kvtier replay: tier 0 (nas): stores: cut off" in printed.err
    nas = json.loads(printed.out)["tiers"][1]
    assert nas["refused_blocks"] > nas["written_bytes"] // (64 << 20)


# --- the page ----------------------------------------------------------------------------------


_NEEDS_AN_ENGINE = "plan --engine"


def _without_time(text: str) -> list[str]:
    return [line.rstrip() for line in text.splitlines() if not line.startswith("replayed in")]


def test_the_worked_example_prints_what_the_page_shows(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(REPO)
    examples = re.findall(r"```console\n\$ kvtier (.+)\n((?:.*\n)+?)```", PAGE.read_text())
    examples = [example for example in examples if example[0] != _NEEDS_AN_ENGINE]
    assert len(examples) == 7
    for command, shown in examples:
        assert main(shlex.split(command)) == 0
        assert _without_time(capsys.readouterr().out) == _without_time(shown), command


def test_the_page_explains_every_option_and_key(capsys: pytest.CaptureFixture[str]) -> None:
    page = PAGE.read_text()
    assert main(["replay", "--help"]) == 0
    words = re.findall(r"--[a-z][\w-]*", capsys.readouterr().out)
    assert [word for word in words if word != "--help" and f"`{word}" not in page] == []
    document = run_json(capsys, CHATS, "--tier", "disk:16GiB")
    keys = {*document, *document["tiers"][0], *document["timing"], *document["timing"]["ttft_s"]}
    assert [key for key in sorted(keys) if f"`{key}`" not in page] == []


# --- wrong input -------------------------------------------------------------------------------

WRONG: dict[str, tuple[list[str], str]] = {
    "no trace": ([], "or --calibrate DIR"),
    "no such file": (["gone.jsonl"], "there is no gone.jsonl"),
    "a directory": ([str(TRACES)], "is a directory"),
    "a device": (["/dev/null"], "is not a regular file"),
    "not a trace": ([str(TRACES / "README.md")], "README.md, line 1: this is not JSON"),
    "another block size": ([CHATS, "--block-tokens", "16"], "--block-tokens"),
    "no block size": ([CHATS, "--block-tokens", "0"], "from 1 to 1e12"),
    "no unit": ([CHATS, "--host", "64G"], "64GiB"),
    "a negative size": ([CHATS, "--host=-1GiB"], "--host"),
    "less than a block": ([CHATS, "--host", "1MiB"], "one block of 512 tokens has 64 MiB"),
    "too many blocks": (
        [CHATS, "--host", "4000000GiB", "--kv-bytes-per-token", "1"],
        "give at most",
    ),
    "no bytes": ([CHATS, "--kv-bytes-per-token", "0"], "Write a size above 0"),
    "an unknown policy": ([CHATS, "--policy", "random"], "random"),
    "an unknown policy below": ([CHATS, "--tier", "disk:1TiB,policy=random"], "random"),
    "a tier without size": ([CHATS, "--tier", "disk"], "NAME:SIZE, such as disk:2TiB"),
    "a tier without name": ([CHATS, "--tier", ":2TiB"], "NAME:SIZE, such as disk:2TiB"),
    "a tier with a wrong size": ([CHATS, "--tier", "disk:2T"], "2TiB"),
    "a tier smaller than a block": ([CHATS, "--tier", "disk:1MiB"], "disk has 1 MiB"),
    "an unknown key": (
        [CHATS, "--tier", "disk:2TiB,size=3"],
        "read_speed=6GB, write_speed=4GB, latency=0.1ms",
    ),
    "a key twice": ([CHATS, "--tier", "disk:2TiB,policy=lru,policy=arc"], "at most once"),
    "no speed": ([CHATS, "--tier", "disk:2TiB,read_speed=0"], "Write a size above 0"),
    "a latency without unit": ([CHATS, "--tier", "disk:2TiB,latency=3"], "us, ms, s"),
    "a speed as a write policy": (
        [CHATS, "--tier", "disk:2TiB,write=4GB"],
        "one of through, second_use, on_evict, adaptive; how fast the tier writes is write_speed",
    ),
    "a budget without a unit": ([CHATS, "--tier", "disk:2TiB,write_budget=2T"], "2TiB"),
    "a budget without days": (
        [CHATS, "--tier", "disk:2TiB,write_budget=2TiB", "--no-timing"],
        "(--no-timing; kvtier plan without --target-ttft): leave write_budget out",
    ),
    "one name twice": ([CHATS, "--tier", "a:2TiB", "--tier", "a:2TiB"], '"a" names two tiers'),
    "the name of host memory": ([CHATS, "--tier", "host:2TiB"], '"host" names two tiers'),
    "a GPU without room": ([CHATS, "--gpu", "1MiB"], "the GPU has 1 MiB"),
    "two speeds": ([CHATS, "--prefill", "9", "--prefill-times", "8192:1s"], "either --prefill or"),
    "times without tokens": ([CHATS, "--prefill-times", "212ms"], "8192:212ms,32768:1.22s"),
    "three times": ([CHATS, "--prefill-times", "1:1s,2:2s,3:3s"], "one or two prompts"),
    "a time without unit": ([CHATS, "--prefill-times", "8192:212"], "us, ms, s"),
    "no prefill": ([CHATS, "--prefill", "0"], "from 0.001"),
    "endless prefill": ([CHATS, "--prefill", "inf"], "to 1e12"),
    "steps without length": ([CHATS, "--decode-step", "0ms"], "us, ms, s"),
    "steps without tokens": ([CHATS, "--step-tokens", "0"], "from 1 to 1e12"),
    "nobody runs": ([CHATS, "--running", "0"], "from 1 to 1e12"),
    "no host speed": ([CHATS, "--host-speed", "fast"], "8GiB"),
    "a host speed without unit": ([CHATS, "--host-speed", "50"], "is the unit right?"),
    "a tier's speed without unit": (
        [CHATS, "--tier", "d:2TiB,write_speed=4"],
        "is the unit right?",
    ),
    "time stands still": ([CHATS, "--speed-up", "0"], "2 is twice as fast"),
    "no requests": ([CHATS, "--limit", "0"], "from 1 to 1e12"),
    "a word as a limit": ([CHATS, "--limit", "few"], "few"),
    "nowhere to measure": ([CHATS, "--calibrate", "/nowhere/at/all"], "may write to"),
    "a file to measure": (["--calibrate", CHATS], "may write to"),
}


@pytest.mark.parametrize("case", WRONG)
def test_wrong_input_is_refused_with_a_remedy(
    case: str, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments, remedy = WRONG[case]
    assert main(["replay", *arguments]) == 2
    printed = capsys.readouterr()
    assert printed.out == ""
    assert remedy in " ".join(printed.err.split())


# --- Ctrl-C ------------------------------------------------------------------------------------


@pytest.mark.parametrize("timing", ["--timing", "--no-timing"])
def test_ctrl_c_prints_what_was_counted(
    timing: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    parse = trace._JsonLines._parse
    num_parsed = 0

    def parse_and_interrupt(self: trace._JsonLines, line: bytes, last_ms: float) -> Any:
        nonlocal num_parsed
        num_parsed += 1
        if num_parsed == 30:
            os.kill(os.getpid(), signal.SIGINT)
        return parse(self, line, last_ms)

    monkeypatch.setattr(trace._JsonLines, "_parse", parse_and_interrupt)
    assert main(["replay", CHATS, timing, "--json"]) == 128 + signal.SIGINT
    printed = capsys.readouterr()
    document = json.loads(printed.out)
    assert document["complete"] is False
    assert 0 < document["requests"] < 30
    num_parsed = 0
    assert main(["replay", CHATS, timing]) == 128 + signal.SIGINT
    assert capsys.readouterr().out.startswith("Ended by Ctrl-C")


# --- calibration -------------------------------------------------------------------------------


def test_calibration_prints_options_that_can_be_pasted(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(calibration, "_FILE_BYTES", 32 << 20)
    monkeypatch.setattr(calibration, "_COPIED_BYTES", 16 << 20)
    assert main(["replay", "--calibrate", str(tmp_path)]) == 0
    printed = capsys.readouterr()
    assert "give --prefill-times" in printed.err
    options = shlex.split(printed.out.splitlines()[-1].replace("SIZE", "16GiB"))
    assert list(tmp_path.iterdir()) == []

    given = run_json(capsys, CHATS, *options)["settings"]
    assert given["host"]["read_bytes_per_s"] > 1e6
    measured = run_json(capsys, CHATS, "--calibrate", str(tmp_path), "--tier", "disk:16GiB")
    (tier,) = measured["settings"]["tiers"]
    assert tier["read_bytes_per_s"] != 6e9

    assert main(["replay", "--calibrate", str(tmp_path), "--json"]) == 0
    document = json.loads(capsys.readouterr().out)
    assert document["prefill_tokens_per_s"] is None
    assert document["latency_s"] > 0


def test_memory_is_not_taken_for_a_disk(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(calibration, "_FILE_BYTES", 4 << 20)
    monkeypatch.setattr(calibration, "_COPIED_BYTES", 4 << 20)
    assert main(["replay", "--calibrate", "/dev/shm"]) == 0
    assert "/dev/shm is in memory (tmpfs)" in capsys.readouterr().err
