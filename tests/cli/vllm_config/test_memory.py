"""Host memory: too little of it is found before an engine starts."""

from __future__ import annotations

import json
import os
import re
import resource
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

from kvtier.cli.checks.finding import Finding, Status
from kvtier.cli.checks.host import Machine, check_memlock, check_memory, check_ranks
from kvtier.cpu.shared_offload_region import SharedOffloadRegion
from tests.cli.vllm_config.running import finding, run_apart
from tests.tiering.disk.small_disk import small_tmpfs

PAGE = resource.getpagesize()
KIB, MIB, GIB = 2**10, 2**20, 2**30


def judged(name: str, cpu_bytes: int, machine: Machine) -> Finding:
    (found,) = [each for each in check_memory(cpu_bytes, machine) if each.name == name]
    return found


# --- shared memory -----------------------------------------------------------------------------


def test_a_container_with_dockers_default_shared_memory() -> None:
    if os.geteuid() != 0 or shutil.which("unshare") is None:
        pytest.skip("another /dev/shm needs root and unshare")
    mount = 'mount -t tmpfs -o size=64m tmpfs /dev/shm && exec "$@"'
    before = ("unshare", "--mount", "sh", "-c", mount, "sh")
    ended = run_apart("--cpu", "1GiB", before=before)
    if "mount:" in ended.stderr or "unshare" in ended.stderr:
        pytest.skip(f"no mounts here: {ended.stderr.strip()}")
    assert ended.returncode == 1
    assert ended.stdout.startswith("--kv-transfer-config '{")  # the flag is printed all the same
    assert ended.stdout.count("\n") == 1
    assert "PROBLEM  shared_memory  /dev/shm (64 MiB in all) has 64 MiB free" in ended.stderr
    assert "--shm-size=1025m" in ended.stderr
    assert "lower cpu_bytes_to_use (--cpu) to 63MiB at most" in ended.stderr
    ended = run_apart("--cpu", "63MiB", "--json", before=before)
    assert finding(json.loads(ended.stdout), "shared_memory")["status"] == "ok"


def test_what_is_said_to_fit_fits(tmp_path: Path) -> None:
    with small_tmpfs(tmp_path, 8 * MIB) as root:
        machine = Machine(shared_memory=root)
        found = judged("shared_memory", 8 * MIB, machine)
        assert found.status is Status.PROBLEM
        fits = re.search(r"lower cpu_bytes_to_use \(--cpu\) to (\d+)MiB at most", found.remedy)
        assert fits
        cpu_bytes = int(fits[1]) * MIB
        assert judged("shared_memory", cpu_bytes, machine).status is Status.OK
        region = SharedOffloadRegion(
            "engine", cpu_bytes // PAGE, 0, PAGE, PAGE, directory=str(root)
        )
        region.cleanup()


