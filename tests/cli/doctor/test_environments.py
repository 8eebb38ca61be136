"""`kvtier doctor` on sound and on broken machines: it names what is wrong, and leaves nothing."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest

from kvtier.cli import main
from kvtier.cli.doctor import command
from tests.cli.doctor.running import (
    AT,
    config_of,
    examine,
    files_in,
    finding,
    run_apart,
    status_of,
)
from tests.cli.store.roots import balance_of, fill_root
from tests.cli.store.slabs import NUM_SLOTS, engine_on, fill
from tests.test_architecture import REPO, SRC
from tests.tiering.disk.small_disk import loop_disk, small_tmpfs
from tests.tiering.patience import wait_until

MIB = 1 << 20
NEEDS_ROOT = pytest.mark.skipif(os.geteuid() != 0, reason="mounts need root")


def disk(directory: Path) -> dict[str, str]:
    return {"type": "disk", "path": str(directory / "kv.slab"), "max_bytes": "256MiB"}


def fs(directory: Path) -> dict[str, str]:
    return {"type": "fs", "root_dir": str(directory / "root"), "max_bytes": "256MiB"}


# --- a sound machine ---------------------------------------------------------------------------


def test_all_is_well(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    config = config_of(disk(tmp_path), fs(tmp_path), {"type": "example"}, cache_namespace="w")
    assert main(["doctor", config, "--json"]) == 0
    document = json.loads(capsys.readouterr().out)
    for number in range(3):
        canary = finding(document, f"secondary_tiers[{number}].canary")
        assert (canary["status"], "compared through its seal" in canary["found"]) == ("ok", True)
    (measured,) = document["disks"].values()  # both tiers have the same
    assert 0 < measured["latency_s"] < 10
    assert min(measured["read_bytes_per_s"], measured["write_bytes_per_s"]) > 0
    assert [tier["speed"]["load_bytes_per_s"] > 0 for tier in document["tiers"]] == [True] * 3
    assert finding(document, "gpu_copies")["found"].startswith("not checked")
    assert files_in(tmp_path) == {}


def test_the_text_names_each_check_and_ends_with_the_verdict(tmp_path: Path) -> None:
    config = config_of(disk(tmp_path), cache_namespace="w")
    ended = run_apart("doctor", config, "--quick", PYTHONHASHSEED="0")
    assert (ended.returncode, ended.stderr) == (0, "")
    lines = ended.stdout.splitlines()
    assert lines[0] == "kvtier doctor: the given text"
    assert any(line.startswith("ok       shared_memory ") for line in lines)
    assert any(line.startswith(f"ok       {AT}.canary ") for line in lines)
    assert lines[-1].startswith(("All is well.", "It works."))
    assert "\x1b" not in ended.stdout


def test_blocks_of_others_stay_as_they_are(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    slab, root = tmp_path / "kv.slab", tmp_path / "root"
    with engine_on(slab) as harness:  # more than it holds, so it is full
        for start in range(0, NUM_SLOTS + 32, 32):
            harness.wait_for(harness.store(harness.keys(32, start)))
    fill_root(root, harness.keys(20))
    before = files_in(tmp_path)
    code, document = examine(capsys, config_of(disk(tmp_path), fs(tmp_path), cache_namespace="w"))
    assert code == 0
    assert status_of(document, f"{AT}.canary") == "ok"
    assert status_of(document, "secondary_tiers[1].canary") == "ok"
    after = files_in(tmp_path)
    changing = {name for name in before if name == "root/ledger"}
    assert after.keys() == before.keys()
    assert {name for name in before if after[name] != before[name]} <= changing
    assert balance_of(root).num_blocks == 20
    found = finding(document, f"{AT}.blocks")
    assert f"{NUM_SLOTS} of {NUM_SLOTS} slots hold blocks: it is full" in found["found"]


def test_a_slab_of_a_running_engine(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    slab = tmp_path / "kv.slab"
    with engine_on(slab) as harness:
        keys = harness.keys(10)
        harness.wait_for(harness.store(keys))
        code, document = examine(capsys, config_of(disk(tmp_path), cache_namespace="w"))
        found = finding(document, f"{AT}.path")
        assert (code, found["status"]) == (1, "problem")
        assert "is in use by the engine" in found["found"]
        assert harness.hits(keys) == set(keys)
    assert [path.name for path in tmp_path.iterdir()] == ["kv.slab"]


# --- broken machines ---------------------------------------------------------------------------


@NEEDS_ROOT
def test_a_tiny_shared_memory() -> None:
    mount = 'mount -t tmpfs -o size=8m tmpfs /dev/shm && exec "$@"'
    before = ("unshare", "--mount", "sh", "-c", mount, "sh")
    config = json.dumps({"cpu_bytes_to_use": "1GiB"})
    ended = run_apart("doctor", config, "--json", before=before)
    if "mount:" in ended.stderr or "unshare" in ended.stderr:
        pytest.skip(f"no mounts here: {ended.stderr.strip()}")
    assert ended.returncode == 1
    document = json.loads(ended.stdout)
    found = finding(document, "shared_memory")
    assert found["status"] == "problem"
    assert "/dev/shm (8 MiB in all) has 8 MiB free; the tier takes 1 GiB" in found["found"]
    assert "--shm-size=1025m" in found["remedy"]
    assert document["verdict"] == "1 problem: shared_memory"


@contextmanager
def read_only(directory: Path) -> Iterator[None]:
    """A file system that can be read only."""
    subprocess.run(["mount", "-o", "remount,ro", str(directory)], check=True)
    try:
        yield
    finally:
        subprocess.run(["mount", "-o", "remount,rw", str(directory)], check=True)


@NEEDS_ROOT
def test_a_read_only_disk(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with small_tmpfs(tmp_path, 64 * MIB) as root:
        config = config_of(disk(root), fs(root), cache_namespace="w")
        with read_only(root):
            code, document = examine(capsys, config)
    assert code == 1
    for name in (f"{AT}.path", "secondary_tiers[1].root_dir"):
        found = finding(document, name)
        assert found["status"] == "problem"
        assert "cannot write to" in found["found"]
        assert "mounted for writing" in found["remedy"]
    assert status_of(document, f"{AT}.canary") == "problem"
    assert status_of(document, "secondary_tiers[1].canary") == "problem"


@NEEDS_ROOT
def test_a_full_disk(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with loop_disk(tmp_path, 48 * MIB) as small:
        small.fill()
        before = files_in(small.root).keys()
        code, document = examine(capsys, config_of(disk(small.root), fs(small.root)))
        assert files_in(small.root).keys() == before
    assert code == 1
    for number in range(2):
        found = finding(document, f"secondary_tiers[{number}].canary")
        assert found["found"].startswith("the disk is full: the file system of ")
        assert found["remedy"].startswith("Make room there")
        assert document["tiers"][number]["full"] is True


@NEEDS_ROOT
def test_a_disk_with_little_room(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with loop_disk(tmp_path, 48 * MIB) as small:
        entry = disk(small.root) | {"max_bytes": "8MiB"}
        code, document = examine(capsys, config_of(entry, cache_namespace="w"))
    assert (code, status_of(document, f"{AT}.canary")) == (0, "ok")  # with fewer blocks


@NEEDS_ROOT
def test_a_disk_that_fails(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with loop_disk(tmp_path, 256 * MIB) as bad:
        (bad.root / "d").mkdir()
        with bad.broken():
            code, document = examine(capsys, config_of(disk(bad.root / "d"), cache_namespace="w"))
    assert code == 1
    found = finding(document, f"{AT}.canary")
    assert found["status"] == "problem"
    said = [check["found"] for check in document["checks"] if check["name"].startswith(AT)]
    assert any("Input/output error" in text or "EIO" in text for text in said), said


def is_open(root: Path) -> bool:
    """True if a process has a file below `root` open."""
    for descriptor in Path("/proc").glob("[0-9]*/fd/*"):
        with suppress(OSError):
            if os.readlink(descriptor).startswith(str(root)):
                return True
    return False


@NEEDS_ROOT
def test_a_disk_that_hangs(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(command, "_ANSWERS_WITHIN_S", 2.0)
    (tmp_path / "sound").mkdir()
    with loop_disk(tmp_path, 64 * MIB) as hung:
        config = config_of(disk(hung.root), disk(tmp_path / "sound"), cache_namespace="w")
        with hung.frozen():
            code, document = examine(capsys, config)
        wait_until(lambda: not is_open(hung.root), "the killed writer has ended")
    found = finding(document, f"{AT}.disk")
    assert (code, found["status"]) == (1, "problem")
    assert found["found"].startswith("it does not answer: ")
    assert "hangs (dmesg; mount)" in found["remedy"]
    assert document["verdict"] == f"1 problem: {AT}.disk"
    assert status_of(document, "secondary_tiers[1].canary") == "ok"


def test_no_directory(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code, document = examine(capsys, config_of(disk(tmp_path / "unmounted")))
    found = finding(document, f"{AT}.path")
    assert (code, found["status"]) == (1, "problem")
    assert found["remedy"].startswith(f"Make the directory {tmp_path}/unmounted, or mount")


def test_a_quota_that_other_models_have_used(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    root = tmp_path / "root"
    with engine_on(tmp_path / "unused") as harness:
        keys = harness.keys(300)
    fill_root(root, keys)
    total = balance_of(root).total
    entry = fs(tmp_path) | {"max_bytes": total + 4096}
    code, document = examine(capsys, config_of(entry, cache_namespace="w"))
    found = finding(document, f"{AT}.canary")
    assert (code, found["status"]) == (1, "problem")
    assert found["found"].startswith("the quota is full: ")
    assert "kvtier store gc" in found["remedy"]
    assert document["tiers"][0]["full"] is True
    assert balance_of(root).num_blocks == 300


@pytest.mark.parametrize("kind", ["disk", "fs"])
def test_a_wrong_fingerprint(kind: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with engine_on(tmp_path / "unused") as harness:
        keys = harness.keys(5)
    if kind == "disk":
        own = fill(tmp_path / "kv.slab", keys).hex()
    else:
        own = fill_root(tmp_path / "root", keys)
    config = config_of({"disk": disk, "fs": fs}[kind](tmp_path), cache_namespace="w")
    other = "0123456789abcdef" * 2
    code, document = examine(capsys, config, "--namespace", other)
    found = finding(document, f"{AT}.blocks")
    assert (code, found["status"]) == (1, "problem")
    assert found["found"].startswith("wrong fingerprint: ")
    assert f"namespace {own[:8]} (" in found["found"]
    assert f"The engine's namespace is {other[:8]}" in found["found"]
    assert "PYTHONHASHSEED" in found["remedy"]
    assert document["verdict"] == f"1 problem: {AT}.blocks"
    code, document = examine(capsys, config, "--namespace", own[:12])
    assert (code, status_of(document, f"{AT}.blocks")) == (0, "ok")


# --- slow disks --------------------------------------------------------------------------------

_BLKIO = Path("/sys/fs/cgroup/blkio")


@contextmanager
def slow_group(device: Path, bytes_per_s: int) -> Iterator[Path]:
    """A control group whose processes read and write this device slowly."""
    numbers = os.stat(device).st_rdev
    limit = f"{os.major(numbers)}:{os.minor(numbers)} {bytes_per_s}"
    group = _BLKIO / f"kvtier-test-{os.getpid()}"
    try:
        group.mkdir()
        for direction in ("read", "write"):
            (group / f"blkio.throttle.{direction}_bps_device").write_text(limit)
    except OSError as error:
        if group.is_dir():
            group.rmdir()
        pytest.skip(f"no control group limits disks here: {error}")
    try:
        yield group
    finally:
        wait_until(lambda: not (group / "cgroup.procs").read_text(), "the group is empty")
        group.rmdir()


@NEEDS_ROOT
def test_a_slow_disk(tmp_path: Path) -> None:
    with loop_disk(tmp_path, 512 * MIB) as small:
        mounts = [line.split() for line in Path("/proc/mounts").read_text().splitlines()]
        (device,) = [source for source, target, *_ in mounts if target == str(small.root)]
        with slow_group(Path(device), 60 * MIB) as group:
            join = f'echo $$ > {group}/cgroup.procs && exec "$@"'
            config = config_of(disk(small.root), cache_namespace="w")
            model = ("--kv-bytes-per-token", "128KiB", "--prefill", "10000")
            before = ("sh", "-c", join, "sh")
            ended = run_apart("doctor", config, "--json", *model, before=before)
    document = json.loads(ended.stdout)
    assert ended.returncode == 1, document["verdict"]
    (measured,) = document["disks"].values()
    assert measured["read_bytes_per_s"] < 200e6
    slow, pays = finding(document, f"{AT}.speed"), finding(document, f"{AT}.pays")
    assert (slow["status"], slow["found"].startswith("it is slow: ")) == ("warning", True)
    assert (pays["status"], pays["found"].startswith("it is too slow: ")) == ("problem", True)
    assert "storage that reads more than 1.31 GB/s" in pays["remedy"]
    (tier,) = [row for row in document["model"]["tiers"] if row["tier"].startswith(AT)]
    assert tier["pays"] == [False] * 5


def test_a_tier_that_answers_late(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    late = {"type": "example", "simulate_async": True, "latency_ms": 150}
    config = config_of(late, disk(tmp_path), cache_namespace="w")
    model = ("--kv-bytes-per-token", "4KiB", "--prefill", "10000")
    code, document = examine(capsys, config, *model)
    assert (code, status_of(document, f"{AT}.pays")) == (0, "ok")
    rows = {row["tier"]: row["pays"] for row in document["model"]["tiers"]}
    # 512 tokens are computed in 51 ms. Longer prompts are worth the wait.
    assert rows[f"{AT} (example)"] == [False, True, True, True, True]
    assert rows["secondary_tiers[1] (disk)"][-1] is True


# --- tiers that lie ----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("OfAnotherNamespace", "the tier returned blocks of another namespace (wrong fingerprint)"),
        ("Flips", "the tier returned damaged blocks (wrong digest)"),
        ("Believes", "have wrong bytes, although the tier accepted their seals"),
        ("FindsAnything", "a block that was never stored was found"),
        ("FindsNothing", "a block that was just stored is not found"),
        ("CannotStart", 'the tier "CannotStart" could not start: OSError: [Errno 5] Input/output'),
    ],
)
def test_a_tier_that_lies(name: str, said: str, capsys: pytest.CaptureFixture[str]) -> None:
    entry = {"type": name, "module_path": "tests.cli.doctor.liars"}
    code, document = examine(capsys, config_of(entry))
    found = finding(document, f"{AT}.canary")
    assert (code, found["status"]) == (1, "problem")
    assert said in found["found"]
    assert found["remedy"]


def test_a_tier_that_offers_no_trial(capsys: pytest.CaptureFixture[str]) -> None:
    entry = {"type": "NoTrial", "module_path": "tests.cli.doctor.liars"}
    code, document = examine(capsys, config_of(entry))
    found = finding(document, f"{AT}.canary")
    assert (code, found["status"]) == (0, "warning")
    assert found["found"].startswith("not tried: ")


# --- the configuration -------------------------------------------------------------------------


def test_keys_that_cannot_be_meant(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    config = json.dumps(
        {"cpu_bytes_to_use": "1MiB", "evict": "lru", "secondary_tiers": [{"type": "example"}]}
    )
    code, document = examine(capsys, config)
    assert code == 1
    assert document["verdict"] == "1 problem: evict"
    assert all(check["remedy"] for check in document["checks"])


def test_hashes_that_differ_in_every_process(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("PYTHONHASHSEED", raising=False)
    script = tmp_path / "serve.sh"
    flag = json.dumps(
        {
            "kv_connector": "KVTierConnector",
            "kv_connector_extra_config": json.loads(config_of({"type": "example"}, disk(tmp_path))),
        }
    )
    start = f"vllm serve m --prefix-caching-hash-algo xxhash --kv-transfer-config '{flag}'"
    script.write_text(f"exec {start}\n")
    code, document = examine(capsys, str(script))
    found = finding(document, "hash_algorithm")
    assert (code, found["status"]) == (1, "problem")
    assert "PYTHONHASHSEED=0" in found["remedy"]
    script.write_text(f"exec env PYTHONHASHSEED=0 {start}\n")
    code, document = examine(capsys, str(script))
    assert (code, status_of(document, "hash_algorithm")) == (0, "ok")
    assert "PYTHONHASHSEED is 0" in finding(document, "hash_seed")["found"]


# --- how it ends -------------------------------------------------------------------------------


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM], ids=lambda its: its.name)
def test_a_signal_leaves_nothing(number: signal.Signals, tmp_path: Path) -> None:
    config = config_of(disk(tmp_path), fs(tmp_path), cache_namespace="w")
    running = subprocess.Popen(
        [sys.executable, "-m", "kvtier", "doctor", config, "--quick"],
        env=os.environ | {"PYTHONPATH": str(SRC)},
        cwd=REPO,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        wait_until(lambda: any(tmp_path.glob(".kv.slab.trial-*.new")), "a trial runs")
        running.send_signal(number)
        out, err = running.communicate(timeout=60)
    finally:
        running.kill()
    assert (running.returncode, out, err) == (130, "", "")
    assert files_in(tmp_path) == {}


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["/nowhere/serve.sh"], "there is no /nowhere/serve.sh"),
        (['{"kv_connector": "LMCacheConnector"}'], "so vLLM does not use kvtier"),
        (['{"cpu_bytes_to_use": '], "does not parse"),
        ([os.devnull], "has no --kv-transfer-config"),
        (["{}", "--model", "/nowhere/m"], "give the path of a model's config.json"),
        (["{}", "--prefill", "5"], "give the model, too"),
        (["{}", "--namespace", "xyz"], "give the first digits of a namespace"),
        (["{}", "--kv-dtype", "int3"], "give one of"),
        (["{}", "--block-tokens", "0"], "a whole number"),
    ],
)
def test_wrong_usage(arguments: list[str], said: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["doctor", *arguments]) == 2
    printed = capsys.readouterr()
    assert printed.out == ""
    assert said in " ".join(printed.err.split())
    assert "Traceback" not in printed.err
