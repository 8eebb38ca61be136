"""Checks of the files that keys of the configuration name: of seal keys, and of a recording."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from tests.cli.vllm_config.running import answer_of, finding

KEY = "0123456789abcdef" * 4


def _status(
    capsys: pytest.CaptureFixture[str], key: str, path: Path, words: str
) -> tuple[int, str]:
    code, document = answer_of(capsys, "--set", f"{key}={path}")
    found = finding(document, key)
    assert words in f"{found['found']} -> {found['remedy']}"
    return code, found["status"]


@pytest.mark.parametrize("option", ["seal_key_file", "tenant_key_file"])
def test_secret_keys(option: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "keys"
    assert _status(capsys, option, path, "openssl rand -hex 32") == (1, "problem")
    for content, mode, words, expected in (
        ("", 0o600, "it has no key", (1, "problem")),
        (f"{KEY}\nsecret\n", 0o600, "key 2 is not one", (1, "problem")),
        (KEY, 0o622, "only its owner may write", (1, "problem")),
        (KEY, 0o600, "has keys", (0, "ok")),
    ):
        path.write_text(content)
        path.chmod(mode)
        assert _status(capsys, option, path, words) == expected


def test_seal_keys_that_every_user_can_read(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "keys"
    path.write_text(KEY)
    path.chmod(0o644)
    code, document = answer_of(capsys, "--set", f"seal_key_file={path}")
    assert code == 0
    assert "every user of this machine" in finding(document, "configuration")["found"]
    assert KEY not in str(document)


def test_a_recording(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "trace.jsonl"
    assert _status(capsys, "record_trace", path, "256 MiB") == (0, "ok")
    assert not path.exists()
    path.write_text("an earlier one")
    assert _status(capsys, "record_trace", path, "record nothing") == (0, "warning")
    away = tmp_path / "missing" / "trace.jsonl"
    assert _status(capsys, "record_trace", away, "is not there") == (1, "problem")


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write everywhere")
def test_a_recording_in_a_locked_directory(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    tmp_path.chmod(0o500)
    path = tmp_path / "trace.jsonl"
    assert _status(capsys, "record_trace", path, "may not be written") == (1, "problem")
