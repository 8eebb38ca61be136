"""A process that has imported vLLM and forks on request: importing takes longer than most tests.

    PYTHON-WITH-VLLM -m tests.e2e.vllm.zygote CONTROL-FD FOLDER

CONTROL-FD is one end of a `SOCK_SEQPACKET` socket. The zygote first sends one message with the
version it has imported. Each order comes with a descriptor, the new process's end of its own
channel, and is answered with the process id. When a process ends, the zygote reports its exit
status, kills descendants that outlived it, and reports these as well. It ends with the socket.

The zygote only imports: it makes no engine, no thread and no random number. So a fork behaves like
a new interpreter; `test_harness` compares the two.
"""

from __future__ import annotations

import atexit
import ctypes
import faulthandler
import gc
import json
import multiprocessing.context
import os
import selectors
import signal
import socket
import sys
import tempfile
import threading
import time
from dataclasses import dataclass, field
from importlib import import_module
from pathlib import Path
from typing import Any, NoReturn

from kvtier.testing.vllm.in_process import contain
from tests.e2e.vllm.served_calls import serve_calls

_PR_SET_PDEATHSIG, _PR_SET_CHILD_SUBREAPER = 1, 36
_IMPORTED = (
    "vllm.distributed.kv_transfer.kv_connector.v1.offloading_connector",
    "vllm.entrypoints.llm",
    "vllm.v1.engine.core",
    "vllm.v1.engine.llm_engine",
    "vllm.v1.worker.cpu_worker",
    "kvtier.integrations.vllm.spec",
)
_MODELS = {
    "LlamaForCausalLM": "vllm.model_executor.models.llama",
    "Gemma3ForCausalLM": "vllm.model_executor.models.gemma3",
}


@dataclass(frozen=True, slots=True)
class Order:
    """An order for a new process."""

    channel: int
    """Descriptor of the process's end of its channel."""
    folder: Path
    """Folder for standard output, standard error and temporary files."""
    environment: dict[str, str]
    command: list[str]
    """Command to run instead of serving calls; the number of the descriptor replaces `CHANNEL`."""
    orphans_patience: float
    """Seconds in which descendants that outlive the process may end by themselves."""


def _prctl(option: int, value: int) -> None:
    if ctypes.CDLL(None, use_errno=True).prctl(option, value, 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), "prctl")


def _children() -> set[int]:
    pid = os.getpid()
    return set(map(int, Path(f"/proc/{pid}/task/{pid}/children").read_text().split()))


def _command_line(pid: int) -> str:
    return Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode().strip()


@dataclass(slots=True)
class Zygote:
    """Forks processes, waits for their end, and reports it."""

    control: socket.socket
    _selector: selectors.BaseSelector = field(default_factory=selectors.DefaultSelector)
    _running: dict[int, int] = field(default_factory=dict)
    """The pidfd of every process that has not ended, by process id."""
    _orphans_patience: dict[int, float] = field(default_factory=dict)
    """The order of each process, by process id."""

    def serve(self) -> Order | None:
        """Serve orders. Returns the order in every new process, and None in the zygote at the
        end."""
        self._selector.register(self.control, selectors.EVENT_READ)
        while True:
            for key, _ in self._selector.select():
                if key.fileobj is not self.control:
                    self._bury(key.data)
                    continue
                message, descriptors, _, _ = socket.recv_fds(self.control, 1 << 16, 1)
                if not message:
                    self._end_all()
                    return None
                order = self._order(json.loads(message), descriptors)
                if self._fork(order) == 0:
                    return order
                os.close(order.channel)

    def _order(self, message: dict[str, Any], descriptors: list[int]) -> Order:
        return Order(
            channel=descriptors[0],
            folder=Path(message["folder"]),
            environment=message["environment"],
            command=message["command"],
            orphans_patience=message["orphans_patience"],
        )

    def _fork(self, order: Order) -> int:
        only_thread = len(os.listdir("/proc/self/task")) == 1
        assert only_thread, "a fork has one thread only, and locks of the others for ever"
        pid = os.fork()
        if pid == 0:
            self._selector.close()
            self.control.close()
            for descriptor in self._running.values():
                os.close(descriptor)
            return 0
        self._running[pid] = os.pidfd_open(pid)
        self._orphans_patience[pid] = order.orphans_patience
        self._selector.register(self._running[pid], selectors.EVENT_READ, pid)
        self._say({"forked": pid})
        return pid

    def _bury(self, pid: int) -> None:
        descriptor = self._running.pop(pid)
        self._selector.unregister(descriptor)
        os.close(descriptor)
        _, status = os.waitpid(pid, 0)
        self._say(
            {
                "ended": pid,
                "exit_code": os.waitstatus_to_exitcode(status),
                "orphans": self._end_orphans(self._orphans_patience.pop(pid)),
            }
        )

    def _end_orphans(self, patience: float) -> list[str]:
        """Wait for orphaned descendants of a process that has ended: they are the zygote's
        children."""
        deadline = time.monotonic() + patience
        ended_by_force: list[str] = []
        while orphans := _children() - set(self._running):
            for pid in orphans:
                if os.waitpid(pid, os.WNOHANG) == (0, 0) and time.monotonic() > deadline:
                    ended_by_force.append(_command_line(pid))
                    os.kill(pid, signal.SIGKILL)
                    os.waitpid(pid, 0)
            time.sleep(0.01)
        return ended_by_force

    def _end_all(self) -> None:
        for pid in list(self._running):
            os.killpg(pid, signal.SIGKILL)
            os.waitpid(pid, 0)
        for pid in _children() - set(self._running):
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)

    def _say(self, message: dict[str, Any]) -> None:
        self.control.send(json.dumps(message).encode())


