"""The watch over leftovers in `conftest.py` notices what it should, and no more."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import uuid
from pathlib import Path

import pytest

HERE = Path(__file__).parent

HOLDER = """
import os, subprocess, sys
HOLD = '''
import fcntl, sys
file = open(sys.argv[1], "w")
fcntl.flock(file, fcntl.LOCK_SH)
print("held", flush=True)
sys.stdin.read()
'''
def test():
    global holder
    holder = subprocess.Popen(
        [sys.executable, "-c", HOLD, PATH],
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, start_new_session=SESSION,
    )
    holder.stdout.readline()
def teardown_module():
    holder.communicate()
    os.unlink(PATH)
"""

# One file each. PATH stands for a place in shared memory, with the name of a region file.
TIDY = {
    "tidy": """
import os, threading
def test():
    thread = threading.Thread(target=int)
    thread.start()
    thread.join()
    open(PATH, "w").close()
    os.unlink(PATH)
""",
    "file_of_another_run": HOLDER.replace("SESSION", "True"),
}
UNTIDY = {
    "file": """
def test():
    open(PATH, "w").close()
""",
    "file_in_use": """
import fcntl
def test():
    global file
    file = open(PATH, "w")
    fcntl.flock(file, fcntl.LOCK_SH)
""",
    "file_of_a_child": HOLDER.replace("SESSION", "False"),
    "thread": """
import threading
def test():
    # It ends with the run.
    threading.Thread(target=threading.main_thread().join, name="straggler").start()
""",
}
LAST = {"last": "def test(): pass\n"}  # what is still there after it is the session's fault


@pytest.fixture(scope="module")
def complaints(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """What the watch said after each of the tests above, by the test's name."""
    folder = tmp_path_factory.mktemp("watched")
    shutil.copy(HERE / "conftest.py", folder)
    # Not in shared memory, where other runs would see these files and complain.
    watched = tmp_path_factory.mktemp("shared_memory")
    left = watched / f"kvtier-{uuid.uuid4().hex}"
    files = {f"test_{name}.py": (name, test) for name, test in (TIDY | UNTIDY | LAST).items()}
    for file, (name, test) in files.items():
        (folder / file).write_text(test.replace("PATH", repr(f"{left}-{name}")))
    try:
        run = subprocess.run(
            [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "--tb=line", "-rE", *files],
            cwd=folder,
            env={
                "COLUMNS": "1000",
                "KVTIER_WATCHED_DIRECTORY": str(watched),
                "KVTIER_WATCH_PATIENCE_S": "0.1",
            },
            capture_output=True,
            text=True,
            check=False,
            timeout=120,
        )
    finally:
        for path in left.parent.glob(f"{left.name}-*"):
            path.unlink()
    assert f"{len(files)} passed" in run.stdout, run.stdout + run.stderr
    found = re.findall(r"(?m)^ERROR test_(\w+)\.py::test - (.*)$", run.stdout)
    return {
        name: text.replace(left.name, "NAME").replace(str(watched), "/dev/shm")
        for name, text in found
    }


@pytest.mark.parametrize("name", TIDY)
def test_a_tidy_test_is_left_alone(name: str, complaints: dict[str, str]) -> None:
    assert name not in complaints


@pytest.mark.parametrize("name", [name for name in UNTIDY if name != "thread"])
def test_a_file_left_behind_is_named(name: str, complaints: dict[str, str]) -> None:
    assert complaints[name] == f"AssertionError: files left behind in /dev/shm: ['NAME-{name}']"


def test_a_thread_left_behind_is_named(complaints: dict[str, str]) -> None:
    assert complaints["thread"] == "AssertionError: threads left behind: ['straggler']"


def test_the_session_is_watched_as_well(complaints: dict[str, str]) -> None:
    assert complaints["last"] == "AssertionError: threads left behind: ['straggler']"


PRIVATE = """
import os
def test():
    assert not os.path.exists(OUTSIDE)
    open(PATH, "w").close()
"""


def test_a_run_of_root_shares_its_memory_with_no_other(tmp_path: Path) -> None:
    """No other run takes its files for its own, or reclaims them before they are noticed."""
    if subprocess.run(["unshare", "--mount", "true"], check=False, capture_output=True).returncode:
        pytest.skip("no permission to mount anything")
    name = f"/dev/shm/kvtier-{uuid.uuid4().hex}"
    shutil.copy(HERE / "conftest.py", tmp_path)
    test = PRIVATE.replace("OUTSIDE", repr(f"{name}-outside")).replace("PATH", repr(name))
    (tmp_path / "test_private.py").write_text(test)
    Path(f"{name}-outside").touch()
    try:
        run = subprocess.run(
            [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "--tb=line", "-rE"],
            cwd=tmp_path,
            env={"COLUMNS": "1000", "KVTIER_WATCH_PATIENCE_S": "0.1"},
            capture_output=True,
            text=True,
            check=False,
            timeout=120,
        )
    finally:
        os.unlink(f"{name}-outside")
    assert "1 passed, 1 error" in run.stdout, run.stdout + run.stderr
    assert f"files left behind in /dev/shm: ['{os.path.basename(name)}']" in run.stdout
    assert not os.path.exists(name)
