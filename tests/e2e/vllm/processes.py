"""The test's side of processes with stock vLLM: start them, call into them, end them.

    with vllm.start(scenarios.weights.Story, model) as process:
        process.ask("update")

    report = vllm.run(scenarios.demo.as_a_user_runs_it)

A scenario is a function, or a class whose methods are called one by one, in a module under
`tests.e2e.vllm.scenarios`. Tests import that module without vLLM, so it imports vLLM only inside
functions. Arguments and results travel as JSON: tuples arrive as lists, data classes as dicts.
"""

from __future__ import annotations

import json
import os
import select
import shutil
import signal
import socket
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from itertools import count
from pathlib import Path
from types import TracebackType
from typing import Any, NoReturn, ParamSpec, Self, TypeVar

from tests.e2e.vllm.served_calls import call_line
from tests.tiering.networks import environment_of_tests

REPO = Path(__file__).resolve().parents[3]
PATIENCE_S = 180.0
"""Seconds for one call. No call takes a tenth of it on an idle machine."""
ORPHANS_PATIENCE_S = 30.0
"""Seconds for helpers of Python's `multiprocessing`, which end soon after their processes."""

P = ParamSpec("P")
R = TypeVar("R")


class ScenarioFailedError(AssertionError):
    """A process with vLLM raised, died, hung, or left something behind."""


@dataclass(slots=True)
class End:
    """How a process ended."""

    exit_code: int
    """Negative: the signal that ended it."""
    orphans: list[str]
    """Command lines of descendants that outlived it and were killed."""


class Process:
    """A process of the environment with vLLM, in a process group of its own."""

    def __init__(
        self, zygote: ZygoteProcess, pid: int, channel: socket.socket, folder: Path, patience: float
    ) -> None:
        self.pid = pid
        self.folder = folder
        self.patience = patience
        """Seconds for one answer, or for the end of the process."""
        self._zygote = zygote
        self._channel = channel
        self._received = b""

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        exc_type: type[BaseException] | None,
        exc_value: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        if exc_type is None or issubclass(exc_type, ScenarioFailedError):
            self.end()
        else:
            self.kill()

    @property
    def is_there(self) -> bool:
        """True until `end` or `kill` is called, or a call fails."""
        return not self._zygote.has_forgotten(self.pid)

    @property
    def stdout(self) -> str:
        """What it has written there so far."""
        return (self.folder / "stdout").read_text()

    @property
    def stderr(self) -> str:
        """What it has written there so far."""
        return (self.folder / "stderr").read_text()

    def tell(self, name: str, *args: Any, **kwargs: Any) -> None:
        """Start a method of the object in the process; `answer` waits for the result."""
        self.begin(None, name, args, kwargs)

    def ask(self, name: str, *args: Any, **kwargs: Any) -> Any:
        """Call a method of the object in the process, and wait for the result."""
        self.tell(name, *args, **kwargs)
        return self.answer()

    def begin(
        self, module: str | None, name: str, args: Sequence[Any], kwargs: Mapping[str, Any]
    ) -> None:
        """Send one call."""
        try:
            self._channel.sendall(call_line(module, name, list(args), dict(kwargs)).encode())
        except OSError:
            self._fail("ended too soon")

    def answer(self) -> Any:
        """Wait for the result of the oldest call without an answer."""
        deadline = time.monotonic() + self.patience
        while b"\n" not in self._received:
            left = max(0.0, deadline - time.monotonic())
            ready, _, _ = select.select([self._channel], [], [], left)
            if not ready:
                self._fail(f"has not answered within {self.patience:.0f} s")
            if not (part := self._channel.recv(1 << 20)):
                self._fail("ended too soon")
            self._received += part
        line, _, self._received = self._received.partition(b"\n")
        answer = json.loads(line)
        if "error" in answer:
            raise ScenarioFailedError(answer["error"])
        return answer["result"]

    def wait(self) -> End:
        """Wait until the process has ended by itself."""
        end = self._zygote.end_of(self.pid, self.patience)
        if end is None:
            self._fail(f"has not ended within {self.patience:.0f} s")
        return end

    def end(self) -> None:
        """End the process in order. Raises if it fails or leaves anything behind."""
        if not self.is_there:
            return
        self._channel.close()
        end = self.wait()
        if end.exit_code != 0 or end.orphans:
            self._fail("ended badly")
        self._forget()

    def kill(self) -> None:
        """Kill the process and its group with SIGKILL."""
        if not self.is_there:
            return
        self._channel.close()
        self._kill()
        self._forget()

    def _kill(self) -> End | None:
        if self._zygote.end_of(self.pid, 0.0) is None:
            os.killpg(self.pid, signal.SIGKILL)
        return self._zygote.end_of(self.pid, PATIENCE_S)

    def _forget(self) -> None:
        self._zygote.forget(self.pid)
        shutil.rmtree(self.folder)

    def _fail(self, what: str) -> NoReturn:
        """Kill the process, and raise with its output."""
        if self._zygote.end_of(self.pid, 0.5) is None:
            self._have_stacks_written()
        end = self._kill()
        tail = self.stderr[-6000:]
        self._channel.close()
        self._forget()
        raise ScenarioFailedError(f"process {self.pid} {what}: {end}\n{tail}")

    def _have_stacks_written(self) -> None:
        """Have the process write the stack of every thread to its standard error, if it can."""
        before = written = len(self.stderr)
        os.kill(self.pid, signal.SIGUSR1)
        deadline = time.monotonic() + 10.0
        while time.monotonic() < deadline:
            time.sleep(0.2)
            so_far, written = written, len(self.stderr)
            if before < so_far == written:
                break


