"""`kvtier replay --engines`: what it prints, and what it refuses."""

from __future__ import annotations

import json
import os
import signal
from typing import Any

import pytest

from kvtier.cli import main
from kvtier.replay import copies
from tests import traces
from tests.test_architecture import REPO

CHATS = str(traces.CHATS)
PAGE = REPO / "docs" / "replay.md"
POOL = ["--engines", "4", "--host", "2GiB", "--tier", "pool:2GiB,shared=lent"]


def run_json(capsys: pytest.CaptureFixture[str], *arguments: str) -> dict[str, Any]:
    assert main(["replay", CHATS, *arguments, "--json"]) == 0
    printed = capsys.readouterr()
    assert printed.err == ""
    document: dict[str, Any] = json.loads(printed.out)
    return document


def test_one_engine_prints_the_figures_of_no_fleet(capsys: pytest.CaptureFixture[str]) -> None:
    for timing in ("--timing", "--no-timing"):
        options = ["--host", "2GiB", "--tier", "disk:4GiB", timing]
        alone = run_json(capsys, *options)
        fleet = run_json(capsys, *options, "--engines", "1")
        assert alone.pop("fleet") is None
        assert fleet.pop("fleet")["engines"] == 1
        for document in (alone, fleet):
            del document["wall_seconds"], document["settings"]["fleet"]
        assert alone == fleet


def test_the_document_adds_up(capsys: pytest.CaptureFixture[str]) -> None:
    document = run_json(capsys, *POOL, "--copies", "3", "--router", "round-robin")
    fleet = document["fleet"]
    assert document["requests"] == document["timing"]["answered"] == 120
    assert [tier["capacity_blocks"] for tier in document["tiers"]] == [4 * 32, 4 * 32]
    assert sum(engine["requests"] for engine in fleet["by_engine"]) == 120
    received, sent = (
        sum(engine[way] for engine in fleet["by_engine"])
        for way in ("received_bytes", "sent_bytes")
    )
    assert received == sent
    assert fleet["link_bytes"] == received + sent > 0
    seconds = document["timing"]["virtual_seconds"]
    assert fleet["link_bytes_per_s"] == pytest.approx(fleet["link_bytes"] / seconds, rel=1e-3)
    (pool,) = fleet["pools"]
    assert pool["read_bytes"] == document["tiers"][1]["read_bytes"] > pool["local_bytes"] > 0
    assert 0 < pool["foreign_bytes"] <= pool["read_bytes"]
    assert 0 < fleet["duplicate_host_bytes"] < fleet["duplicate_bytes"] < fleet["kept_bytes"]


def test_sharing_finds_what_other_engines_have_computed(capsys: pytest.CaptureFixture[str]) -> None:
    few = run_json(capsys, "--engines", "4", "--no-timing", "--router", "round-robin")
    shared = run_json(capsys, *POOL, "--no-timing", "--router", "round-robin")
    assert shared["hit_blocks"] > few["hit_blocks"]
    assert shared["timing"] is None
    assert shared["fleet"]["link_bytes_per_s"] is None
    replicated = run_json(
        capsys, *POOL[:-1], POOL[-1] + ",replicas=4", "--no-timing", "--router", "round-robin"
    )
    assert replicated["tiers"][1]["capacity_blocks"] == 32
    assert replicated["fleet"]["pools"][0]["room_bytes"] == 8 << 30


def test_copies_have_in_common_what_is_asked_for(capsys: pytest.CaptureFixture[str]) -> None:
    options = ["--engines", "2", "--copies", "2", "--no-timing"]
    shares = [
        run_json(capsys, *options, "--common", common)["fleet"]["common_references_percent"]
        for common in ("0", "20", "100")
    ]
    assert shares[0] == 0
    assert 0 < shares[1] < 100
    assert shares[2] == 100


def test_a_dead_engine_is_told_of(capsys: pytest.CaptureFixture[str]) -> None:
    dying = [
        *POOL,
        "--speed-up",
        "10",
        "--fail",
        "2@50%",
        "--fail",
        "1@70",
        "--restart-after",
        "2s",
    ]
    document = run_json(capsys, *dying)
    fleet = document["fleet"]
    assert fleet["failures"] == 2
    assert document["timing"]["answered"] == 40
    assert document["requests"] <= 40 + fleet["rerouted_requests"]
    assert fleet["pools"][0]["lost_blocks"] > 0
    assert main(["replay", CHATS, *dying]) == 0
    text = capsys.readouterr().out
    assert "\nfailures       2: " in text
    for word in (
        "\nfleet          4 engines",
        "\nlinks   ",
        "\nbalance  ",
        "\nkept  ",
        "\npool   ",
    ):
        assert word in text


def test_many_like_warnings_are_counted(capsys: pytest.CaptureFixture[str]) -> None:
    options = ["--engines", "16", "--copies", "16", "--limit", "20"]
    assert main(["replay", CHATS, *options, "--tier", "nas:16GiB,write_speed=1MB"]) == 0
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == 11
    assert lines[-1].endswith("more warnings like these")


