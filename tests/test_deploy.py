"""The examples under deploy: what can be checked without the machines that they are for."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from pathlib import Path

import pytest

from kvtier.config import OffloadingOptions
from tests.test_architecture import REPO

DEPLOY = REPO / "deploy"


@pytest.mark.parametrize("name", ["docker/compose.yaml", "kubernetes/vllm-kvtier.yaml"])
def test_the_flag_in_an_example_is_accepted_and_fits_its_container(name: str) -> None:
    text = (DEPLOY / name).read_text()
    (flag,) = re.findall(r"--kv-transfer-config=(\{.*?\}\}\s)", text, re.DOTALL)
    config = json.loads(" ".join(flag.split()))
    assert config["kv_connector_module_path"] == "kvtier.integrations.vllm"
    options = OffloadingOptions.from_extra_config(config["kv_connector_extra_config"])
    (tier,) = options.secondary_tiers
    (folder,) = re.findall(r"mountPath: (/kv)\b|:(/kv)\"", text)
    assert str(Path(tier.options["path"]).parent) in folder
    (shm_gib,) = re.findall(r"shm_size: (\d+)g|sizeLimit: (\d+)Gi", text)
    assert options.cpu_bytes_to_use <= int("".join(shm_gib)) << 30
    (timeout_s,) = re.findall(r"--shutdown-timeout=(\d+)", text)
    (grace_s,) = re.findall(r"stop_grace_period: (\d+)s|terminationGracePeriodSeconds: (\d+)", text)
    assert options.shutdown_timeout_ms / 1000 < int(timeout_s) < int("".join(grace_s))


def test_the_image_copies_what_the_package_is_built_from() -> None:
    text = (DEPLOY / "docker/Dockerfile").read_text()
    for name in re.findall(r"^COPY (.*) \S+$", text, re.MULTILINE):
        assert all((REPO / part).exists() for part in name.split())
    extras = re.findall(r"kvtier\[(.*?)\]", text)[0].split(",")
    declared = (REPO / "pyproject.toml").read_text()
    assert all(re.search(rf"^{extra} = \[", declared, re.MULTILINE) for extra in extras)


@pytest.mark.skipif(not shutil.which("systemd-analyze"), reason="needs systemd-analyze")
def test_systemd_accepts_the_unit(tmp_path: Path) -> None:
    unit = tmp_path / "vllm-kvtier.service"
    unit.write_text((DEPLOY / "systemd/vllm-kvtier.service").read_text())
    ended = subprocess.run(
        ["systemd-analyze", "verify", str(unit)], capture_output=True, text=True, check=False
    )
    ours = [line for line in ended.stderr.splitlines() if "vllm-kvtier" in line]
    assert ours == []
