"""`kvtier top` of a real engine in another process, in a real terminal."""

from __future__ import annotations

import io
import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from rich.cells import cell_len
from rich.console import Console

from kvtier.cli import main
from kvtier.cli.watch.engines import FollowedEngines
from kvtier.cli.watch.overview import overview_of
from kvtier.cli.watch.screen import Screen
from kvtier.observe.client import ask, find_engine
from tests.cli.watch.engine_process import EngineProcess
from tests.cli.watch.terminal import Terminal
from tests.cli.watch.test_overview import REQUEST
from tests.cli.watch.told_engine import ToldEngine, of_tier
from tests.test_architecture import SRC

_COUNTS = re.compile(r"[\d,]+ (?:hits|loaded|stored|evicted)")
_COLOUR = re.compile(r"\x1b\[[0-9;]*3[0-9]")


@pytest.fixture(scope="module")
def watched(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[EngineProcess, Path]]:
    """A real engine that has stored and loaded, and now waits."""
    folder = tmp_path_factory.mktemp("watched")
    with EngineProcess(folder, folder / "run") as engine:
        engine.serve(0, 8)
        engine.serve(0, 4)
        yield engine, folder / "run"


def top(*arguments: str, **env: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "kvtier", "top", *arguments],
        env=os.environ | {"PYTHONPATH": str(SRC)} | env,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        check=False,
    )


