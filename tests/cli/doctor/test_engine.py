"""`kvtier doctor --engine`: what keeps a running engine from using a tier, in one command."""

from __future__ import annotations

import json
import os
import re
import socket
import subprocess
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from kvtier.base import OffloadKey
from kvtier.cli import main
from kvtier.config import NamespaceDescription, OffloadingConfig
from kvtier.observe import client
from kvtier.testing import TierHarness
from tests.cli.doctor.running import finding
from tests.cli.store.roots import balance_of, fill_root
from tests.cli.store.slabs import GEOMETRY, fill
from tests.tiering.engine import Engine, engine_with
from tests.tiering.patience import wait_until

ROWS = 16
LIARS = "tests.cli.doctor.liars"


@pytest.fixture(autouse=True)
def run_dir(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("KVTIER_RUN_DIR", str(tmp_path / "run"))
    return tmp_path / "run"


def engine_on(tier: dict[str, Any], **options: Any) -> Engine:
    return engine_with(tier, num_rows=ROWS, namespace="weights", **options)


def prompt(number: int) -> list[OffloadKey]:
    return TierHarness.keys(8, start=8 * number)


def serve(engine: Engine, *numbers: int) -> None:
    """Serve these prompts. Host memory has room for two."""
    for number in numbers:
        engine.serve(prompt(number))
        engine.settle()


def examine(engine: Engine, capsys: pytest.CaptureFixture[str]) -> tuple[int, dict[str, Any]]:
    """The exit code and the JSON document."""
    assert engine.manager.observer is not None
    engine.manager.observer.due_s = 0.0  # it collects at the end of the next step
    engine.step()
    code = main(["doctor", "--engine", "--json"])
    printed = capsys.readouterr()
    assert printed.err == ""
    document: dict[str, Any] = json.loads(printed.out)
    assert document["ok"] is (code == 0)
    return code, document


def test_an_engine_that_works(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    slab = tmp_path / "kv.slab"
    entry = {"type": "disk", "path": str(slab), "max_bytes": GEOMETRY.needed_bytes}
    with engine_on(entry) as engine:
        serve(engine, *range(5), 0)  # the first is not in host memory any more
        code, document = examine(engine, capsys)
        assert (code, document["engine"]["model"]) == (0, "model")
        use = finding(document, "0:disk.use")
        assert (use["status"], use["found"]) == (
            "ok",
            "40 blocks stored, 8 found by requests, 8 loaded",
        )
        canary = finding(document, "0:disk.canary")
        assert canary["found"].startswith("not sent: only the engine may open its slab")
        assert finding(document, "host.use")["status"] == "ok"
        assert engine.serve(prompt(1)) == 8
    assert [path.name for path in tmp_path.glob("*.slab*")] == ["kv.slab"]


def test_a_canary_goes_through_a_tier_that_others_may_open(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    root = tmp_path / "root"
    with engine_on({"type": "fs", "root_dir": str(root), "max_bytes": "64MiB"}) as engine:
        serve(engine, *range(3))
        before = balance_of(root).num_blocks
        _, document = examine(engine, capsys)
        assert finding(document, "0:fs.canary")["status"] == "ok"
        assert balance_of(root).num_blocks == before == 24


def test_stores_without_loads(capsys: pytest.CaptureFixture[str]) -> None:
    with engine_on({"type": "example"}) as engine:
        serve(engine, *range(4))
        code, document = examine(engine, capsys)
    found = finding(document, "0:example.use")
    assert (code, found["status"]) == (0, "warning")
    assert found["found"].startswith("stores without loads: 32 blocks stored")


# --- a server that caches nothing --------------------------------------------------------------


@pytest.mark.parametrize("kind", ["disk", "fs"])
def test_blocks_of_another_namespace(
    kind: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    if kind == "disk":
        entry: dict[str, Any] = {"type": "disk", "path": str(tmp_path / "kv.slab")}
        fill(tmp_path / "kv.slab", TierHarness.keys(5))
    else:
        root = tmp_path / "root"
        entry = {"type": "fs", "root_dir": str(root), "max_bytes": "64MiB"}
        fill_root(root, TierHarness.keys(5))
    with engine_on(entry) as engine:
        wait_until(lambda: bool(engine.tier.start_remark), "the tier has looked")
        serve(engine, 7)
        code, document = examine(engine, capsys)
    found = finding(document, f"0:{kind}.start")
    assert found["found"].startswith("wrong fingerprint: ")
    assert "holds 5 blocks of the model sample, and this engine runs model" in found["found"]
    assert (code, found["status"]) == (0, "warning")  # models may share a storage


def test_a_wrong_hash_seed(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def seeded(seed: int) -> Engine:
        def described(config: OffloadingConfig, *arguments: Any) -> NamespaceDescription:
            return replace(describe(config, *arguments), hash_root=f"PYTHONHASHSEED={seed}")

        monkeypatch.setattr(OffloadingConfig, "describe", described)
        path = str(tmp_path / "kv.slab")
        tier = {"type": "disk", "path": path, "max_bytes": GEOMETRY.needed_bytes}
        return engine_on(tier, prefill_tokens_per_s=None)

    describe = OffloadingConfig.describe
    with seeded(1) as engine:
        serve(engine, *range(4))
    with seeded(2) as engine:
        serve(engine, *range(4, 6))  # with another seed, prompts have other hashes
        code, document = examine(engine, capsys)
    # The engine has loaded some at its start, to measure the tier.
    assert finding(document, "0:disk.use")["found"].endswith("0 found by requests, 9 loaded")
    found = finding(document, "0:disk.start")
    assert (code, found["status"]) == (1, "problem")
    assert found["found"].startswith("wrong hash seed: ")
    assert "PYTHONHASHSEED=1, now PYTHONHASHSEED=2" in found["found"]
    assert found["remedy"].startswith("Start all engines with the same PYTHONHASHSEED")
    assert document["verdict"] == "1 problem: 0:disk.start"


def test_the_hash_seed_of_an_engine_that_runs_in_a_container(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """It tells a process id that is another process's here. This doctor may have another vLLM."""
    tier = {"type": "disk", "path": str(tmp_path / "kv.slab"), "max_bytes": GEOMETRY.needed_bytes}
    environment = {"PATH": os.environ["PATH"], "PYTHONHASHSEED": "4711"}
    stranger = subprocess.Popen(["sleep", "600"], env=environment)
    try:
        with engine_on(tier) as engine:
            observer = engine.manager.observer
            assert observer is not None
            about = observer.about["engine"]
            about["pid"] = stranger.pid
            about["namespace"]["made_of"]["vllm"] = "0.32.0"
            _, document = examine(engine, capsys)
    finally:
        stranger.kill()
        stranger.wait()
    found = finding(document, "hash_seed")
    assert found["status"] == "ok"
    assert found["found"].startswith("block hashes are the same in every process")
    assert "4711" not in found["found"]


def test_a_full_quota(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    root = tmp_path / "root"
    fill_root(root, TierHarness.keys(300), namespace="others")
    max_bytes = balance_of(root).total + (1 << 15)
    entry = {"type": "fs", "root_dir": str(root), "max_bytes": max_bytes}
    with engine_on(entry) as engine:
        serve(engine, *range(12))
        code, document = examine(engine, capsys)
    found = finding(document, "0:fs.full")
    assert (code, found["status"]) == (1, "problem")
    assert re.match(r"there was no room for \d+ blocks, and room for 0", found["found"])
    assert "kvtier store gc" in found["remedy"]
    assert document["verdict"] == "2 problems: 0:fs.full, 0:fs.canary"
    assert finding(document, "0:fs.canary")["found"].startswith("the quota is full")
    assert balance_of(root).num_blocks == 300


def test_a_tier_full_of_blocks_of_its_own(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    entry = {"type": "fs", "root_dir": str(tmp_path / "root"), "max_bytes": "3MiB"}
    with engine_on(entry) as engine:
        serve(engine, *range(40))
        code, document = examine(engine, capsys)
        assert code == 0, document
    assert finding(document, "0:fs.canary")["found"].startswith("not stored: the tier is full")
    with engine_on(entry) as engine:  # it has served nothing yet
        code, document = examine(engine, capsys)
        assert code == 0, document
    assert finding(document, "0:fs.canary")["found"].startswith("not stored: the tier is full")


def test_a_guard_that_declines(capsys: pytest.CaptureFixture[str]) -> None:
    late = {"type": "example", "simulate_async": True, "latency_ms": 50}
    with engine_on(late, prefill_tokens_per_s=1_000_000) as engine:
        serve(engine, *list(range(6)) * 12)
        code, document = examine(engine, capsys)
    found = finding(document, "0:example.guard")
    assert (code, found["status"]) == (1, "problem")
    assert "loading would take longer than computing (slower " in found["found"]
    assert "The engine computes 1,000,000 prompt tokens per second" in found["found"]
    assert "kvtier bench" in found["remedy"]
    assert document["verdict"] == "1 problem: 0:example.guard"


def test_an_open_breaker(capsys: pytest.CaptureFixture[str]) -> None:
    with engine_on({"type": "CannotStore", "module_path": LIARS}) as engine:
        serve(engine, *range(8))
        code, document = examine(engine, capsys)
    found = finding(document, "0:CannotStore.breaker")
    assert (code, found["status"]) == (1, "problem")
    assert "the tier is cut off for stores" in found["found"]
    assert finding(document, "0:CannotStore.errors")["status"] == "problem"


def test_stores_that_are_off(capsys: pytest.CaptureFixture[str]) -> None:
    with engine_on({"type": "example", "write": "second_use"}) as engine:
        serve(engine, *range(4))
        _, document = examine(engine, capsys)
    found = finding(document, "0:example.stores")
    assert found["status"] == "warning"
    assert "because the write policy decided so" in found["found"]
    assert '"through"' in found["remedy"]
    with engine_on({"type": "example"}, store_threshold=2) as engine:
        serve(engine, *range(4))
        _, document = examine(engine, capsys)
    found = finding(document, "host.stores")
    assert "store_threshold keeps out prompts" in found["found"]


def test_stores_that_are_switched_off(capsys: pytest.CaptureFixture[str]) -> None:
    with engine_on({"type": "example"}) as engine:
        assert main(["switch", "--stores", "off", "--tier", "0:example"]) == 0
        capsys.readouterr()
        serve(engine, *range(4))
        code, document = examine(engine, capsys)
    found = finding(document, "switch.stores")
    assert (code, found["status"]) == (1, "problem")
    assert found["found"] == "stores are switched off: 0:example"
    assert found["remedy"].endswith("kvtier switch --stores on")
    assert "because stores are switched off" in finding(document, "0:example.stores")["found"]


def test_damaged_blocks(capsys: pytest.CaptureFixture[str]) -> None:
    with engine_on({"type": "OfAnotherNamespace", "module_path": LIARS}) as engine:
        serve(engine, *range(5), 0)
        _, document = examine(engine, capsys)
    found = finding(document, "0:OfAnotherNamespace.seals")
    assert found["status"] == "warning"
    assert "fingerprint 8" in found["found"]


# --- which engine ------------------------------------------------------------------------------


def test_no_engine(capsys: pytest.CaptureFixture[str]) -> None:
    for arguments in ([], ["12345"], ["/nowhere/s"]):
        assert main(["doctor", "--engine", *arguments]) == 2
        printed = capsys.readouterr()
        assert printed.out == ""
        assert printed.err.startswith("kvtier doctor: ")
        assert printed.err.count("\n") == 1


def test_options_that_a_running_engine_does_not_need(capsys: pytest.CaptureFixture[str]) -> None:
    for option in ("--model", "--prefill", "--namespace"):
        assert main(["doctor", "--engine", option, "1"]) == 2
        assert f"Invalid value for {option}: not with --engine" in capsys.readouterr().err


def test_an_engine_that_does_not_answer(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(client, "_TIMEOUT_S", 0.2)
    path = tmp_path / "s"
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as silent:
        silent.bind(str(path))
        silent.listen(8)
        assert main(["doctor", "--engine", str(path), "--json"]) == 1
    document = json.loads(capsys.readouterr().out)
    found = finding(document, "engine")
    assert (found["status"], "no answer within" in found["found"]) == ("problem", True)
