"""The flag says to vLLM what the options ask for."""

from __future__ import annotations

import json
import shlex
import subprocess
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvtier.cli import main
from kvtier.cli.vllm_config.flag import RequestedConfig, TierOption, flags_of, transfer_config
from kvtier.config import OffloadingOptions
from tests.cli.vllm_config.running import answer_of, config_in

TEXTS = st.text(st.characters(exclude_categories=["Cs"], exclude_characters="\0"), max_size=40)
NASTY = "/tmp/a 'b' \"c\" $HOME `x` \\ ! \t\n:é\U0001f600"


def printed_config(
    capsys: pytest.CaptureFixture[str], *arguments: str
) -> tuple[dict[str, Any], dict[str, Any]]:
    """The flag's object, and the user's keys in it, which kvtier accepts."""
    assert main(["vllm-config", "--no-check", *arguments]) == 0
    printed = capsys.readouterr()
    assert printed.err == ""
    config = config_in(printed.out)
    keys = config["kv_connector_extra_config"]
    OffloadingOptions.from_extra_config(keys)
    return config, keys


def test_the_connector_is_the_door(capsys: pytest.CaptureFixture[str]) -> None:
    config, keys = printed_config(capsys, "--cpu", "8GiB")
    assert keys == {"cpu_bytes_to_use": "8GiB"}
    assert config == {
        "kv_connector": "KVTierConnector",
        "kv_connector_module_path": "kvtier.integrations.vllm",
        "kv_role": "kv_both",
        "kv_connector_extra_config": keys,
    }


def test_the_plain_door_names_the_spec(capsys: pytest.CaptureFixture[str]) -> None:
    config, keys = printed_config(capsys, "--cpu", "8GiB", "--plain", "--policy", "arc")
    assert config["kv_connector"] == "OffloadingConnector"
    assert config["kv_role"] == "kv_both"
    assert "kv_connector_module_path" not in config
    assert keys == {
        "spec_name": "KVTierOffloadingSpec",
        "spec_module_path": "kvtier.integrations.vllm",
        "cpu_bytes_to_use": "8GiB",
        "eviction_policy": "arc",
    }


