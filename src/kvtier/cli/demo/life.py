"""One engine from its start to its end, in a process of its own, which `process` starts.

A connection leads to the demo, which sends a `Life` and gets `Message`s. If the demo ends before
its time, the connection is closed: then this process ends, too, and removes their files.
"""

from __future__ import annotations

import os
import shutil
import signal
import sys
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from multiprocessing.connection import Connection
from typing import Any

from kvtier.cli.demo.operator_log import OperatorLog
from kvtier.cli.demo.server import OffloadingServer, Served
from kvtier.cli.demo.settings import Prompt
from kvtier.engine import ModelConfig

__all__ = ["Ended", "Failed", "Life", "Message", "Started", "main"]


@dataclass(frozen=True, slots=True)
class Life:
    """What an engine is to do: serve these prompts, one after the other, and end."""

    model: ModelConfig
    prompts: Sequence[Prompt]
    tiers: Sequence[dict[str, Any]]


@dataclass(frozen=True, slots=True)
class Started:
    """What holds for all that is served. An `Offloader` of `kvtier.cli.demo.judge`."""

    process_id: int
    block_bytes: int
    tier_types: Sequence[str]


@dataclass(frozen=True, slots=True)
class Failed:
    """Why it ended before its time."""

    reason: str


@dataclass(frozen=True, slots=True)
class Ended:
    """All was served, and is where it should be; the engine has shut down."""

    warnings: Sequence[str]


Message = Started | Served | Failed | Ended


class _DemoHasEnded(Exception):
    """Nobody is waiting for the answers any more."""


def main() -> int:
    """Live, and return the exit code. The process's arguments are the descriptor of its end of the
    connection, and the folder to be removed if the demo ends before its time."""
    # Ctrl-C reaches every process of the terminal. The demo decides, and closes the connection.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    descriptor, folder = sys.argv[1:]
    with Connection(int(descriptor)) as demo:
        try:
            with OperatorLog() as log:
                _live(demo.recv(), demo)
            demo.send(Ended(log.take()))
        except (_DemoHasEnded, EOFError, ConnectionError):
            shutil.rmtree(folder, ignore_errors=True)
            return 1
        except Exception as error:
            with suppress(ConnectionError):
                demo.send(Failed(str(error) or type(error).__name__))
            return 1
    return 0


def _live(life: Life, demo: Connection) -> None:
    def check() -> None:
        if demo.poll():  # nothing more is ever sent: it is closed
            raise _DemoHasEnded

    with OffloadingServer(life.model, life.prompts, check, life.tiers) as server:
        demo.send(Started(os.getpid(), server.block_bytes, server.tier_types))
        for prompt in life.prompts:
            demo.send(server.serve(prompt))
            server.settle()
