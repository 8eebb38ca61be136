"""`kvtier demo`: what it shows, and that it notices when something is wrong."""

from __future__ import annotations

import errno
import io
import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Generator, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from kvtier.cli import main
from kvtier.cli.demo import phases, process, server, settings
from kvtier.cli.demo.command import Interruption
from kvtier.cli.demo.process import Ended, EngineTask, Message, Started
from kvtier.cli.demo.settings import DemoSettings
from kvtier.connector.common import PrefixMatch
from kvtier.connector.scheduler import OffloadingConnectorScheduler
from kvtier.engine import Engine, ModelConfig
from kvtier.tiering.disk.layout import SLOTS_OFFSET
from kvtier.tiering.manager import TieringOffloadingManager
from tests.test_architecture import REPO, SRC

COMMAND = [sys.executable, "-m", "kvtier", "demo"]
ENVIRONMENT = os.environ | {"PYTHONPATH": str(SRC)}
OUTLOOK = "kvtier demo: running; the default sizes take about half a minute of processor time.\n"
PHASES = ["computed", "device", "host", "tier", "restarted", "killed"]
HYBRID_PHASES = ["hybrid_computed", "hybrid_host", "hybrid_tier"]

TINY = ["--tokens", "40", "--requests", "2", "--lengths", "64"]
_SIZES: dict[str, Any] = {
    "hidden": 64,
    "num_heads": 4,
    "head_dim": 16,
    "mlp_hidden": 96,
    "max_tokens": 512,
}


@pytest.fixture
def _tiny(monkeypatch: pytest.MonkeyPatch) -> None:
    """Tiny models, and short deadlines for the dead tier."""
    hybrid = ModelConfig(**_SIZES, windowed_layers=(0, 2), window=24)
    monkeypatch.setattr(DemoSettings, "model", ModelConfig(**_SIZES))
    monkeypatch.setattr(DemoSettings, "hybrid_model", hybrid)
    doomed = phases._DOOMED_TIER | {"load_timeout_ms": 500, "store_timeout_ms": 500}
    monkeypatch.setattr(phases, "_DOOMED_TIER", doomed)


@pytest.fixture(autouse=True)
def _no_thread_is_left() -> Iterator[None]:
    """Includes daemon threads, which the threads of tiers are."""
    before = set(threading.enumerate())
    yield
    assert set(threading.enumerate()) == before