def test_every_option_has_its_key(capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["--cpu", "1.5GB", "--namespace", "llama3-8b-v2", "--policy", "arc"]
    arguments += ["--blocks-per-chunk", "4", "--set", "store_threshold=2"]
    arguments += ["--set", "offload_prompt_only=false", "--set", "reset_scope=primary"]
    assert printed_config(capsys, *arguments)[1] == {
        "cpu_bytes_to_use": "1.5GB",
        "cache_namespace": "llama3-8b-v2",
        "eviction_policy": "arc",
        "blocks_per_chunk": 4,
        "store_threshold": 2,
        "offload_prompt_only": False,
        "reset_scope": "primary",
    }


def test_tiers_are_in_the_order_in_which_they_are_given(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = ["--fs", f"{tmp_path}/one:1GiB", "--tier", '{"type": "example", "max_blocks": 3}']
    arguments += ["--cpu", "1GiB", f"--disk={tmp_path}/two:2GiB", "--fs", f"{tmp_path}/three:3GiB"]
    tiers = printed_config(capsys, *arguments)[1]["secondary_tiers"]
    assert tiers == [
        {"type": "fs", "root_dir": f"{tmp_path}/one", "max_bytes": "1GiB"},
        {"type": "example", "max_blocks": 3},
        {"type": "disk", "path": f"{tmp_path}/two", "max_bytes": "2GiB"},
        {"type": "fs", "root_dir": f"{tmp_path}/three", "max_bytes": "3GiB"},
    ]


COLONS = {
    "/d/kv.slab:1GiB": ("/d/kv.slab", "1GiB"),
    "/d/kv.slab": ("/d/kv.slab", None),
    "/d/kv.slab:": ("/d/kv.slab", None),
    "/d/a:b:1.5 TiB": ("/d/a:b", "1.5 TiB"),
    "/d/a:b:": ("/d/a:b", None),
    "/d/a:5GB:": ("/d/a:5GB", None),
}


@pytest.mark.parametrize("given", COLONS)
def test_the_last_colon_separates_the_size(given: str) -> None:
    path, size = COLONS[given]
    entry = TierOption("--disk", given).entry()
    assert (entry["path"], entry.get("max_bytes")) == (path, size)


@given(TEXTS, TEXTS)
def test_any_path_and_any_name_come_through_a_shell(path: str, namespace: str) -> None:
    wishes = RequestedConfig(
        cpu="1GiB",
        tiers=[TierOption("--disk", f"/{path}:1GiB"), TierOption("--fs", f"/{path}:2GiB")],
        namespace=namespace,
    )
    flag = flags_of(transfer_config(wishes.extra_config(), is_plain=False), None)
    assert flag.isascii()
    assert "\n" not in flag
    keys = config_in(flag)["kv_connector_extra_config"]
    assert keys["cache_namespace"] == namespace
    assert [tier.get("path", tier.get("root_dir")) for tier in keys["secondary_tiers"]] == [
        f"/{path}"
    ] * 2


def test_a_real_shell_hands_it_over_unchanged(capsys: pytest.CaptureFixture[str]) -> None:
    _, keys = printed_config(capsys, "--cpu", "1MiB", "--fs", f"{NASTY}:1GiB")
    assert main(["vllm-config", "--no-check", "--cpu", "1MiB", "--fs", f"{NASTY}:1GiB"]) == 0
    flag = capsys.readouterr().out
    for script in (f"printf '%s\\0' {flag}", 'eval "set -- $1"; printf \'%s\\0\' "$@"'):
        shell = subprocess.run(["sh", "-c", script, "sh", flag], capture_output=True, check=True)
        *first, option, text, rest = shell.stdout.decode().split("\0")
        assert (first, option, rest) == (["--shutdown-timeout", "15"], "--kv-transfer-config", "")
        assert json.loads(text)["kv_connector_extra_config"] == keys
    assert keys["secondary_tiers"][0]["root_dir"] == NASTY


def test_the_document_has_the_same_flag(capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["--namespace", "it's"]
    code, document = answer_of(capsys, *arguments, "--no-check")
    assert code == 0
    assert set(document) == {"flag", "environment", "command", "config", "checks", "ok"}
    assert (document["checks"], document["ok"]) == ([], True)
    assert (document["environment"], document["command"]) == ({}, None)
    assert config_in(document["flag"]) == document["config"]
    assert main(["vllm-config", "--cpu", "1MiB", "--no-check", *arguments]) == 0
    assert capsys.readouterr().out == document["flag"] + "\n"


def test_what_outlives_the_process_is_given_time_to_be_stored(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    """vLLM does not wait by default."""
    disk = ["--disk", f"{tmp_path}/kv.slab:1GiB"]
    for arguments, seconds in (
        ([], None),
        (["--tier", '{"type": "example"}'], None),
        (disk, "15"),
        ([*disk, "--set", "shutdown_timeout_ms=30500"], "36"),
    ):
        assert main(["vllm-config", "--no-check", "--cpu", "1MiB", *arguments]) == 0
        flags = shlex.split(capsys.readouterr().out)
        assert flags[:-2] == ([] if seconds is None else ["--shutdown-timeout", seconds])


_PROBE = """
import json, sys
from pydantic import TypeAdapter
from vllm.config import KVTransferConfig
config = TypeAdapter(KVTransferConfig).validate_json(sys.argv[1])
keys = config.kv_connector_extra_config
print(json.dumps([config.kv_connector, config.kv_connector_module_path, config.kv_role, keys]))
"""


@pytest.mark.vllm
def test_vllm_reads_what_was_meant(
    vllm_python: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = ["--fs", f"{NASTY}:1GiB", "--set", "store_threshold=2"]
    config, keys = printed_config(capsys, "--cpu", "8GiB", *arguments)
    read = subprocess.run(
        [str(vllm_python), "-c", _PROBE, json.dumps(config)],
        capture_output=True,
        text=True,
        check=True,
        cwd=tmp_path,
    )
    assert json.loads(read.stdout.splitlines()[-1]) == [
        config["kv_connector"],
        config["kv_connector_module_path"],
        "kv_both",
        keys,
    ]
