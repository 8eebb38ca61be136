"""Input that is refused on any machine: a remedy on standard error, and no output."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from kvtier.cli import main
from tests.cli.vllm_config.running import run_apart

WRONG = {
    "no size of host memory": (["--namespace", "x"], "--cpu", "Missing"),
    "a size that is none": (["--cpu", "8G"], "--cpu: cpu_bytes_to_use", "8GiB"),
    "no memory at all": (["--cpu", "0"], "--cpu: cpu_bytes_to_use", "above 0"),
    "a policy that is none": (["--cpu", "1GiB", "--policy", "arcc"], "--policy", '"arc"'),
    "half a block": (["--cpu", "1GiB", "--blocks-per-chunk", "0"], "--blocks-per-chunk", "1 or"),
    "no ranks": (["--cpu", "1GiB", "--world-size", "0"], "--world-size", "x>=1"),
    "a name without letters": (["--cpu", "1GiB", "--namespace", " "], "--namespace", "one letter"),
    "a colon that separates no size": (
        ["--cpu", "1GiB", "--disk", "/mnt/a:b"],
        "--disk",
        "If the colon is part of the path",
    ),
    "half a path": (["--cpu", "1GiB", "--disk", "kv/kv.slab:1GiB"], "--disk", "whole path"),
    "a directory for a slab": (["--cpu", "1GiB", "--disk", "/no/where/:1GiB"], "--disk", "a file"),
    "a slab without room": (["--cpu", "1GiB", "--disk", "/kv.slab:1B"], "--disk", "36896 or more"),
    "a directory without size": (["--cpu", "1GiB", "--fs", "/tmp/kv"], "--fs", "max_bytes"),
    "a directory without room": (["--cpu", "1GiB", "--fs", "/tmp/kv:1B"], "--fs", "at least"),
    "a tier that is no JSON": (["--cpu", "1GiB", "--tier", "{"], "--tier", '"type": "disk"'),
    "a tier that is no object": (["--cpu", "1GiB", "--tier", "[]"], "--tier", '"type": "disk"'),
    "a tier without type": (["--cpu", "1GiB", "--tier", "{}"], "--tier", "type"),
    "a type that is none": (["--cpu", "1GiB", "--tier", '{"type": "disc"}'], "--tier", '"disk"'),
    "a tier's key that is none": (
        ["--cpu", "1GiB", "--tier", '{"type": "disk", "path": "/kv.slab", "threads": 3}'],
        "--tier: secondary_tiers[0].threads",
        '"io_threads"',
    ),
    "a tier's value that is none": (
        ["--cpu", "1GiB", "--tier", '{"type": "disk", "path": "/kv.slab", "io_threads": 0}'],
        "--tier: secondary_tiers[0].io_threads",
        "1 or more",
    ),
    "a tier's policy that is none": (
        ["--cpu", "1GiB", "--tier", '{"type": "disk", "path": "/kv.slab", "eviction_policy": "x"}'],
        "--tier: secondary_tiers[0].eviction_policy",
        "arc, density, lru",
    ),
    "a setting without value": (
        ["--cpu", "1GiB", "--set", "store_threshold"],
        "--set",
        "key=value",
    ),
    "a setting that is none": (["--cpu", "1GiB", "--set", "stor_threshold=1"], "--set", "Did you"),
    "a setting twice": (
        ["--cpu", "1GiB", "--set", "store_threshold=1", "--set", "store_threshold=2"],
        "--set",
        "leave one out",
    ),
    "a setting with an option of its own": (
        ["--cpu", "1GiB", "--set", "cpu_bytes_to_use=1"],
        "--set",
        "use --cpu",
    ),
    "a number as text": (["--cpu", "1GiB", "--set", 'store_threshold="2"'], "--set", "without q"),
    "a number without end": (["--cpu", "1GiB", "--set", "engine_config=1e999"], "option", "number"),
    "an unknown option": (["--cpu", "1GiB", "--gpu"], "--gpu", "--help"),
}


@pytest.mark.parametrize("case", WRONG)
def test_wrong_input_is_refused_with_a_remedy(
    case: str, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments, option, remedy = WRONG[case]
    for more in ([], ["--json"], ["--no-check"]):
        assert main(["vllm-config", *arguments, *more]) == 2
        printed = capsys.readouterr()
        assert printed.out == ""
        assert option in printed.err
        assert remedy in printed.err


def test_all_that_is_wrong_with_the_tiers_is_said_at_once(
    capsys: pytest.CaptureFixture[str],
) -> None:
    arguments = ["--cpu", "1GiB", "--policy", "x", "--fs", "/kv:1B", "--disk", "kv.slab:1GiB"]
    assert main(["vllm-config", *arguments]) == 2
    lines = capsys.readouterr().err.splitlines()
    assert [line.split(": ")[1] for line in lines] == ["--policy", "--fs", "--disk"]


def test_a_name_that_is_no_text_is_refused() -> None:
    """vLLM reads JSON in UTF-8, which cannot hold other bytes."""
    ended = run_apart("--cpu", "1GiB", "--fs", os.fsdecode(b"/mnt/caf\xe9:1GiB"), "--no-check")
    assert ended.returncode == 2
    assert ended.stdout == ""
    assert "/mnt/caf\\udce9 is not UTF-8" in ended.stderr


def test_a_path_of_another_machine_is_not_wrong(capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["--cpu", "1GiB", "--no-check", "--disk", "/no/where/kv.slab:1GiB"]
    assert main(["vllm-config", *arguments, "--fs", "/no/where/else:1GiB"]) == 0
    assert Path("/no").exists() is False


def test_secrets_are_not_in_what_is_said(capsys: pytest.CaptureFixture[str]) -> None:
    tier = '{"type": "disk", "path": "/kv.slab", "password": "hunter22"}'
    assert main(["vllm-config", "--cpu", "1GiB", "--tier", tier]) == 2
    printed = capsys.readouterr()
    assert "password" in printed.err
    assert "hunter22" not in printed.err