class ZygoteProcess:
    """The parent's side of the process that has imported vLLM."""

    def __init__(self, python: Path, folder: Path) -> None:
        self.python = python
        self.folder = folder
        self._control, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        environment = environment_of_tests()
        # A scenario that needs a seed sets it.
        environment.pop("PYTHONHASHSEED", None)
        self._log = folder / "zygote.log"
        (folder / "contained").mkdir()
        with theirs, self._log.open("w") as log:
            self._process = subprocess.Popen(
                [python, "-m", "tests.e2e.vllm.zygote", str(theirs.fileno()), folder / "contained"],
                cwd=REPO,
                env=environment,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                pass_fds=[theirs.fileno()],
                start_new_session=True,
            )
        self._ends: dict[int, End | None] = {}
        self._numbers = count()
        self.vllm_version = ""

    def wait_until_ready(self) -> None:
        """Wait until everything is imported."""
        self.vllm_version = str(self._hear(PATIENCE_S)["vllm"])

    def fork(
        self,
        environment: Mapping[str, str],
        command: Sequence[str],
        patience: float,
        orphans_patience: float,
    ) -> Process:
        """Fork a new process. Without a command, it serves calls."""
        folder = self.folder / f"process-{next(self._numbers)}"
        folder.mkdir()
        ours, theirs = socket.socketpair()
        order = {
            "folder": str(folder),
            "environment": dict(environment),
            "command": list(command),
            "orphans_patience": orphans_patience,
        }
        with theirs:
            socket.send_fds(self._control, [json.dumps(order).encode()], [theirs.fileno()])
        while "forked" not in (message := self._hear(PATIENCE_S)):
            self._note(message)
        pid = int(message["forked"])
        self._ends[pid] = None
        return Process(self, pid, ours, folder, patience)

    def end_of(self, pid: int, patience: float) -> End | None:
        """How the process ended; None if it has not ended within `timeout` seconds."""
        deadline = time.monotonic() + patience
        while self._ends[pid] is None:
            ready, _, _ = select.select(
                [self._control], [], [], max(0, deadline - time.monotonic())
            )
            if not ready:
                return None
            self._note(self._hear(0.0))
        return self._ends[pid]

    def has_forgotten(self, pid: int) -> bool:
        return pid not in self._ends

    def forget(self, pid: int) -> None:
        """Drop the record of a process whose end was read."""
        del self._ends[pid]

    def stop(self) -> None:
        """End the zygote and all its forks."""
        self._control.close()
        try:
            self._process.wait(PATIENCE_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
            raise

    def _note(self, message: dict[str, Any]) -> None:
        self._ends[message["ended"]] = End(message["exit_code"], message["orphans"])

    def _hear(self, patience: float) -> dict[str, Any]:
        ready, _, _ = select.select([self._control], [], [], patience)
        message = self._control.recv(1 << 16) if ready else b""
        if not message:
            raise ScenarioFailedError(f"the zygote has failed:\n{self._log.read_text()[-6000:]}")
        answer: dict[str, Any] = json.loads(message)
        return answer


@dataclass(frozen=True)
class VLLM:
    """Stock vLLM for tests: runs scenarios, each in a process of its own."""

    zygote: ZygoteProcess
    environment: Mapping[str, str] = field(default_factory=dict)
    patience: float = PATIENCE_S
    orphans_patience: float = ORPHANS_PATIENCE_S
    fresh: bool = False
    _known: dict[str, Any] = field(default_factory=dict)

    @property
    def version(self) -> tuple[int, ...]:
        """Major and minor, such as (0, 32)."""
        return tuple(map(int, self.zygote.vllm_version.split(".")[:2]))

    @property
    def python(self) -> Path:
        return self.zygote.python

    def but(
        self,
        *,
        environment: Mapping[str, str] | None = None,
        patience: float | None = None,
        orphans_patience: float | None = None,
        fresh: bool | None = None,
    ) -> VLLM:
        """The same vLLM with further environment variables, with other timeouts for calls or for
        processes left behind, or with a new interpreter instead of a fork for every scenario."""
        return replace(
            self,
            environment={**self.environment, **(environment or {})},
            patience=self.patience if patience is None else patience,
            orphans_patience=(
                self.orphans_patience if orphans_patience is None else orphans_patience
            ),
            fresh=self.fresh if fresh is None else fresh,
        )

    def start(self, scenario: Callable[P, object], *args: P.args, **kwargs: P.kwargs) -> Process:
        """Call a scenario in a new process; for a class, make an object there.

        Does not wait for a function: use `answer` of the process.
        """
        command = [str(self.python), "-m", "tests.e2e.vllm.served_calls", "CHANNEL"]
        process = self._fork(command if self.fresh else [])
        try:
            process.begin(scenario.__module__, scenario.__qualname__, args, kwargs)
            if isinstance(scenario, type):
                process.answer()
        except ScenarioFailedError:
            # The test may have killed it; even then, nothing may be left behind.
            process.end()
            raise
        except BaseException:
            process.kill()
            raise
        return process

    def run(self, scenario: Callable[P, R], *args: P.args, **kwargs: P.kwargs) -> R:
        """Call a scenario in a new process, and return its result when the process has ended."""
        with self.start(scenario, *args, **kwargs) as process:
            result: R = process.answer()
        return result

    def once(self, scenario: Callable[P, R], *args: P.args, **kwargs: P.kwargs) -> R:
        """Like `run`, but a scenario with the same arguments runs only once."""
        line = call_line(scenario.__module__, scenario.__qualname__, args, kwargs)
        key = json.dumps([line, dict(self.environment), self.fresh], sort_keys=True)
        if key not in self._known:
            self._known[key] = self.run(scenario, *args, **kwargs)
        result: R = self._known[key]
        return result

    def command(self, *command: str | Path) -> Process:
        """Run a program in vLLM's environment: `vllm.command(vllm.python, "-m", ...)`."""
        return self._fork(list(map(str, command)))

    def _fork(self, command: Sequence[str]) -> Process:
        return self.zygote.fork(self.environment, command, self.patience, self.orphans_patience)


@contextmanager
def stock_vllm(python: Path) -> Iterator[VLLM]:
    """The vLLM of that environment. At the end, all processes have ended and left no files."""
    # Not among pytest's directories: vLLM puts sockets there, whose paths may have 107 letters.
    with tempfile.TemporaryDirectory(prefix="vllm-") as folder:
        zygote = ZygoteProcess(python, Path(folder))
        try:
            zygote.wait_until_ready()
            yield VLLM(zygote)
        finally:
            zygote.stop()
