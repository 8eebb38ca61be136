"""`kvtier plan`: what it prints, and what it refuses."""

from __future__ import annotations

import json
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest
from PIL import Image

from kvtier.cli import main
from kvtier.observe.status_socket import StatusSocket
from tests import traces
from tests.replay.test_plan import LLAMA_3_8B, written
from tests.test_architecture import REPO
from tests.traces import TRACES

CHATS = str(traces.CHATS)
PAGE = REPO / "docs" / "replay.md"
SVG = "{http://www.w3.org/2000/svg}"
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


# --- with a trace ------------------------------------------------------------------------------

SWEEP = [*SIZE, "--host", "2GiB", "--tier", "disk:8GiB", "--trace", CHATS]
PRICES = ["--cost-per-gb", "host=4", "--cost-per-gb", "disk=0.10"]


def test_a_sweep_has_the_hits_of_replays(capsys: pytest.CaptureFixture[str]) -> None:
    document = plan(capsys, *SWEEP)
    assert document["recommendation"] is document["target"] is None
    points = document["sweep"]
    assert [point["swept"] for point in points] == ["host"] * 7 + ["disk"] * 7
    assert [point["bytes"]["host"] for point in points[:7]] == [(1 << 28) << n for n in range(7)]
    assert {point["bytes"]["disk"] for point in points[:7]} == {8 << 30}
    for point in points[::4]:
        sizes = ["--host", str(point["bytes"]["host"]), "--tier", f"disk:{point['bytes']['disk']}"]
        assert main(["replay", CHATS, "--no-timing", *sizes, "--json"]) == 0
        replayed = json.loads(capsys.readouterr().out)
        assert point["tiers"] == replayed["tiers"]
    hits = [point["hit_percent"] for point in plan(capsys, *SIZE, "--trace", CHATS)["sweep"]]
    assert hits == sorted(hits)
    assert hits[-1] == pytest.approx(document["unlimited_hit_percent"])


def test_targets_are_reached_by_what_is_recommended(capsys: pytest.CaptureFixture[str]) -> None:
    document = plan(capsys, *SWEEP, *PRICES, "--target-hits", "55", "--ssd-tbw", "disk=600TB")
    found = document["recommendation"]
    assert document["target"] == {"hit_percent": 55.0, "ttft_s": None}
    assert found["hit_percent"] >= 55
    sizes = found["bytes"]
    assert found["cost"] == pytest.approx(sizes["host"] * 4e-9 + sizes["disk"] * 0.1e-9, rel=1e-3)
    reaching = [point["cost"] for point in document["sweep"] if point["hit_percent"] >= 55]
    assert found["cost"] <= min(reaching)
    years = 600e12 / found["written_bytes_per_day"]["disk"] / 365.25
    assert found["life_years"]["disk"] == pytest.approx(years, rel=1e-3)

    timed = plan(capsys, *SWEEP, "--target-ttft", "300ms", "--gpu", "1GiB")["recommendation"]
    assert timed["timing"]["ttft_s"]["p90"] <= 0.3
    assert timed["gpu"]["hit_blocks"] > 0
    assert main(["plan", *SWEEP, "--target-ttft", "300ms"]) == 0
    assert "9 of 10 first tokens within" in capsys.readouterr().out


def test_prices_alone_ask_for_nearly_all_hits(capsys: pytest.CaptureFixture[str]) -> None:
    document = plan(capsys, *SWEEP, *PRICES)
    most = max(point["hit_percent"] for point in document["sweep"])
    assert document["target"]["hit_percent"] == pytest.approx(0.95 * most)
    assert document["recommendation"]["hit_percent"] >= 0.95 * most


