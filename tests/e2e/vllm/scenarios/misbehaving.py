"""What the harness has to survive."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any


def where_it_runs() -> dict[str, Any]:
    """Who this process is, and what it was given."""
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
    """For longer than anyone waits, and with a child that does likewise."""
    child = subprocess.Popen(["sleep", "600"])
    wait_in_vain(Path(file), str(child.pid))


def wait_in_vain(file: Path, text: str) -> None:
    """Write the text when the waiting begins."""
    file.write_text(text)
    time.sleep(600)


def leave_a_thread() -> str:
    """One that keeps the process from ending."""
    threading.Thread(target=time.sleep, args=(600,)).start()
    return "done"


def leave_a_process() -> int:
    """In a session of its own, so that no signal to a group reaches it."""
    return subprocess.Popen(["sleep", "600"], start_new_session=True).pid