@pytest.fixture(autouse=True)
def temporary(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """The user's temporary directory, which must be empty at the end."""
    folder = tmp_path / "temporary"
    folder.mkdir()
    monkeypatch.setenv("TMPDIR", str(folder))
    monkeypatch.setattr(tempfile, "tempdir", None)
    yield folder
    assert list(folder.iterdir()) == []


# ---------------------------------------------------------------------------------------------
# As users run it
# ---------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def report() -> dict[str, Any]:
    """The report of a small run in a process of its own."""
    ran = subprocess.run(
        [*COMMAND, "--json", "--tokens", "64", "--requests", "2", "--lengths", "64,160"],
        env=ENVIRONMENT,
        check=False,
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert ran.returncode == 0, ran.stdout + ran.stderr
    assert ran.stderr == ""
    parsed: dict[str, Any] = json.loads(ran.stdout)  # exactly one document
    return parsed


def test_all_is_identical(report: dict[str, Any]) -> None:
    assert report["ok"]
    assert report["identical"]
    assert report["problems"] == []
    assert [phase["name"] for phase in report["phases"]] == PHASES + HYBRID_PHASES
    assert all(phase["identical"] for phase in report["phases"])
    assert [row["tokens"] for row in report["lengths"]] == [64, 160]
    assert all(row["identical"] for row in report["lengths"])


def test_every_phase_is_served_from_its_own_place(report: dict[str, Any]) -> None:
    found = {
        phase["name"]: (
            phase["device"]["blocks"],
            phase["host"]["blocks"],
            sum(tier["blocks"] for tier in phase["tiers"]),
        )
        for phase in report["phases"]
    }
    # Of 64 tokens, three blocks are reused: the last one is computed for its logits.
    assert found["computed"] == found["hybrid_computed"] == (0, 0, 0)
    assert found["device"] == (6, 0, 0)
    assert found["host"] == (0, 6, 0)
    assert found["tier"] == found["restarted"] == (0, 0, 6)
    assert found["hybrid_host"] == (0, 12, 0)  # both groups
    assert found["hybrid_tier"] == (0, 0, 12)
    host = next(phase for phase in report["phases"] if phase["name"] == "host")
    # 16 tokens, 4 layers, keys and values, 2 KV heads of 32 float32
    assert host["host"]["bytes"] == 6 * 16 * 4 * 2 * 2 * 32 * 4


def test_a_dead_tier_is_cut_off_and_the_other_one_serves(report: dict[str, Any]) -> None:
    killed = next(phase for phase in report["phases"] if phase["name"] == "killed")
    first, second = killed["tiers"]
    assert first["blocks"] > 0
    assert second["blocks"] > 0
    assert any("cut off" in note for note in killed["notes"])


def test_another_process_is_warm(report: dict[str, Any]) -> None:
    restarted = next(phase for phase in report["phases"] if phase["name"] == "restarted")
    assert restarted["tiers"] == [{"tier": "disk", "blocks": 6, "bytes": 6 * 32768}]
    pattern = r"process (\d+) computed and stored the prompts, and ended; process (\d+) was given"
    found = [re.match(pattern, note) for note in restarted["notes"]]
    (match,) = filter(None, found)
    assert match[1] != match[2]


def test_times_and_factors_belong_together(report: dict[str, Any]) -> None:
    for phase in report["phases"]:
        if phase["name"].endswith("computed"):
            assert phase["speed_up"] is None
        else:
            assert phase["speed_up"] == pytest.approx(phase["cold_s"] / phase["first_token_s"])
    for row in report["lengths"]:
        assert row["host_speed_up"] == pytest.approx(row["cold_s"] / row["host_s"])
        assert row["tier_speed_up"] == pytest.approx(row["cold_s"] / row["tier_s"])


def test_the_page_about_it_explains_every_key(report: dict[str, Any]) -> None:
    page = (REPO / "docs" / "demo.md").read_text()
    keys = {*report, *report["phases"][0], *report["lengths"][0]}
    assert [key for key in keys if f"`{key}`" not in page] == []


@contextmanager
def running(temporary: Path) -> Iterator[subprocess.Popen[str]]:
    """The demo in a process of its own."""
    demo = subprocess.Popen(
        COMMAND,
        env=ENVIRONMENT | {"TMPDIR": str(temporary)},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        yield demo
    finally:
        demo.kill()
        demo.communicate()


def until(found: Callable[[], Any]) -> Any:
    """Wait until `found` returns something, and return it."""
    deadline = time.monotonic() + 120
    while time.monotonic() < deadline:
        if answer := found():
            return answer
        time.sleep(0.02)
    raise AssertionError("it did not come to that")


def region_files_of(process_id: int) -> set[Path]:
    """The region files that a running process has in shared memory."""
    try:
        mapped = Path(f"/proc/{process_id}/maps").read_text()
    except FileNotFoundError:
        return set()
    return {Path(name) for name in re.findall(r"/\S*/kvtier-\S+", mapped)}


def working_child_of(process_id: int) -> tuple[int, set[Path]] | None:
    """A child of a process, and its files in shared memory."""
    for child in Path(f"/proc/{process_id}/task/{process_id}/children").read_text().split():
        if files := region_files_of(int(child)):
            return int(child), files
    return None


def ended_by_ctrl_c(demo: subprocess.Popen[str]) -> None:
    demo.send_signal(signal.SIGINT)
    out, err = demo.communicate(timeout=120)
    assert demo.returncode == 128 + signal.SIGINT
    assert out == ""
    assert err == f"{OUTLOOK}kvtier demo: ended by SIGINT; nothing is left behind.\n"


def test_ctrl_c_ends_it_and_nothing_is_left(temporary: Path) -> None:
    with running(temporary) as demo:
        files = until(lambda: region_files_of(demo.pid))
        ended_by_ctrl_c(demo)
    assert [file for file in files if file.exists()] == []


def test_ctrl_c_ends_its_other_process_too(temporary: Path) -> None:
    with running(temporary) as demo:
        child, files = until(lambda: working_child_of(demo.pid))
        ended_by_ctrl_c(demo)
        assert not Path(f"/proc/{child}").exists()
    assert [file for file in files if file.exists()] == []


def test_its_other_process_cleans_up_when_it_is_killed(temporary: Path) -> None:
    with running(temporary) as demo:
        child, files = until(lambda: working_child_of(demo.pid))
        demo.kill()
        until(lambda: not region_files_of(child))
    until(lambda: not list(temporary.iterdir()))
    assert [file for file in files if file.exists()] == []


# ---------------------------------------------------------------------------------------------
# In this process, with tiny models
# ---------------------------------------------------------------------------------------------


def run_with_output(output: int, *options: str) -> subprocess.CompletedProcess[str]:
    """A small run in a process of its own whose standard output is this descriptor."""
    return subprocess.run(
        [*COMMAND, *TINY, *options],
        env=ENVIRONMENT,
        check=False,
        stdout=output,
        stderr=subprocess.PIPE,
        text=True,
        timeout=300,
    )


def test_a_reader_that_has_gone_ends_it_quietly() -> None:
    reader, writer = os.pipe()
    os.close(reader)
    try:
        ran = run_with_output(writer)
    finally:
        os.close(writer)
    assert ran.returncode == 128 + signal.SIGPIPE
    assert ran.stderr == OUTLOOK


def test_a_full_disk_is_said_in_one_line() -> None:
    with open("/dev/full", "w") as full:
        ran = run_with_output(full.fileno(), "--json")
    assert ran.returncode == 2
    reason = os.strerror(errno.ENOSPC)
    assert ran.stderr == f"kvtier demo: the result could not be written: {reason}\n"


@pytest.mark.usefixtures("_tiny")
def test_the_tables(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["demo", *TINY]) == 0
    printed = capsys.readouterr()
    assert printed.err == OUTLOOK  # standard error is no terminal
    assert "\x1b" not in printed.out
    assert not re.search(r"[ \t]$", printed.out, re.MULTILINE)
    assert re.search(r"^from host memory .* yes$", printed.out, re.MULTILINE)
    assert re.search(r"^from host memory +- +4 \(64 KiB\) +-$", printed.out, re.MULTILINE)
    assert re.search(r"^from disk, after a restart .* yes$", printed.out, re.MULTILINE)
    assert re.search(r"^one of two tiers killed .* yes$", printed.out, re.MULTILINE)
    killed = r"^one of two tiers killed .* first: \d+ \(.* [KM]iB\)\n +second: \d+ \(.* [KM]iB\)$"
    assert re.search(killed, printed.out, re.MULTILINE)
    assert "1 prompt came from the first tier" in printed.out
    assert re.search(r"\d requests waited for it in vain and were computed", printed.out)
    by_length = r"^ +64 +\d+ ms +\d+ ms +[\d.]+x +\d+ ms +[\d.]+x +yes$"
    assert re.search(by_length, printed.out, re.MULTILINE)
    assert "Every token and every logit equals that of a run without offloading" in printed.out


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def watch(monkeypatch: pytest.MonkeyPatch) -> Terminal:
    """Standard error is a terminal. Not a fixture: pytest changes it again before the test."""
    terminal = Terminal()
    monkeypatch.setattr(sys, "stderr", terminal)
    monkeypatch.setenv("TERM", "xterm")
    return terminal


@pytest.mark.usefixtures("_tiny")
def test_progress_is_shown_to_those_who_watch(monkeypatch: pytest.MonkeyPatch) -> None:
    terminal = watch(monkeypatch)
    assert main(["demo", *TINY]) == 0
    shown = terminal.getvalue()
    assert "hybrid: from disk" in shown
    assert "stored by another process" in shown
    assert "first token after" in shown


class ForgetfulMemory(Engine):
    """When the device cache is dropped, bits in every slot of host memory are flipped."""

    def drop_device_cache(self) -> None:
        super().drop_device_cache()
        assert self._connector is not None
        scheduler = self._connector.scheduler
        assert isinstance(scheduler, OffloadingConnectorScheduler)
        manager = scheduler.manager
        assert isinstance(manager, TieringOffloadingManager)
        rows = manager.secondary_tiers[0].rows
        for slot in range(rows.num_rows):
            rows[slot][2] ^= 0x20


@pytest.mark.usefixtures("_tiny")
def test_a_wrong_block_is_noticed(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(server, "Engine", ForgetfulMemory)
    assert main(["demo", "--json", *TINY]) == 1
    report = json.loads(capsys.readouterr().out)
    assert not report["ok"]
    assert not report["identical"]
    wrong = {phase["name"] for phase in report["phases"] if not phase["identical"]}
    # Blocks from a tier were stored before the flip, and are sealed.
    assert wrong == {"host", "hybrid_host"}


class OtherLogits(Engine):
    """With a connector, the logits are wrong and the tokens right."""

    def step(self) -> Any:
        results = super().step()
        if self._connector is not None:
            for result in results:
                assert result.logits is not None
                result.logits[-1] = result.logits[-1] * 2
        return results


@pytest.mark.usefixtures("_tiny")
def test_wrong_logits_are_noticed_though_the_tokens_are_right(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(server, "Engine", OtherLogits)
    assert main(["demo", *TINY]) == 1
    printed = capsys.readouterr().out
    # In each phase and at the one length; only the restarted process is not affected.
    assert len(re.findall(r" NO *$", printed, re.MULTILINE)) == len(PHASES + HYBRID_PHASES)
    (line,) = re.findall(r"^.* yes *$", printed, re.MULTILINE)
    assert line.startswith("from disk, after a restart")
    assert "WRONG  tokens or logits differ" in printed
    assert "Every token" not in printed


@pytest.mark.usefixtures("_tiny")
def test_right_tokens_that_were_computed_again_are_noticed(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(
        OffloadingConnectorScheduler,
        "get_num_new_matched_tokens",
        lambda *_: PrefixMatch(0, is_pending=False),
    )
    assert main(["demo", "--json", *TINY]) == 1
    report = json.loads(capsys.readouterr().out)
    assert report["identical"]
    text = "\n".join(report["problems"])
    assert "from host memory: 32 tokens should have come from host memory" in text
    assert "hybrid: from disk: 32 tokens should have come from a tier" in text
    assert "one of two tiers killed: not cut off" in text
    assert "64 tokens: 48 tokens should have come from host memory" in text
    assert not any(problem.startswith("cold") for problem in report["problems"])


@pytest.mark.usefixtures("_tiny")
def test_host_memory_that_is_not_flushed_is_noticed(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(Engine, "reset_cache", Engine.drop_device_cache)
    assert main(["demo", "--json", *TINY]) == 1
    problems = json.loads(capsys.readouterr().out)["problems"]
    assert any("left in host memory after it was flushed" in problem for problem in problems)
    assert any("should have come from a tier" in problem for problem in problems)


@pytest.mark.usefixtures("_tiny")
def test_a_request_that_does_not_end_is_reported(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    terminal = watch(monkeypatch)
    monkeypatch.setattr(server, "_PATIENCE_S", 0.0)
    monkeypatch.setattr(server, "_PATIENCE_S_PER_TOKEN", 0.0)
    assert main(["demo", "--json", *TINY]) == 1
    report = json.loads(capsys.readouterr().out)
    assert report["problems"] == ["a prompt of 32 tokens was not answered in time"]
    assert terminal.getvalue() == ""  # with --json, nothing even on a terminal


@pytest.mark.usefixtures("_tiny")
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
@pytest.mark.parametrize("num_steps", [0, 25, 60, 130])
def test_it_can_be_interrupted_before_any_step(
    num_steps: int,
    number: signal.Signals,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    check = Interruption.check
    steps = iter(range(10_000))

    def interrupted_check(self: Interruption) -> None:
        if next(steps) == num_steps:
            signal.raise_signal(number)
        check(self)

    monkeypatch.setattr(Interruption, "check", interrupted_check)
    former = signal.getsignal(number)
    assert main(["demo", "--json", *TINY]) == 128 + number
    assert signal.getsignal(number) is former
    printed = capsys.readouterr()
    assert printed.out == ""
    assert "nothing is left behind" in printed.err


Runs = Callable[[EngineTask, Path, Callable[[], None]], Generator[Message, None, None]]


def runs_with(reaction: Callable[[EngineTask, Message], None]) -> Runs:
    """`run_in_process` with a reaction to each message."""

    def run(
        task: EngineTask, folder: Path, check: Callable[[], None]
    ) -> Generator[Message, None, None]:
        for message in process.run_in_process(task, folder, check):
            yield message
            reaction(task, message)

    return run


@pytest.mark.usefixtures("_tiny")
def test_another_process_that_is_killed_is_reported(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def kill(_: EngineTask, message: Message) -> None:
        if isinstance(message, Started):
            os.kill(message.process_id, signal.SIGKILL)

    monkeypatch.setattr(phases, "run_in_process", runs_with(kill))
    assert main(["demo", "--json", *TINY]) == 1
    report = json.loads(capsys.readouterr().out)
    assert report["problems"] == ["from disk, after a restart: the process ended by SIGKILL"]
    assert report["identical"]  # and all other phases are right


@pytest.mark.usefixtures("_tiny")
def test_a_damaged_file_changes_no_token_and_is_noticed(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def turn_bits(task: EngineTask, message: Message) -> None:
        if isinstance(message, Ended):
            path = Path(task.tiers[0]["path"])
            slab = path.read_bytes()
            path.write_bytes(slab[:SLOTS_OFFSET] + bytes(byte ^ 1 for byte in slab[SLOTS_OFFSET:]))

    monkeypatch.setattr(phases, "run_in_process", runs_with(turn_bits))
    assert main(["demo", "--json", *TINY]) == 1
    report = json.loads(capsys.readouterr().out)
    assert report["identical"]
    (problem,) = report["problems"]
    wanted = "from disk, after a restart: 32 tokens should have come from a tier, but 0 came"
    assert problem.startswith(wanted)
    restarted = next(phase for phase in report["phases"] if phase["name"] == "restarted")
    assert any("pages of the index are damaged" in note for note in restarted["notes"])


@pytest.mark.usefixtures("_tiny")
def test_too_little_room_on_disk_is_said_with_a_remedy(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(settings, "WARM_UP_TOKENS", 1 << 36)
    assert main(["demo", *TINY]) == 2
    printed = capsys.readouterr()
    assert printed.out == ""
    assert "left (" in printed.err
    assert "the directory that TMPDIR names" in printed.err


@pytest.mark.usefixtures("_tiny")
def test_too_little_memory_is_said_with_a_remedy(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(phases, "_SPARE_PROMPTS", 1 << 36)
    assert main(["demo", *TINY]) == 2
    printed = capsys.readouterr()
    assert printed.out == ""
    assert "fewer --requests" in printed.err