def test_a_target_out_of_reach_is_said_to_be_so(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", *SWEEP, "--target-hits", "99"]) == 0
    assert "reaches 99.0 % hits: no size hits more than 62.1 %" in capsys.readouterr().out
    small = [*SIZE, "--host", "128MiB", "--trace", CHATS]
    assert main(["plan", *small, "--target-hits", "60"]) == 0
    assert "reaches 60.0 % hits: give larger sizes, or a lower" in capsys.readouterr().out
    assert plan(capsys, *SWEEP, "--target-hits", "99")["recommendation"] is None


def test_all_policies_are_compared(capsys: pytest.CaptureFixture[str]) -> None:
    document = plan(capsys, *SIZE, "--host", "2GiB", "--trace", CHATS, "--policy", "all")
    policies = [point["policy"] for point in document["sweep"]]
    assert {"lru", "arc", "density"} <= set(policies)
    assert policies.count("arc") == 7
    assert main(["plan", *SIZE, "--trace", CHATS, "--policy", "all"]) == 0
    assert re.search(r"size of host +lru +arc +density", capsys.readouterr().out)


# --- pictures ----------------------------------------------------------------------------------


def test_a_picture_has_every_curve_and_mark(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "curves.svg"
    options = ["--target-hits", "55", "--target-ttft", "300ms", "--svg", str(path)]
    assert main(["plan", *SWEEP, *options]) == 0
    capsys.readouterr()
    svg = ElementTree.parse(path).getroot()
    assert svg.tag == f"{SVG}svg"
    words = [element.text for element in svg.iter(f"{SVG}text")]
    for word in ("together", "host", "disk", "target", "given", "256 MiB", "64 GiB"):
        assert word in words
    assert sum("recommended" in str(word) for word in words) == 4  # two places, hits and times
    # Seven sizes of two places: hits together, in host memory and on disk, and times.
    assert len(list(svg.iter(f"{SVG}circle"))) == 7 * 2 * (3 + 1)
    width, height = (float(svg.attrib[name]) for name in ("width", "height"))
    for element in svg.iter(f"{SVG}circle"):
        assert 0 < float(element.attrib["cx"]) < width
        assert 0 < float(element.attrib["cy"]) < height


@pytest.mark.parametrize("name", ["a & <b>.jsonl", "two\nlines\x1b[2J.jsonl", "caf\udce9.jsonl"])
def test_any_name_of_a_trace_can_stand_above_a_picture(
    name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    trace, svg, png = (str(tmp_path / file) for file in (name, "a.svg", "a.png"))
    shutil.copy(CHATS, trace)
    assert main(["plan", *SIZE, "--trace", trace, "--limit", "3", "--svg", svg, "--png", png]) == 0
    assert "\x1b" not in capsys.readouterr().out
    title = ElementTree.parse(svg).getroot().find(f"{SVG}title")
    assert title is not None
    assert str(title.text).startswith(name[:3])


def test_the_png_is_the_same_picture(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path, svg = tmp_path / "curves.png", tmp_path / "curves.svg"
    assert main(["plan", *SWEEP, "--png", str(path), "--svg", str(svg)]) == 0
    capsys.readouterr()
    root = ElementTree.parse(svg).getroot()
    with Image.open(path) as picture:
        assert picture.format == "PNG"
        assert picture.size == tuple(2 * int(root.attrib[name]) for name in ("width", "height"))
        for circle in root.iter(f"{SVG}circle"):  # later curves may cover earlier dots
            centre = [round(2 * float(circle.attrib[name])) for name in ("cx", "cy")]
            assert picture.convert("RGB").getpixel(tuple(centre)) != (255, 255, 255)


def test_the_picture_on_the_page_is_that_of_its_example(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(REPO)
    command = next(
        line
        for line in PAGE.read_text().splitlines()
        if line.startswith("$ kvtier plan") and "tbw" in line
    )
    path = tmp_path / "plan.svg"
    assert main([*shlex.split(command)[2:], "--svg", str(path)]) == 0
    capsys.readouterr()
    assert path.read_text() == (REPO / "docs" / "plan.svg").read_text()


def test_without_pillow_svg_is_offered(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("kvtier.cli.plan.command.find_spec", lambda name: None)
    assert main(["plan", *SWEEP, "--png", str(tmp_path / "a.png")]) == 2
    assert "or give --svg" in " ".join(capsys.readouterr().err.split())
    assert list(tmp_path.iterdir()) == []


# --- wrong input -------------------------------------------------------------------------------

WRONG: dict[str, tuple[list[str], str]] = {
    "nothing": ([], "or else --kv-bytes-per-token"),
    "both": (["config.json", *SIZE], "or else --kv-bytes-per-token"),
    "no such model": (["gone.json"], "there is no gone.json: give the path of a model's"),
    "a directory": ([str(TRACES)], "is a directory"),
    "a trace as a model": ([CHATS], "give a model's config.json"),
    "an unknown type": ([*SIZE, "--kv-dtype", "int3"], "give one of float32"),
    "no conversation": ([*SIZE, "--conversation", "0"], "above 0"),
    "no prefill": ([*SIZE, "--prefill", "0"], "from 0.001"),
    "no requests": ([*SIZE, "--limit", "0"], "above 0"),
    "no such trace": ([*SIZE, "--trace", "gone.jsonl"], "there is no gone.jsonl"),
    "host memory too small": ([*SIZE, "--trace", CHATS, "--host", "1MiB"], "one block of 512"),
    "host memory too large": (
        ["--kv-bytes-per-token", "1", "--trace", CHATS, "--host", "100TiB"],
        "give at most",
    ),
    "an unknown policy": ([*SIZE, "--trace", CHATS, "--policy", "random"], "random"),
    "hits out of range": ([*SIZE, "--trace", CHATS, "--target-hits", "101"], "up to 100"),
    "a target without a unit": ([*SIZE, "--trace", CHATS, "--target-ttft", "3"], "us, ms, s"),
    "a target without a trace": ([*SIZE, "--target-hits", "50"], "give --trace FILE, too"),
    "a limit without a trace": ([*SIZE, "--limit", "5"], "give --trace FILE, too"),
    "all policies without a trace": ([*SIZE, "--policy", "all"], "give --trace FILE, too"),
    "a picture without a trace": ([*SIZE, "--svg", "a.svg"], "give --trace FILE, too"),
    "a picture nowhere": ([*SWEEP, "--svg", "/nowhere/a.svg"], "create it first"),
    "a picture in place of a folder": ([*SWEEP, "--png", "/tmp"], "the path of a file"),
    "a price for nothing": ([*SWEEP, "--cost-per-gb", "nas=3"], "the names are host, disk"),
    "a price twice": ([*SWEEP, *PRICES, "--cost-per-gb", "disk=1"], "once for each"),
    "a price too few": ([*SWEEP, "--cost-per-gb", "disk=1"], "give a price for host, too"),
    "a price in words": ([*SWEEP, "--cost-per-gb", "disk=cheap"], "such as 0.10"),
    "a life without size": ([*SWEEP, "--ssd-tbw", "disk"], "such as disk=600TB"),
    "a life of host memory": ([*SWEEP, "--ssd-tbw", "host=600TB"], "the names are disk"),
    "a life without a tier": ([*SIZE, "--trace", CHATS, "--ssd-tbw", "a=1TB"], "--tier first"),
    "two speeds": ([*SIZE, "--prefill", "9", "--prefill-times", "8:1s"], "either --prefill or"),
    "a write budget": (
        [*SIZE, "--trace", CHATS, "--tier", "disk:1TiB,write_budget=1TiB"],
        "without --target-ttft): leave write_budget out",
    ),
    "a picture in place of the trace": ([*SWEEP, "--svg", CHATS], "is also --trace"),
    "two pictures in one file": ([*SWEEP, "--svg", "/tmp/a", "--png", "/tmp/a"], "is also --svg"),
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
    text = PAGE.read_text()
    page = text.partition("## kvtier plan")[2] + text.partition("## JSON")[2]
    assert main(["plan", "--help"]) == 0
    words = set(re.findall(r"--[a-z][\w-]*", capsys.readouterr().out)) - {"--help"}
    assert [word for word in sorted(words) if f"`{word}" not in page] == []
    document = plan(capsys, *SWEEP, "--target-hits", "50")
    keys = {*document, *document["tiers"][0], *document["sweep"][0], *document["target"]}
    assert [key for key in sorted(keys) if f"`{key}`" not in page] == []


ENGINE = """
import sys
from kvtier.base import ReqContext, make_offload_key
from kvtier.cpu.spec import CPUOffloadingSpec
from tests.config.sample import make_config
config = make_config({"cpu_bytes_to_use": "1MiB"}, engine_id="planned\\x1b[2J")
log = CPUOffloadingSpec(config).get_manager().prompts
log.curve._random = __import__("random").Random(1).random
chats = [[make_offload_key(bytes([n, b]) * 16, 0) for b in range(6)] for n in range(4)]
def serve(num_requests):
    for n in range(num_requests):
        log.note(chats[n % 4], ReqContext(str(n)), 6 * 16 + 5, 3)
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
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("KVTIER_RUN_DIR", str(tmp_path))
    assert main(["plan", "--engine"]) == 2
    assert "no engine of this user runs here" in capsys.readouterr().err


def test_an_engine_that_does_not_answer_is_named(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("KVTIER_RUN_DIR", str(tmp_path))
    other_release = StatusSocket()
    other_release.start()
    try:
        assert main(["plan", "--engine"]) == 2
    finally:
        other_release.close()
    assert str(other_release.path) in capsys.readouterr().err


@pytest.mark.parametrize("other", [["config.json"], ["--trace", CHATS], SIZE])
def test_an_engine_needs_no_model(other: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", "--engine", *other]) == 2
    assert "give it alone" in capsys.readouterr().err
