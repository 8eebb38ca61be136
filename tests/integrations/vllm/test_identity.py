"""Which engines have the same identity, with real configurations of stock vLLM."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from kvtier.config import OffloadingModelConfig
from kvtier.config.namespace import DESCRIPTION_BYTES
from kvtier.testing.vllm.tiny_model import LLAMA
from tests.config.sample import make_config

pytestmark = pytest.mark.vllm

REPO = Path(__file__).resolve().parents[3]
COMMITS = {"old": "a" * 40, "new": "b" * 40}
SECRET = "hf_this_is_a_secret"

Identities = Mapping[str, Mapping[str, Any]]


def write_hub(hub: Path, model: Path, name: str, *, edited: bool = False) -> dict[str, Path]:
    """A hub cache as the hub client leaves it: two commits with the same files; main is the newer
    one. `edited`: the weights were changed after the download."""
    repository = hub / f"models--{name.replace('/', '--')}"
    blobs = repository / "blobs"
    blobs.mkdir(parents=True)
    snapshots = {}
    for age, commit in COMMITS.items():
        snapshot = snapshots[age] = repository / "snapshots" / commit
        snapshot.mkdir(parents=True)
        for number, file in enumerate(sorted(model.iterdir())):
            blob = blobs / f"{number:064x}"
            if not blob.exists():
                shutil.copyfile(file, blob)
                os.utime(blob, (1e9 + 3600, 1e9 + 3600) if edited else (1e9, 1e9))
            link = snapshot / file.name
            link.symlink_to(Path("../../blobs", blob.name))
            os.utime(link, (1e9, 1e9), follow_symlinks=False)
    note = repository / "refs" / "main"
    note.parent.mkdir()
    note.write_text(COMMITS["new"])
    os.utime(note, (1e9, 1e9))
    return snapshots


def cases_in(folder: Path) -> dict[str, dict[str, Any]]:
    """Write the models and name the cases: each is the first one with something changed."""
    model = LLAMA.write(folder / "model")
    copy = shutil.copytree(model, folder / "elsewhere" / "copy")
    shutil.copy(copy / "model.safetensors", copy / "moved")  # other times, another inode
    os.replace(copy / "moved", copy / "model.safetensors")
    other_seed = LLAMA.write(folder / "other-seed", seed=1)
    one_bit = shutil.copytree(model, folder / "one-bit")
    with (one_bit / "model.safetensors").open("r+b") as file:
        file.seek(-1000, os.SEEK_END)
        (byte,) = file.read(1)
        file.seek(-1, os.SEEK_CUR)
        file.write(bytes([byte ^ 1]))
    late = shutil.copytree(model, folder / "late")
    tensors = shutil.copytree(model, folder / "tensors")
    (tensors / "model.tensors").write_bytes(b"serialized")
    for name, content in {"scales": "{}", "same": "{}", "other": "[]"}.items():
        (folder / f"{name}.json").write_text(content)
    snapshots = write_hub(folder / "hub", model, "org/tiny")
    edited = write_hub(folder / "hub", model, "org/edited", edited=True)
    moved = write_hub(folder / "hub", model, "org/moved")["new"].parents[1]
    later = time.time() + 3600  # than when any process started; and there is another commit
    os.utime(moved / "refs" / "main", (later, later))

    base: dict[str, Any] = {"model": str(model)}
    by_name = {"args": {"model": "org/tiny"}, "model_config": {"model": "org/tiny"}}

    def with_args(**args: Any) -> dict[str, Any]:
        return {"args": base | args}

    def side_file(name: str) -> dict[str, Any]:
        path = str(folder / f"{name}.json")
        return with_args(hf_overrides={"quantization_config_file": path})

    return {
        "base": with_args(),
        # The same model.
        "copy": with_args(model=str(copy)),
        "eager": with_args(enforce_eager=True),
        "other seed of sampling": with_args(seed=7),
        "other name": with_args(served_model_name="somebody"),
        "less memory": with_args(gpu_memory_utilization=0.3),
        "secret": with_args(hf_token=SECRET),
        "environment without effect": with_args() | {"environment": {"VLLM_PORT": "8123"}},
        "environment of a cluster": with_args()
        | {"environment": {"VLLM_MOE_SERVER_PORT": "tcp://10.0.0.1:8000"}},
        # Other weights.
        "other seed of weights": with_args(model=str(other_seed)),
        "one bit": with_args(model=str(one_bit)),
        "tensorizer": with_args(model=str(tensors), load_format="tensorizer"),
        "snapshot": with_args(model=str(snapshots["new"])),
        "old snapshot": with_args(model=str(snapshots["old"])),
        "edited snapshot": with_args(model=str(edited["new"])),
        "by name": by_name,
        "by name, offline": {"args": {"model": "org/tiny"}},
        "by name and commit": by_name
        | {"model_config": {"model": "org/tiny", "revision": COMMITS["old"]}},
        "by name, moved": {"args": {"model": "org/moved"}, "model_config": {"model": "org/moved"}},
        # Another variant.
        "rope": with_args(hf_overrides={"rope_parameters": {"rope_type": "default"} | THETA}),
        "rope, the old way": with_args(hf_overrides=THETA),
        "files": with_args(load_format="safetensors"),
        "dtype": with_args(dtype="bfloat16"),
        "kv cache dtype": with_args(kv_cache_dtype="fp8"),
        "length": with_args(max_model_len=4096),
        "backend": with_args(attention_backend="CPU_ATTN"),
        "pooling": with_args(runner="pooling"),
        "quantized on load": with_args(quantization="fp8", dtype="bfloat16"),
        "layout": with_args() | {"environment": {"VLLM_KV_CACHE_LAYOUT": "HND"}},
        "side file": side_file("scales"),
        "side file elsewhere": side_file("same"),
        "other side file": side_file("other"),
        "odd values": with_args() | {"odd_values": True},
        # Unknown weights.
        "dummy": with_args(load_format="dummy"),
        "npcache": with_args(load_format="npcache"),
        "unknown loader": with_args(load_format="mine"),
        "lora": with_args(enable_lora=True),
        "not read": with_args() | {"digest_files": False},
        "tensorizer elsewhere": with_args(load_format="tensorizer"),
        "late": with_args(model=str(late))
        | {"changed_after_start": str(late / "model.safetensors")},
        "object store": with_args() | {"model_config": {"model_weights": "s3://bucket/model"}},
        "two repositories": with_args() | {"hf_config": {"text_model_id": "org/text"}},
        "code of others": with_args(trust_remote_code=True)
        | {"hf_config": {"auto_map": {"AutoModel": "org/other--modeling.Model"}}},
        "not in the hub": by_name | {"model_config": {"model": "org/missing"}},
        # Known without reading.
        "snapshot, not read": with_args(model=str(snapshots["new"])) | {"digest_files": False},
    }


THETA = {"rope_theta": 5000.0}

SAME = [
    "copy",
    "eager",
    "other seed of sampling",
    "other name",
    "less memory",
    "secret",
    "environment without effect",
    "environment of a cluster",
]
OTHER_WEIGHTS = ["other seed of weights", "one bit"]
OTHER_VARIANTS = [
    "rope",
    "rope, the old way",
    "files",
    "dtype",
    "kv cache dtype",
    "length",
    "backend",
    "pooling",
    "quantized on load",
    "layout",
    "side file",
    "other side file",
    "odd values",
]
UNKNOWN = {
    "dummy": "the weights are random (load_format is dummy)",
    "npcache": "keeps its own copy",
    "unknown loader": "load_format mine, which kvtier does not know",
    "lora": "LoRA is enabled",
    "not read": "no tier needs that, or cache_namespace is given",
    "tensorizer elsewhere": "elsewhere than local files",
    "late": "changed after this engine had started",
    "object store": "come from an object store",
    "two repositories": "text_model_id",
    "code of others": "--code-revision",
    "not in the hub": "does not say which commit main is; give it with --revision",
    "by name, moved": "may have moved to another commit",
}


def identities(python: Path, folder: Path, cases: object, hash_seed: int) -> Identities:
    process = subprocess.run(
        [python, "-m", "tests.integrations.vllm.identity_probe", folder / "hub"],
        cwd=REPO,
        env=os.environ
        | {
            "PYTHONPATH": str(REPO / "src"),
            "PYTHONHASHSEED": str(hash_seed),
            "TMPDIR": str(folder),
            "XDG_CACHE_HOME": str(folder / f"cache-{hash_seed}"),
        },
        input=json.dumps(cases),
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
    )
    assert process.returncode == 0, process.stderr[-4000:]
    assert SECRET not in process.stdout + process.stderr
    report: Identities = json.loads(process.stdout)
    return report


@pytest.fixture(scope="module")
def twice(
    vllm_python: Path, tmp_path_factory: pytest.TempPathFactory
) -> tuple[Identities, Identities]:
    """The identities of the same engines in two processes."""
    folder = tmp_path_factory.mktemp("vllm-identity")
    cases = cases_in(folder)
    return (
        identities(vllm_python, folder, cases, hash_seed=1),
        identities(vllm_python, folder, cases, hash_seed=2),
    )


@pytest.fixture(scope="module")
def known(twice: tuple[Identities, Identities]) -> Identities:
    return twice[0]


def test_another_process_comes_to_the_same(twice: tuple[Identities, Identities]) -> None:
    first, second = twice
    assert first == second


def test_local_files_are_known_by_their_digest(known: Identities) -> None:
    base = known["base"]
    assert re.fullmatch("files:[0-9a-f]{32}", base["revision"])
    assert base["unknown_because"] is None
    assert re.fullmatch(
        r"vllm-0\.\d+\.\d+ cpu-[-a-z0-9_]+ float32 kv-auto [0-9a-f]{32}", base["variant"]
    )


@pytest.mark.parametrize("case", SAME)
def test_what_does_not_change_blocks_does_not_count(known: Identities, case: str) -> None:
    assert {**known[case], "title": ""} == {**known["base"], "title": ""}


@pytest.mark.parametrize("case", OTHER_WEIGHTS)
def test_other_weights_are_another_revision(known: Identities, case: str) -> None:
    assert known[case]["revision"] != known["base"]["revision"]
    assert known[case]["revision"].startswith("files:")
    assert known[case]["variant"] == known["base"]["variant"]


@pytest.mark.parametrize("case", OTHER_VARIANTS)
def test_what_changes_blocks_is_another_variant(known: Identities, case: str) -> None:
    assert known[case]["revision"] == known["base"]["revision"]
    assert known[case]["variant"] != known["base"]["variant"]


def differences(known: Identities, case: str) -> dict[str, list[Any]]:
    """The settings in which a case differs from the first one, without digests of several."""
    base, other = (dict(known[name]["settings"]) for name in ("base", case))
    names = [name for name in base | other if base.get(name) != other.get(name)]
    wholes = {name.partition(".")[0] for name in names if "." in name}
    return {name: [base.get(name), other.get(name)] for name in names if name not in wholes}


@pytest.mark.parametrize(
    ("case", "setting"),
    [
        ("rope", "hf_config.rope_parameters"),
        ("files", "files"),
        ("dtype", "model.dtype"),
        ("kv cache dtype", "cache.cache_dtype"),
        ("backend", "attention.backend"),
        ("pooling", "runner"),
        ("quantized on load", "model.quantization"),
        ("layout", "environment.VLLM_KV_CACHE_LAYOUT"),
        ("odd values", "additional.odd"),
    ],
)
def test_what_changes_blocks_has_a_name(known: Identities, case: str, setting: str) -> None:
    assert setting in differences(known, case)


def test_the_length_is_named_with_both_values(known: Identities) -> None:
    assert list(differences(known, "length")["max_model_len"])[1] == "4096"
    assert differences(known, "base") == {}


def test_settings_fit_into_a_description_and_have_no_secret(known: Identities) -> None:
    for identity in known.values():
        settings = tuple((name, value) for name, value in identity["settings"])
        model = OffloadingModelConfig(
            "m", "bfloat16", settings=settings, served_name=identity["title"]
        )
        content = make_config(model=model).describe().encode()
        assert len(content) <= DESCRIPTION_BYTES
        assert b"max_model_len" in content
        assert SECRET.encode() not in content
        left_out = [name for name, _ in settings if f'"{name}"'.encode() not in content]
        assert not [name for name in left_out if "." not in name]


def test_the_model_has_the_name_that_people_gave_it(known: Identities) -> None:
    for case in ("by name", "by name, offline", "snapshot"):
        assert known[case]["title"] == "org/tiny"
    assert known["base"]["title"].endswith("/model")


def test_a_file_that_a_configuration_names_counts_by_its_content(known: Identities) -> None:
    assert known["side file elsewhere"] == known["side file"]


def test_no_two_variants_are_the_same(known: Identities) -> None:
    assert len({known[case]["variant"] for case in OTHER_VARIANTS}) == len(OTHER_VARIANTS)


@pytest.mark.parametrize("case", UNKNOWN)
def test_why_weights_are_not_known(known: Identities, case: str) -> None:
    assert known[case]["revision"] is None
    assert UNKNOWN[case] in known[case]["unknown_because"]
    assert not known[case]["unknown_because"].endswith(".")


@pytest.mark.parametrize(
    ("case", "age"),
    [
        ("snapshot", "new"),
        ("snapshot, not read", "new"),
        ("old snapshot", "old"),
        ("by name", "new"),
        ("by name, offline", "new"),
        ("by name and commit", "old"),
    ],
)
def test_the_hub_is_known_by_its_commit(known: Identities, case: str, age: str) -> None:
    assert known[case]["revision"] == f"hub:{COMMITS[age]}"
    assert known[case]["variant"] == known["base"]["variant"]


def test_tensorizer_is_known_by_its_own_file(known: Identities) -> None:
    assert known["tensorizer"]["revision"].startswith("files:")
    assert known["tensorizer"]["revision"] != known["base"]["revision"]


def test_a_hub_cache_that_was_written_to_is_read(known: Identities) -> None:
    assert known["edited snapshot"]["revision"] == known["base"]["revision"]