def test_regions_of_engines_may_be_gone_by_then(tmp_path: Path) -> None:
    with small_tmpfs(tmp_path, 4 * MIB) as root:
        region = SharedOffloadRegion("engine", 2 * MIB // PAGE, 0, PAGE, PAGE, directory=str(root))
        try:
            found = judged("shared_memory", 3 * MIB, Machine(shared_memory=root))
            assert found.status is Status.WARNING
            assert "Shared memory of kvtier engines takes" in found.found
            too_much = judged("shared_memory", 5 * MIB, Machine(shared_memory=root))
            assert too_much.status is Status.PROBLEM
        finally:
            region.cleanup()
        assert judged("shared_memory", 3 * MIB, Machine(shared_memory=root)).status is Status.OK


def test_no_shared_memory_at_all(tmp_path: Path) -> None:
    (found,) = check_memory(MIB, Machine(shared_memory=tmp_path / "missing"))
    assert (found.name, found.status) == ("shared_memory", Status.PROBLEM)
    assert "Mount a tmpfs there" in found.remedy


# --- the memory itself -------------------------------------------------------------------------


def test_more_than_the_machine_has() -> None:
    found = judged("memory", 2**50, Machine())
    assert found.status is Status.PROBLEM
    assert found.remedy.startswith(
        "Free memory on this machine, or lower cpu_bytes_to_use (--cpu) to "
    )
    assert judged("memory", MIB, Machine()).status is Status.OK


def container(tmp_path: Path, files: dict[str, str], membership: str) -> Machine:
    mount = tmp_path / "cgroup"
    for name, text in files.items():
        path = mount / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    (tmp_path / "membership").write_text(membership)
    return Machine(cgroup_membership=tmp_path / "membership", cgroup_mount=mount)


V2 = {"memory.max": f"{10 * GIB}\n", "memory.current": f"{2 * GIB}\n", "memory.stat": "anon 1\n"}
V1 = {
    "memory/memory.limit_in_bytes": f"{10 * GIB}\n",
    "memory/memory.usage_in_bytes": f"{2 * GIB}\n",
    "memory/memory.stat": "total_inactive_file 0\n",
}


@pytest.mark.parametrize(("files", "membership"), [(V2, "0::/\n"), (V1, "4:memory:/docker/x\n")])
def test_the_limit_of_a_container(files: dict[str, str], membership: str, tmp_path: Path) -> None:
    machine = container(tmp_path, files, membership)
    assert judged("control_group", 7 * GIB, machine).status is Status.OK
    close = judged("control_group", 7 * GIB + GIB // 2, machine)
    assert close.status is Status.WARNING
    assert "hardly any memory for the weights" in close.found
    found = judged("control_group", 9 * GIB, machine)
    assert found.status is Status.PROBLEM
    assert "has 8 GiB free; the tier takes 9 GiB" in found.found
    assert found.remedy.startswith(
        "Raise the container's memory limit, or lower cpu_bytes_to_use (--cpu) to 7372MiB"
    )


def test_no_container(tmp_path: Path) -> None:
    machine = container(tmp_path, {}, "0::/\n")
    assert judged("control_group", GIB, machine).status is Status.OK


# --- locked memory -----------------------------------------------------------------------------


@pytest.fixture
def _little_may_be_locked() -> Iterator[None]:
    soft, hard = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    resource.setrlimit(resource.RLIMIT_MEMLOCK, (64 * KIB, hard))
    yield
    resource.setrlimit(resource.RLIMIT_MEMLOCK, (soft, hard))


def without_rights(tmp_path: Path, *devices: str) -> Machine:
    (tmp_path / "status").write_text("Name:\tpython\nCapEff:\t0000000000000000\n")
    (tmp_path / "dev").mkdir()
    for name in devices:
        (tmp_path / "dev" / name).touch()
    return Machine(process_status=tmp_path / "status", devices=tmp_path / "dev")


MEMLOCK = {
    "nothing is pinned": ((), Status.OK, "without a GPU"),
    "nvidia": (("nvidia0", "nvidiactl"), Status.OK, "NVIDIA's driver ignores it"),
    "amd": (("kfd",), Status.WARNING, "for /dev/kfd"),
}


@pytest.mark.usefixtures("_little_may_be_locked")
@pytest.mark.parametrize("case", MEMLOCK)
def test_a_low_limit_matters_where_it_is_asked_for(case: str, tmp_path: Path) -> None:
    devices, status, words = MEMLOCK[case]
    found = check_memlock(MIB, without_rights(tmp_path, *devices))
    assert found.status is status
    assert "the limit is 64 KiB" in found.found
    assert words in found.found
    assert ("--ulimit memlock=-1" in found.remedy) == (status is Status.WARNING)


@pytest.mark.usefixtures("_little_may_be_locked")
def test_a_limit_that_is_enough(tmp_path: Path) -> None:
    found = check_memlock(64 * KIB, without_rights(tmp_path, "kfd"))
    assert (found.status, "enough" in found.found) == (Status.OK, True)


def test_limits_and_rights_of_a_real_process() -> None:
    if os.geteuid() != 0 or not all(map(shutil.which, ("setpriv", "prlimit"))):
        pytest.skip("rights are taken away by root, with setpriv and prlimit")
    limited = ("prlimit", "--memlock=65536:65536")
    ended = run_apart("--cpu", "1MiB", "--json", before=limited)
    found = finding(json.loads(ended.stdout), "memlock")["found"]
    assert found == "the limit is 64 KiB, and this process may exceed it"
    ended = run_apart(
        "--cpu", "1MiB", "--json", before=(*limited, "setpriv", "--bounding-set=-ipc_lock")
    )
    found = finding(json.loads(ended.stdout), "memlock")["found"]
    assert found.startswith("the limit is 64 KiB")
    assert "may exceed it" not in found


# --- ranks -------------------------------------------------------------------------------------


def test_ranks_share_the_memory(tmp_path: Path) -> None:
    machine = without_rights(tmp_path, "nvidia0", "nvidia1", "nvidia-uvm")
    two = check_ranks(2, 8 * GIB, machine)
    assert (two.status, "4 GiB for the blocks of each" in two.found) == (Status.OK, True)
    four = check_ranks(4, 8 * GIB, machine)
    assert four.status is Status.WARNING
    assert "There are 2 GPUs here" in four.found
    assert "on one machine" in four.remedy


def test_ranks_on_a_machine_without_gpus(tmp_path: Path) -> None:
    assert check_ranks(4, 8 * GIB, without_rights(tmp_path)).status is Status.OK


def test_a_size_without_its_unit_is_a_problem() -> None:
    found = {finding.name: finding for finding in check_memory(8, Machine())}
    assert found["cpu_bytes_to_use"].status is Status.PROBLEM
    assert found["cpu_bytes_to_use"].remedy == "Give a size with its unit, such as 8GiB"
    assert "cpu_bytes_to_use" not in {finding.name for finding in check_memory(64 << 10, Machine())}