def test_the_page_explains_every_key(capsys: pytest.CaptureFixture[str]) -> None:
    page = PAGE.read_text()
    fleet = run_json(capsys, *POOL)["fleet"]
    keys = {*fleet, *fleet["pools"][0], *fleet["by_engine"][0]}
    assert [key for key in sorted(keys) if f"`{key}`" not in page] == []


WRONG: dict[str, tuple[list[str], str]] = {
    "no engines": (["--engines", "0"], "from 1 to 4096"),
    "too many engines": (["--engines", "5000"], "from 1 to 4096"),
    "a router for one engine": (["--router", "sticky"], "give --engines N, too"),
    "copies for one engine": (["--copies", "2"], "give --engines N, too"),
    "a failure of the only engine": (["--fail", "0@50%"], "give --engines N, too"),
    "an unknown router": (
        ["--engines", "2", "--router", "random"],
        "one of round-robin, sticky, prefix",
    ),
    "no copies": (["--engines", "2", "--copies", "0"], "from 1 to 65536"),
    "common to one copy": (["--engines", "2", "--common", "5"], "give --copies N, too"),
    "more than everything": (
        ["--engines", "2", "--copies", "2", "--common", "101"],
        "percent of the conversations, 0 to 100",
    ),
    "nobody dies": (["--engines", "2", "--restart-after", "5s"], "give --fail ENGINE@PERCENT"),
    "a failure without time": (["--engines", "2", "--fail", "1"], "such as 3@40%"),
    "a failure after the end": (["--engines", "2", "--fail", "1@101%"], "such as 3@40%"),
    "an engine that is not there": (["--engines", "2", "--fail", "2@40%"], "numbers 0 to 1"),
    "everybody dies": (
        ["--engines", "2", "--fail", "0@40%", "--fail", "1@60%"],
        "nobody would be left to serve",
    ),
    "dead already": (
        ["--engines", "2", "--fail", "0@40%", "--fail", "0@41%"],
        "give a shorter --restart-after",
    ),
    "a restart without unit": (
        ["--engines", "2", "--fail", "0@40%", "--restart-after", "5"],
        "us, ms, s",
    ),
    "shared with nobody": (["--tier", "pool:2GiB,shared=lent"], "kvtier replay --engines N"),
    "shared somehow": (
        ["--engines", "2", "--tier", "pool:2GiB,shared=yes"],
        "shared=lent (each engine lends SIZE of its memory to all) or shared=server",
    ),
    "replicas of what is not shared": (
        ["--engines", "2", "--tier", "disk:2TiB,replicas=2"],
        "add shared=lent or shared=server, or leave replicas out",
    ),
    "a link to one's own disk": (
        ["--engines", "2", "--tier", "disk:2TiB,link_speed=3GB"],
        "leave link_speed out",
    ),
    "replicas on a server": (
        ["--engines", "2", "--tier", "nas:2TiB,shared=server,replicas=2"],
        "replicas are for shared=lent",
    ),
    "more replicas than engines": (
        ["--engines", "2", "--tier", "pool:2GiB,shared=lent,replicas=3"],
        "give at most that many replicas, or more --engines",
    ),
    "no replicas": (
        ["--engines", "2", "--tier", "pool:2GiB,shared=lent,replicas=0"],
        "from 1 to 8",
    ),
    "a link without unit": (
        ["--engines", "2", "--tier", "pool:2GiB,shared=lent,link_speed=25"],
        "is the unit right?",
    ),
    "less than a block": (
        ["--engines", "2", "--tier", "pool:1MiB,shared=lent"],
        "one block of 512 tokens has 64 MiB",
    ),
    "too much together": (
        ["--engines", "4096", "--tier", "pool:8000TiB,shared=lent"],
        "give at most",
    ),
}


@pytest.mark.parametrize("case", WRONG)
def test_wrong_input_is_refused_with_a_remedy(
    case: str, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments, remedy = WRONG[case]
    assert main(["replay", CHATS, *arguments]) == 2
    printed = capsys.readouterr()
    assert printed.out == ""
    assert remedy in " ".join(printed.err.split())


def test_plans_are_for_one_engine(capsys: pytest.CaptureFixture[str]) -> None:
    options = ["--kv-bytes-per-token", "128KiB", "--trace", CHATS, "--prefill", "9000"]
    assert main(["plan", *options, "--tier", "pool:2GiB,shared=lent"]) == 2
    assert "there is only one engine" in " ".join(capsys.readouterr().err.split())


@pytest.mark.parametrize("timing", ["--timing", "--no-timing"])
def test_ctrl_c_prints_what_was_counted(
    timing: str,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    copied = copies.FleetLoad._copied

    def copy_and_interrupt(
        self: copies.FleetLoad, position: int, copy: int, arrives_s: float
    ) -> copies.FleetRequest:
        if self.num_served == 60:
            os.kill(os.getpid(), signal.SIGINT)
        return copied(self, position, copy, arrives_s)

    monkeypatch.setattr(copies.FleetLoad, "_copied", copy_and_interrupt)
    arguments = ["replay", CHATS, *POOL, "--copies", "3", timing, "--json"]
    assert main(arguments) == 128 + signal.SIGINT
    document = json.loads(capsys.readouterr().out)
    assert document["complete"] is False
    assert 0 < document["requests"] < 60
