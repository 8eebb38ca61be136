"""Scenarios that the harness has to survive."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any


def where_it_runs() -> dict[str, Any]:
    """Facts about this process and its environment."""
    print("to standard output", flush=True)
    print("to standard error", file=sys.stderr, flush=True)
    return {
        "pid": os.getpid(),
        "group": os.getpgrp(),
        "threads": len(os.listdir("/proc/self/task")),
        "vllm_is_there": "vllm" in sys.modules,
        "seed": os.environ.get("PYTHONHASHSEED"),
        "tmpdir": os.environ["TMPDIR"],
    }


def raise_an_error(text: str) -> None:
    raise ValueError(text)


def exit_with(code: int) -> None:
    os._exit(code)


def hang(file: str) -> None:
    """Sleep longer than any test waits, with a child that does the same."""
    child = subprocess.Popen(["sleep", "600"])
    wait_in_vain(Path(file), str(child.pid))


def wait_in_vain(file: Path, text: str) -> None:
    """Write the text, then wait."""
    file.write_text(text)
    time.sleep(600)


def leave_a_thread() -> str:
    """Start a thread that keeps the process from ending."""
    threading.Thread(target=time.sleep, args=(600,)).start()
    return "done"


def leave_a_process() -> int:
    """Start a child in a session of its own, which no signal to a group reaches."""
    return subprocess.Popen(["sleep", "600"], start_new_session=True).pid
