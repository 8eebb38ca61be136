"""One command writes a model that vLLM can serve, the same for the same seed."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from kvtier.testing.vllm.tiny_model import LLAMA, VOCABULARY, WORDS, main


def test_every_token_is_a_word_of_its_own() -> None:
    assert len(WORDS) == len(set(WORDS)) == VOCABULARY
    assert all(re.fullmatch(r"\w+", word) for word in WORDS[3:])


def test_the_tokenizer_knows_all_words_and_the_marks_of_the_model(tmp_path: Path) -> None:
    folder = LLAMA.write(tmp_path / "model")
    config = json.loads((folder / "config.json").read_text())
    tokenizer = json.loads((folder / "tokenizer.json").read_text())
    settings = json.loads((folder / "tokenizer_config.json").read_text())
    vocabulary = tokenizer["model"]["vocab"]
    assert [vocabulary[word] for word in WORDS] == list(range(VOCABULARY))
    assert vocabulary[settings["bos_token"]] == config["bos_token_id"]
    assert vocabulary[settings["eos_token"]] == config["eos_token_id"]


@pytest.mark.parametrize(
    ("flags", "architecture"), [([], "LlamaForCausalLM"), (["--hybrid"], "Gemma3ForCausalLM")]
)
def test_the_command_writes_a_model_and_says_what_it_is(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], flags: list[str], architecture: str
) -> None:
    assert main([str(tmp_path / "model"), *flags]) == 0
    said = capsys.readouterr().out
    assert architecture in said
    assert WORDS[-1] in said
    assert (tmp_path / "model" / "model.safetensors").stat().st_size > 0


def test_weights_depend_on_the_seed_alone(tmp_path: Path) -> None:
    weights = []
    for place, seed in enumerate(("0", "0", "1")):
        assert main([str(tmp_path / str(place)), "--seed", seed]) == 0
        weights.append((tmp_path / str(place) / "model.safetensors").read_bytes())
    assert weights[0] == weights[1] != weights[2]


def test_a_folder_that_is_there_is_left_alone(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([str(tmp_path)]) == 2
    assert f"{tmp_path} exists already" in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []


def test_a_folder_that_cannot_be_made_is_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "file").touch()
    assert main([str(tmp_path / "file" / "model")]) == 1
    assert "Not a directory" in capsys.readouterr().err


@pytest.mark.parametrize("seed", ["-1", "one", "", "²"])
def test_a_seed_that_is_no_number_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], seed: str
) -> None:
    with pytest.raises(SystemExit):
        main([str(tmp_path / "model"), f"--seed={seed}"])
    assert "no whole number from 0 up" in capsys.readouterr().err