def test_without_a_terminal_it_prints_once_what_the_status_says(
    watched: tuple[EngineProcess, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    _, run_dir = watched
    monkeypatch.setenv("KVTIER_RUN_DIR", str(run_dir))
    counters = ask(find_engine(), "status")["counters"]
    shown, once = top(), top("--once")
    assert (shown.returncode, shown.stderr) == (0, "")
    text = " ".join(shown.stdout.split())
    assert _COUNTS.findall(shown.stdout) == _COUNTS.findall(once.stdout)
    for place in ("host", "0:disk", "1:fs"):
        assert f"\n{place} " in shown.stdout
    assert f"{counters['kvtier_cpu_stored_blocks']:,.0f} stored" in text
    assert f"{counters['kvtier_cpu_loaded_blocks']:,.0f} loaded" in text
    loaded = counters[of_tier("blocks", "0:disk", "direction", "load")]
    assert loaded > 0
    assert f"{counters[of_tier('hit_blocks', '0:disk')]:,.0f} hits · {loaded:,.0f} loaded" in text
    assert "\x1b" not in shown.stdout


def test_json_is_one_document(watched: tuple[EngineProcess, Path]) -> None:
    engine, run_dir = watched
    ended = top("--json", KVTIER_RUN_DIR=str(run_dir))
    document = json.loads(ended.stdout)
    assert [tier["tier"] for tier in document["tiers"]] == ["host", "0:disk", "1:fs"]
    assert document["engines"][0]["pid"] == engine.pid
    assert document["tiers"][0]["used_bytes"] > 0


def test_a_live_view_in_a_terminal_of_changing_size(watched: tuple[EngineProcess, Path]) -> None:
    engine, run_dir = watched
    with Terminal("top", "--interval", "0.5", KVTIER_RUN_DIR=str(run_dir)) as terminal:
        terminal.wait_for_text("kvtier top", f"process {engine.pid}", "1:fs", "load")
        assert _COLOUR.search(terminal.written.decode())
        terminal.resize(60, 24)
        terminal.wait_for(
            lambda: any(line.startswith("            load ") for line in terminal.lines)
        )
        terminal.resize(50, 8)
        terminal.wait_for_text("more lines")
        terminal.resize(120, 30)
        terminal.wait_for(lambda: max(map(len, terminal.lines)) > 100)
        terminal.press(b"x")
        terminal.press(b"q")
        assert terminal.ended() == 0
        assert terminal.is_restored()
        assert b"Traceback" not in terminal.written


@pytest.mark.parametrize(
    ("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 128 + signal.SIGTERM)]
)
def test_signals_restore_the_terminal(
    number: signal.Signals, code: int, watched: tuple[EngineProcess, Path]
) -> None:
    with Terminal("top", KVTIER_RUN_DIR=str(watched[1]), NO_COLOR="1") as terminal:
        terminal.wait_for_text("1:fs")
        if number is signal.SIGINT:
            terminal.press(b"\x03")
        else:
            terminal.process.send_signal(number)
        assert terminal.ended() == code
        assert terminal.is_restored()
        assert b"Traceback" not in terminal.written
        assert not _COLOUR.search(terminal.written.decode())


def test_an_engine_that_is_killed_and_its_successor(tmp_path: Path, run_dir: Path) -> None:
    with EngineProcess(tmp_path / "1", run_dir) as first:
        any_one = Terminal("top", "--interval", "0.5")
        this_one = Terminal("top", "--interval", "0.5", str(first.pid))
        with any_one, this_one:
            first.serve(0, 2)
            any_one.wait_for_text(f"process {first.pid}", "stored")
            this_one.wait_for_text(f"process {first.pid}", "stored")
            first.kill()
            assert this_one.ended() == 1
            assert b"the engine has ended" in this_one.written
            assert this_one.is_restored()
            any_one.wait_for_text("The engine has ended", "gone", "stored")
            with EngineProcess(tmp_path / "2", run_dir) as second:
                any_one.wait_for_text(f"process {second.pid}")
            any_one.press(b"q")
            assert any_one.ended() == 0
            assert b"Traceback" not in any_one.written + this_one.written


def test_a_stopped_engine_keeps_neither_the_keyboard_nor_the_figures(
    tmp_path: Path, run_dir: Path
) -> None:
    with EngineProcess(tmp_path, run_dir) as engine, Terminal("top") as terminal:
        engine.serve(0, 2)
        terminal.wait_for_text("stored")
        engine.process.send_signal(signal.SIGSTOP)
        os.waitid(os.P_PID, engine.pid, os.WSTOPPED | os.WNOWAIT)
        terminal.press(b"q")
        assert terminal.ended() == 0
        engine.process.send_signal(signal.SIGCONT)


@pytest.mark.parametrize("arguments", [[], ["--all"], ["4711"], ["/nowhere.sock"], ["--json"]])
def test_what_cannot_be_shown_is_said_in_one_sentence(
    arguments: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["top", *arguments]) == 2
    printed = capsys.readouterr()
    assert printed.out == ""
    assert printed.err.startswith("kvtier top: ")
    assert printed.err.count("\n") == 1


def test_one_of_several_engines_has_to_be_named(capsys: pytest.CaptureFixture[str]) -> None:
    with ToldEngine() as one, ToldEngine():
        assert main(["top"]) == 2
        assert "2 engines run here" in capsys.readouterr().err
        assert main(["top", "--all"]) == 0
        assert main(["top", str(one.path)]) == 0
        assert main(["top", "--all", str(one.path)]) == 2


@pytest.mark.parametrize("width", [40, 60, 76, 80, 120])
def test_every_line_fits(width: int) -> None:
    with ToldEngine(model="a-model-with-a-long-name/" + 8 * "instruct-" + "\x1b[31m") as told:
        told.tiers = [{**told.tiers[1], "tier": f"{n}:valkeyvalkey"} for n in range(3)]
        told.requests = [{**REQUEST, "id": 12 * "very-long-" + "\x1b]0;x\x07"}, REQUEST]
        tier = "0:valkeyvalkey"
        told.counters = {
            of_tier("declined_blocks", tier, "reason", "unmeasured"): 123_456_789,
            of_tier("not_stored_blocks", tier, "reason", "over_budget"): 999_999,
            of_tier("failed_blocks", tier, "direction", "store"): 12_345,
            of_tier("bytes", tier, "direction", "load"): 9e12,
            'kvtier_prompt_tokens{source="computed"}': 30,
            'kvtier_prompt_tokens{source="host"}': 70,
            'kvtier_saved_prefill_seconds{source="host"}': 7500,
        }
        told.gauges = {of_tier("breaker_state", tier, "direction", "store"): 1.0}
        engines = FollowedEngines(None, False)
        engines.ask()
        text = io.StringIO()
        Console(file=text, width=width).print(Screen(overview_of(engines)))
    shown = text.getvalue()
    assert max(map(cell_len, shown.splitlines())) <= width
    assert "\x1b" not in shown
    assert "70 % in all" in shown
    assert "computing saved: 2 h 5 min" in shown
    assert "stores being tried" in shown
    assert "failed stores: 12,345" in shown
    assert "75 %" in shown  # found of the request's tokens
