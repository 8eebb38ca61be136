"""The forms in which an operator may give a configuration."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from kvtier.cli import main
from kvtier.cli.doctor.source import WrongSource, read_source
from kvtier.config import ConfigError

EXTRA = {"cpu_bytes_to_use": "8GiB"}
FLAG = {"kv_connector": "KVTierConnector", "kv_connector_extra_config": EXTRA}


def script(flag: Any, before: str = "", after: str = "") -> str:
    quoted = f"'{json.dumps(flag)}'"
    return f'exec {before}vllm serve org/model --kv-transfer-config {quoted} {after}"$@"\n'


def test_json_as_text_and_in_files(tmp_path: Path) -> None:
    for number, given in enumerate((EXTRA, FLAG)):
        text = json.dumps(given)
        file = tmp_path / f"{number}.json"
        file.write_text(f"\n  {text}")
        assert read_source(text).extra_config == EXTRA
        assert read_source(str(file)).extra_config == EXTRA
    (tmp_path / "kv.toml").write_text('cpu_bytes_to_use = "8GiB"')
    assert read_source(str(tmp_path / "kv.toml")).extra_config == EXTRA


def test_what_vllm_config_writes(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    main(["vllm-config", "--cpu", "1MiB", "--model", "org/model", "--no-check", "--plain"])
    file = tmp_path / "serve.sh"
    file.write_text(capsys.readouterr().out)
    given = read_source(str(file))
    assert given.extra_config["cpu_bytes_to_use"] == "1MiB"
    assert (given.is_plain, given.model, given.world_size) == (True, "org/model", 1)


def test_a_script_of_ones_own(tmp_path: Path) -> None:
    file = tmp_path / "serve.sh"
    file.write_text(
        "#!/bin/sh\n# --kv-transfer-config is below\nulimit -l unlimited\n"
        + script(FLAG, "env PYTHONHASHSEED=7 ", "--tensor-parallel-size=2 -pp 3 ")
    )
    given = read_source(str(file))
    assert given.extra_config == EXTRA
    assert given.environment["PYTHONHASHSEED"] == "7"
    assert (given.model, given.world_size, given.is_plain) == ("org/model", 6, False)
    assert given.uses_vllm_command
    module = "python -m vllm.entrypoints.openai.api_server --model org/model"
    file.write_text(script(FLAG).replace("vllm serve org/model", module))
    given = read_source(str(file))
    assert (given.model, given.uses_vllm_command) == ("org/model", False)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        (script({"kv_connector": "NixlConnector"}), "does not use kvtier"),
        (script(FLAG) * 2, "has 2 --kv-transfer-config"),
        ("vllm serve m\n", "has no --kv-transfer-config"),
        ("vllm serve 'm\n", "neither JSON nor a script"),
        ("vllm serve m --kv-transfer-config {kv_connector}\n", "does not parse"),
        ('{"kv_connector_extra_config": 7, "kv_connector": "KVTierConnector"}', "is no object"),
        ("\0\xff", "no --kv-transfer-config"),
    ],
)
def test_what_is_no_configuration(text: str, said: str, tmp_path: Path) -> None:
    file = tmp_path / "given"
    file.write_text(text)
    with pytest.raises((WrongSource, ConfigError), match=said):
        read_source(str(file))


def test_files_that_cannot_be_read(tmp_path: Path) -> None:
    (tmp_path / "binary").write_bytes(b"\xff\xfe\x00")
    (tmp_path / "huge").write_bytes(bytes(2 << 20))
    for name, said in {"binary": "not text", "huge": "bytes", "": "directory"}.items():
        with pytest.raises(WrongSource, match=said):
            read_source(str(tmp_path / name))
