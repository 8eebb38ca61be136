"""A reference engine in a process of its own, with two tiers, that serves prompts when told to.

Run as a command, it reads lines of JSON, `[first, count]`: it serves so many prompts, from the one
with that number on, settles, steps until its metrics are collected, and prints a line. It ends with
its input.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from kvtier.connector.scheduler import OffloadingConnectorScheduler
from kvtier.engine import Engine, EngineConfig, ModelConfig, make_connector, offloading_config
from kvtier.tiering.manager import TieringOffloadingManager
from tests.test_architecture import REPO, SRC

__all__ = ["EngineProcess"]

MODEL = ModelConfig(
    num_layers=2, hidden=32, num_heads=2, num_kv_heads=1, head_dim=16, mlp_hidden=32
)
PROMPT_TOKENS = 128


def prompt(number: int) -> list[int]:
    return [(31 * number + 7 * place) % 251 for place in range(PROMPT_TOKENS)]


class EngineProcess:
    """Starts the process. A context manager that ends it."""

    def __init__(self, folder: Path, run_dir: Path) -> None:
        folder.mkdir(exist_ok=True)
        self.process = subprocess.Popen(
            [sys.executable, "-m", "tests.cli.watch.engine_process", str(folder)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            cwd=REPO,
            env=os.environ | {"KVTIER_RUN_DIR": str(run_dir), "PYTHONPATH": f"{SRC}:{REPO}"},
            text=True,
        )
        try:
            self._expect("started")
        except BaseException:
            self.process.kill()
            self.__exit__(None, None, None)
            raise

    @property
    def pid(self) -> int:
        return self.process.pid

    def _expect(self, line: str) -> None:
        assert self.process.stdout is not None
        assert self.process.stdout.readline().strip() == line

    def serve(self, first: int, count: int) -> None:
        """Serve prompts, and wait until the engine is idle."""
        assert self.process.stdin is not None
        self.process.stdin.write(json.dumps([first, count]) + "\n")
        self.process.stdin.flush()
        self._expect("idle")

    def kill(self) -> None:
        self.process.kill()
        self.process.wait()

    def end(self) -> None:
        """Shut it down."""
        assert self.process.stdin is not None
        with suppress(BrokenPipeError):
            self.process.stdin.close()
        self.process.wait()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        assert self.process.stdout is not None
        self.end()
        self.process.stdout.close()


def _options(folder: Path) -> Mapping[str, Any]:
    return {
        "cpu_bytes_to_use": "128KiB",
        "cache_namespace": "test",
        "prefill_tokens_per_s": 1,  # so that no load is declined
        "secondary_tiers": [
            {"type": "disk", "path": str(folder / "kv.slab"), "max_bytes": "1MiB"},
            {
                "type": "fs",
                "root_dir": str(folder / "fs"),
                "max_bytes": "4MiB",
                "min_free_bytes": 0,
            },
        ],
    }


def main() -> None:
    config = EngineConfig(num_blocks=(16,), token_budget=256)
    offloading = offloading_config(
        MODEL, config, _options(Path(sys.argv[1])), f"watched-{os.getpid()}"
    )
    connector = make_connector(offloading)
    engine = Engine(MODEL, config, connector)
    assert isinstance(connector.scheduler, OffloadingConnectorScheduler)
    manager = connector.scheduler.manager
    assert isinstance(manager, TieringOffloadingManager)
    print("started", flush=True)
    for line in sys.stdin:
        first, count = json.loads(line)
        for number in range(first, first + count):
            engine.generate([prompt(number)], max_tokens=2)
            while connector.scheduler.has_pending_push_work() or manager.is_moving_blocks():
                engine.step()
        time.sleep(0.3)  # longer than between two collections
        engine.step()
        print("idle", flush=True)
    engine.shutdown()


if __name__ == "__main__":
    main()