def settle_in(order: Order) -> None:
    """Give this process its own group, output and environment."""
    os.setpgid(0, 0)
    _prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    _prctl(_PR_SET_CHILD_SUBREAPER, 1)
    for descriptor, name in ((1, "stdout"), (2, "stderr")):
        file = os.open(order.folder / name, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
        os.dup2(file, descriptor)
        os.close(file)
    os.environ.update(order.environment)
    os.environ["TMPDIR"] = str(order.folder / "tmp")
    Path(os.environ["TMPDIR"]).mkdir()
    tempfile.tempdir = None
    # After a timeout, the test asks for the stacks of all threads.
    faulthandler.register(signal.SIGUSR1, all_threads=True)


def become(order: Order) -> None:
    """Carry out the order."""
    settle_in(order)
    if not order.command:
        serve_calls(socket.socket(fileno=order.channel))
        return
    os.set_inheritable(order.channel, True)
    command = [part.replace("CHANNEL", str(order.channel)) for part in order.command]
    os.execvp(command[0], command)


def import_everything() -> str:
    """Import what every scenario needs. Returns vLLM's version."""
    for name in _IMPORTED:
        import_module(name)
    register_models()
    version: str = import_module("vllm").__version__
    return version


def register_models() -> None:
    """Register the models here: vLLM would inspect each in another process, which takes 8 s."""
    registry = import_module("vllm").ModelRegistry
    for name, module in _MODELS.items():
        registry.register_model(name, getattr(import_module(module), name))


def freeze() -> None:
    """Freeze all imported objects: the garbage collector, which vLLM runs several times in every
    fork, would touch and so copy their memory."""
    gc.collect()
    gc.freeze()
    # vLLM calls it when an engine ends.
    gc.unfreeze = lambda: None


def fork_what_vllm_spawns() -> None:
    """Fork engine processes and ranks, which vLLM on the CPU would spawn, and which import it in 7
    s.

    Servers that are `fresh` (see `openai_server`) spawn theirs.
    """
    contexts = multiprocessing.context._concrete_contexts  # type: ignore[attr-defined]
    contexts["spawn"] = contexts["fork"]


def end() -> NoReturn:
    """End the process as Python does, but without tearing down every module."""
    threading._shutdown()  # type: ignore[attr-defined]  # waits for threads
    atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)


def main() -> None:
    """Import, then fork until the control socket is closed."""
    control = socket.socket(fileno=int(sys.argv[1]))
    contain(Path(sys.argv[2]))
    version = import_everything()
    _prctl(_PR_SET_CHILD_SUBREAPER, 1)
    freeze()
    fork_what_vllm_spawns()
    control.send(json.dumps({"vllm": version}).encode())
    order = Zygote(control).serve()
    if order is not None:
        become(order)
        end()


if __name__ == "__main__":
    main()
