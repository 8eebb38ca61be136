"""What holds for every test: strict mode, repeatable examples, and nothing left behind."""

from __future__ import annotations

import ctypes
import os
import re
import shutil
import signal
import tempfile
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from hypothesis import HealthCheck, settings
from hypothesis.internal.conjecture import providers

if TYPE_CHECKING:
    from tests.e2e.vllm.processes import VLLM
    from tests.shares import Shares

# A broken contract raises instead of being counted, in this process and in those it starts.
os.environ["KVTIER_STRICT"] = "1"

# Where the engines of the tests have their sockets, apart from those of other engines.
_RUN_DIR = os.environ["KVTIER_RUN_DIR"] = tempfile.mkdtemp(prefix="kvtier-tests-")

# A shell that runs the tests in the background has Ctrl-C ignored, also in those they start.
signal.signal(signal.SIGINT, signal.default_int_handler)

# No deadlines: on a shared machine they measure the neighbours.
settings.register_profile(
    "ci",
    # The same examples at every run: a change that lands was not lucky, and a red run can be
    # repeated by anyone. New examples are the business of the other profile.
    derandomize=True,
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow],
)
settings.register_profile(
    "soak",
    max_examples=5_000,
    deadline=None,
    print_blob=True,  # a failure found by chance can be put into a test as it is
    suppress_health_check=[HealthCheck.too_slow],
)
settings.load_profile("ci")


def pytest_configure(config: pytest.Config) -> None:
    """Keep Hypothesis from trying numbers and texts that it finds in the source of loaded modules,
    where examples are to be the same at every run: which are loaded depends on the tests before,
    and any change anywhere in the source would draw other examples everywhere."""
    if settings().derandomize and hasattr(providers, "_get_local_constants"):
        providers._get_local_constants = providers.Constants  # type: ignore[attr-defined]


def pytest_unconfigure() -> None:
    shutil.rmtree(_RUN_DIR, ignore_errors=True)


SHARED_MEMORY = Path(os.environ.get("KVTIER_WATCHED_DIRECTORY", "/dev/shm"))
PATIENCE_S = float(os.environ.get("KVTIER_WATCH_PATIENCE_S", "10"))
"""Where /dev/shm is shared, another run's killed processes leave files that it reclaims soon."""
_LOCKS = Path("/proc/locks")
_CLONE_NEWNS, _MS_REC, _MS_SLAVE = 0x20000, 0x4000, 1 << 19


def _mount_own_shared_memory() -> bool:
    """Give this process, and those it starts, a /dev/shm of their own. Only root may.

    Tests that run beside these, in another worker or another run, then neither see what these
    leave behind nor reclaim it before it is noticed.
    """
    libc = ctypes.CDLL(None)
    return bool(
        libc.unshare(_CLONE_NEWNS) == 0
        and libc.mount(None, b"/", None, _MS_REC | _MS_SLAVE, None) == 0
        and libc.mount(b"tmpfs", b"/dev/shm", b"tmpfs", 0, b"mode=1777") == 0
    )


_IS_SHARED_WITH_OTHERS = not _mount_own_shared_memory() or "KVTIER_WATCHED_DIRECTORY" in os.environ
if _IS_SHARED_WITH_OTHERS and "PYTEST_XDIST_WORKER" in os.environ:
    os.setpgid(0, 0)  # `_is_anothers` tells the workers of one run apart by their groups


@pytest.hookimpl(optionalhook=True)  # without pytest-xdist there is no such hook
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Shares:
    """How workers that run side by side share the tests."""
    from tests.shares import Shares

    return Shares(config, log)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """The longest share first, or one process would have it left when the other has nothing."""
    if "PYTEST_XDIST_WORKER" in os.environ:
        from tests.shares import is_with_vllm

        items.sort(key=lambda item: not is_with_vllm(item.nodeid))


def _lock_holders(path: Path) -> set[int]:
    """Processes that hold a lock on a region file, and so are using it."""
    inode = path.stat().st_ino
    # "7: FLOCK  ADVISORY  READ 4711 00:1a:815 0 EOF"; those who only wait have an arrow before.
    held = re.findall(r"(?m)^\d+: \w+ +\w+ +\w+ +(\d+) \w+:\w+:(\d+) ", _LOCKS.read_text())
    return {int(pid) for pid, locked in held if int(locked) == inode}


def _is_anothers(path: Path) -> bool:
    """Whether only processes outside this test run use a region file: then it is not ours."""
    if not _IS_SHARED_WITH_OTHERS:
        return False
    try:
        holders = _lock_holders(path)
        return bool(holders) and all(os.getpgid(pid) != os.getpgrp() for pid in holders)
    except (FileNotFoundError, ProcessLookupError):  # its owner ended while we looked
        return True


def _region_files() -> set[Path]:
    return set(SHARED_MEMORY.glob("kvtier-*"))


def _threads() -> set[threading.Thread]:
    """Threads that would keep the process from ending."""
    return {thread for thread in threading.enumerate() if not thread.daemon}


@pytest.fixture(scope="session", autouse=True)
def _session_leaves_nothing_behind() -> Iterator[None]:
    """The same as below, for what fixtures of a wider scope hold during several tests."""
    yield from _watch_for_leftovers()


@pytest.fixture(autouse=True)
def _test_leaves_nothing_behind(_session_leaves_nothing_behind: None) -> Iterator[None]:
    """No test, passed or failed, leaves a thread or a file in shared memory."""
    yield from _watch_for_leftovers()


def _files_left(before: set[Path]) -> list[str]:
    return [path.name for path in _region_files() - before if not _is_anothers(path)]


def _watch_for_leftovers() -> Iterator[None]:
    files, threads = _region_files(), _threads()
    yield
    left_threads = [thread.name for thread in _threads() - threads]
    assert not left_threads, f"threads left behind: {left_threads}"
    deadline = time.monotonic() + PATIENCE_S
    while left_files := _files_left(files):
        if time.monotonic() > deadline:
            break
        time.sleep(0.05)
    assert not left_files, f"files left behind in {SHARED_MEMORY}: {left_files}"


def _interpreter(variable: str, environment: str) -> Path:
    given = os.environ.get(variable)
    if not given:
        pytest.skip(f"{variable} names no python with {environment}: `make test` builds one")
    return Path(given)


@pytest.fixture(scope="session")
def vllm_python() -> Path:
    """The interpreter of an environment with stock vLLM."""
    return _interpreter("KVTIER_VLLM_PYTHON", "stock vLLM")


@pytest.fixture(scope="session")
def vllm(vllm_python: Path) -> Iterator[VLLM]:
    """Stock vLLM, imported once for all tests."""
    from tests.e2e.vllm.processes import stock_vllm

    with stock_vllm(vllm_python) as vllm:
        yield vllm


@pytest.fixture(scope="module")
def vllm_0_28() -> Iterator[VLLM]:
    """Stock vLLM 0.28, whatever release the other tests run with."""
    from tests.e2e.vllm.processes import stock_vllm

    python = _interpreter("KVTIER_VLLM28_PYTHON", "vLLM 0.28")
    with stock_vllm(python) as vllm:
        yield vllm
