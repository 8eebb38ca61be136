"""A stand-in for a server and the engine it starts, to test `ServerWatch`. Needs no vLLM.

    python -m tests.integrations.vllm.server_and_engine METHOD NAME NUM_SERVERS NUM_FILES GATE

The engine, started with METHOD of `multiprocessing`, opens NUM_FILES files, prints its pid, and
reads the FIFO at GATE to its end. Then it calls `ServerWatch.of_this_engine`, and prints whether it
watches its server. On SIGTERM it prints SIGTERM and ends. Both processes end after a minute.
"""

from __future__ import annotations

import logging
import multiprocessing
import os
import resource
import signal
import sys
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from kvtier.integrations.vllm.server_watch import ServerWatch

LONGEST_S = 60


def _end(*_: object) -> None:
    os.write(1, b"SIGTERM\n")
    os._exit(0)


def run_engine(num_servers: int, num_files: int, gate: str) -> None:
    signal.alarm(LONGEST_S)
    signal.signal(signal.SIGTERM, _end)
    logging.basicConfig(stream=sys.stdout, format="%(message)s")
    _, most_files = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most_files, most_files))
    _files = [os.open(os.devnull, os.O_RDONLY) for _ in range(num_files)]
    print(os.getpid(), flush=True)
    Path(gate).read_bytes()
    config: Any = SimpleNamespace(parallel_config=SimpleNamespace(_api_process_count=num_servers))
    watch = ServerWatch.of_this_engine(config)
    print("unwatched" if watch is None else "watched", flush=True)
    while True:
        time.sleep(0.1)


def main() -> None:
    signal.alarm(LONGEST_S)
    method, name, num_servers, num_files, gate = sys.argv[1:]
    context: Any = multiprocessing.get_context(method)
    args = (int(num_servers), int(num_files), gate)
    context.Process(target=run_engine, name=name, args=args).start()
    while True:
        time.sleep(60)


if __name__ == "__main__":
    main()
