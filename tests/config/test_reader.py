"""The user's keys from files and texts."""

from __future__ import annotations

from pathlib import Path

import pytest

from kvtier.config import ConfigError, load_user_config, parse_user_config
from tests.config.sample import GiB, make_config


def test_json_and_toml_files_say_the_same(tmp_path: Path) -> None:
    as_json, as_toml = tmp_path / "kv.json", tmp_path / "kv.TOML"
    as_json.write_text('\ufeff{"cpu_bytes_to_use": "1GiB", "secondary_tiers": [{"type": "fs"}]}')
    as_toml.write_text('cpu_bytes_to_use = "1GiB"\n[[secondary_tiers]]\ntype = "fs"\n')
    expected = {"cpu_bytes_to_use": "1GiB", "secondary_tiers": [{"type": "fs"}]}
    assert load_user_config(as_json) == expected
    assert load_user_config(str(as_toml)) == expected
    assert make_config(load_user_config(as_json)).num_blocks == GiB // 65536


FILE_MISTAKES = {
    "suffix": ("kv.yaml", b"a: 1", "the suffix '.yaml'", "a .json or .toml file"),
    "encoding": ("kv.json", b'{"a": "\xff"}', "can't decode byte 0xff", "a readable UTF-8 file"),
    "syntax": ("kv.json", b'{"a": 1,}', "line 1 column", "valid JSON"),
    "toml syntax": ("kv.toml", b"a = x\n", "line 1", "valid TOML"),
    "twice": ("kv.json", b'{"x": {"a": 1, "a": 2}}', "'a' appears twice", "valid JSON"),
    "twice in toml": ("kv.toml", b"a = 1\na = 2\n", "overwrite", "valid TOML"),
    "nan": ("kv.json", b'{"a": NaN}', "NaN is not JSON", "valid JSON"),
    "endless": ("kv.json", b"9" * 5000, "does not parse", "valid JSON"),
    "deep": ("kv.json", b"[" * 100_000, "does not parse", "valid JSON"),
    "no object": ("kv.json", b"[1]", "a list at the top", "an object with the user's keys"),
}


@pytest.mark.parametrize("case", FILE_MISTAKES)
def test_a_file_that_cannot_be_read_is_refused_by_name(case: str, tmp_path: Path) -> None:
    name, content, given_, allowed = FILE_MISTAKES[case]
    path = tmp_path / name
    path.write_bytes(content)
    with pytest.raises(ConfigError) as refused:
        load_user_config(path)
    (problem,) = refused.value.problems
    assert problem.key == str(path)
    assert given_ in problem.given
    assert problem.allowed == allowed


def test_a_file_in_another_language_is_to_be_converted(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"kv\.yaml: .*Convert it to JSON or TOML\."):
        load_user_config(tmp_path / "kv.yaml")


def test_a_file_that_is_not_there_is_refused_by_name(tmp_path: Path) -> None:
    with pytest.raises(
        ConfigError, match=r"none\.json: got .*No such file .*; allowed: a readable"
    ):
        load_user_config(tmp_path / "none.json")


def test_a_text_is_refused_by_the_name_of_its_source() -> None:
    with pytest.raises(ConfigError, match=r"^--extra: got a text that does not parse"):
        parse_user_config("{", "json", source="--extra")
