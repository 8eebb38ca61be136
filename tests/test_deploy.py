"""The examples under deploy: what can be checked without the machines that they are for."""

from __future__ import annotations

import json
import re
import shlex
import shutil
import subprocess
import sys
from contextlib import ExitStack
from pathlib import Path

import pytest

from kvtier.config import OffloadingOptions
from kvtier.tiering.mooncake.admin import MasterAdmin
from kvtier.tiering.mooncake.options import MooncakeOptions
from kvtier.tiering.remote.errors import ServerFailure
from tests.test_architecture import REPO
from tests.tiering.mooncake.pool import package_folder
from tests.tiering.networks import environment_of_tests, private_network
from tests.tiering.patience import wait_until

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


UNITS = sorted((DEPLOY / "systemd").glob("*.service"))


@pytest.mark.skipif(not shutil.which("systemd-analyze"), reason="needs systemd-analyze")
@pytest.mark.parametrize("example", UNITS, ids=lambda path: path.stem)
def test_systemd_accepts_the_unit(example: Path, tmp_path: Path) -> None:
    unit = tmp_path / example.name
    # The program of an example is not installed here, and has to exist.
    unit.write_text(example.read_text().replace("ExecStart=/opt/kvtier/bin/", "ExecStart=/bin/sh "))
    ended = subprocess.run(
        ["systemd-analyze", "verify", str(unit)], capture_output=True, text=True, check=False
    )
    ours = [line for line in ended.stderr.splitlines() if example.name in line]
    assert ours == []


def test_the_pool_in_the_compose_file_is_the_one_of_its_engine() -> None:
    text = (DEPLOY / "docker/mooncake-compose.yaml").read_text()
    (flag,) = re.findall(r"--kv-transfer-config=(\{.*?\}\}\s)", text, re.DOTALL)
    config = json.loads(" ".join(flag.split()))
    options = OffloadingOptions.from_extra_config(config["kv_connector_extra_config"])
    (tier,) = options.secondary_tiers
    pool = MooncakeOptions.parse(tier.options)
    pool.require_fitting()
    (shm_gib,) = re.findall(r"shm_size: (\d+)g", text)
    assert options.cpu_bytes_to_use <= int(shm_gib) << 30
    master, lender = _pool_commands(text, r"(?m)^    command: (>-\n(?:      .*\n)+|kvtier .*\n)")
    assert f"-rpc_port={pool.master.partition(':')[2]}" in master
    assert lender[lender.index("--master") + 1] == pool.master


def _pool_commands(text: str, pattern: str) -> list[list[str]]:
    found = [shlex.split(words.removeprefix(">-")) for words in re.findall(pattern, text)]
    assert found
    return found


@pytest.mark.parametrize("example", ["compose", "units"])
def test_the_commands_of_a_pool_work(example: str, tmp_path: Path) -> None:
    if example == "compose":
        text = (DEPLOY / "docker/mooncake-compose.yaml").read_text()
        pattern = r"(?m)^    command: (>-\n(?:      .*\n)+|kvtier .*\n)"
        commands = _pool_commands(text, pattern)
    else:
        units = (f"systemd/mooncake-{name}.service" for name in ("master", "lend"))
        text = "\n".join((DEPLOY / unit).read_text() for unit in units).replace("\\\n", "")
        commands = _pool_commands(text, r"(?m)^ExecStart=/opt/kvtier/bin/(.*)$")
    programs = {
        "mooncake_master": [str(package_folder() / "mooncake_master")],
        "kvtier": [sys.executable, "-m", "kvtier"],
    }
    pool = MasterAdmin(("127.0.0.1", 9003))
    with ExitStack() as stack:
        stack.enter_context(private_network())
        for number, (program, *words) in enumerate(commands):
            process = subprocess.Popen(
                [*programs[program], *map(_here, words)],
                env=environment_of_tests(),
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
            )
            stack.callback(process.wait)
            stack.callback(process.kill)
            wait_until(lambda least=number: _lent_to(pool) >= least, f"{program} is up")  # type: ignore[misc]
        assert pool.use().capacity_bytes == 64 << 20


def _here(word: str) -> str:
    """A word of an example's command, with this machine's addresses, and less memory."""
    for there in ("${ADDRESS}", "0.0.0.0"):
        word = word.replace(there, "127.0.0.1")
    for there in ("${MASTER}", "master:50051"):
        word = word.replace(there, "127.0.0.1:50051")
    for there in ("${SIZE}", "64GiB"):
        word = word.replace(there, "64MiB")
    return word


def _lent_to(pool: MasterAdmin) -> int:
    """Number of lenders; below 0 if there is no pool yet."""
    try:
        return pool.use().num_segments
    except ServerFailure:
        return -1
