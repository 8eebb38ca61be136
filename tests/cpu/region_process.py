"""A real process that uses shared regions on command, for races and kills."""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np

from kvtier.cpu.shared_offload_region import SharedOffloadRegion

RegionMaker = Callable[..., SharedOffloadRegion]
Lend = Callable[[str, int], contextlib.AbstractContextManager["list[RegionProcess]"]]

SRC = Path(__file__).resolve().parents[2] / "src"


class RegionProcess:
    """The test's side: starts the process, sends commands, reads answers."""

    def __init__(self) -> None:
        self.directory = ""
        self.num_unanswered = 0
        self._process = subprocess.Popen(
            [sys.executable, __file__],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env=os.environ | {"PYTHONPATH": str(SRC)},
            text=True,
        )
        self.pid = self._process.pid

    def send(self, command: str, **arguments: Any) -> None:
        """Send a command without waiting for its answer."""
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps({"command": command, **arguments}) + "\n")
        self._process.stdin.flush()
        self.num_unanswered += 1

    def receive(self) -> Any:
        """The answer to the oldest command that has none yet."""
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        assert line, f"the process ended with status {self._process.wait()}"
        self.num_unanswered -= 1
        answer = json.loads(line)
        assert "error" not in answer, answer["error"]
        return answer["value"]

    def call(self, command: str, **arguments: Any) -> Any:
        self.send(command, **arguments)
        return self.receive()

    def send_open(self, engine_id: str, rank: int | None = None, **shape: int) -> None:
        self.send("open", directory=self.directory, engine_id=engine_id, rank=rank, **shape)

    def open(self, engine_id: str, rank: int | None = None, **shape: int) -> None:
        """Join or make a region. The answer comes when that is done."""
        self.send_open(engine_id, rank, **shape)
        self.receive()

    @property
    def has_ended(self) -> bool:
        return self._process.poll() is not None

    def kill(self) -> None:
        self._process.kill()
        self._reap()

    def end(self) -> int:
        """Let the process end by itself, without a command to clean up."""
        assert self._process.stdin is not None
        self._process.stdin.close()
        return self._reap()

    def _reap(self) -> int:
        status = self._process.wait()
        for pipe in (self._process.stdin, self._process.stdout):
            assert pipe is not None
            with contextlib.suppress(BrokenPipeError):
                pipe.close()
        return status


class RegionProcessPool:
    """Lends processes to tests, one test after the other, because starting Python takes long."""

    def __init__(self) -> None:
        self._idle: list[RegionProcess] = []

    @contextlib.contextmanager
    def lend(self, directory: str, count: int) -> Iterator[list[RegionProcess]]:
        """`count` processes for regions in `directory`. A test may kill them."""
        while len(self._idle) < count:
            self._idle.append(RegionProcess())
        lent = [self._idle.pop() for _ in range(count)]
        try:
            for process in lent:
                process.directory = directory
            yield lent
        finally:
            for process in lent:
                if process.has_ended:
                    process.kill()  # only closes its pipes
                elif process.num_unanswered:
                    process.kill()
                else:
                    process.call("reset")
                    self._idle.append(process)

    def close(self) -> None:
        while self._idle:
            self._idle.pop().end()


# ---------------------------------------------------------------------------------------------
# The side of the process
# ---------------------------------------------------------------------------------------------


class _Server:
    def __init__(self) -> None:
        self._region: SharedOffloadRegion | None = None
        self._rows: Any = None

    def reset(self) -> None:
        """Reset to the state of a new process."""
        self._rows = None
        if self._region is not None:
            self._region.cleanup()

    def open(
        self,
        directory: str,
        engine_id: str,
        rank: int | None,
        num_blocks: int = 2,
        kv_bytes_per_block: int = 8192,
        cpu_page_size: int = 2048,
    ) -> None:
        self._region = SharedOffloadRegion(
            engine_id, num_blocks, rank, kv_bytes_per_block, cpu_page_size, directory=directory
        )
        self._rows = np.asarray(self._region.create_kv_memoryview())

    def inode(self) -> int:
        """The file of this process's region, which must still have its name."""
        assert self._region is not None
        return os.stat(self._region.path).st_ino

    def is_zero(self) -> bool:
        return not self._rows.any()

    def write(self, row: int, offset: int, value: int) -> None:
        self._rows[row, offset] = value

    def read(self, row: int) -> list[int]:
        value: list[int] = self._rows[row].tolist()
        return value

    def fill(self, value: int) -> None:
        self._rows[:] = value

    def cleanup(self) -> None:
        assert self._region is not None
        self._rows = None
        self._region.cleanup()

    def num_open_files(self) -> int:
        return len(os.listdir("/proc/self/fd"))

    def churn(self, directory: str, engine_id: str, times: int) -> None:
        """Open and clean up repeatedly, and check that what was opened is shared."""
        for _ in range(times):
            region = SharedOffloadRegion(engine_id, 2, None, 4096, 4096, directory=directory)
            other = SharedOffloadRegion(engine_id, 2, None, 4096, 4096, directory=directory)
            rows, other_rows = region.create_kv_memoryview(), other.create_kv_memoryview()
            rows[1, os.getpid() % 4096] = 1
            assert other_rows[1, os.getpid() % 4096] == 1
            region.cleanup()
            other.cleanup()

    def stop_at(self, point: str) -> None:
        """From now on, stop at this point of making a region, and print a line there."""
        module, name, condition = _POINTS[point]
        original = getattr(module, name)

        def stopping(*args: Any, **kwargs: Any) -> Any:
            if condition(*args):
                print(json.dumps({"value": "stopped"}), flush=True)
                while True:
                    signal.pause()
            return original(*args, **kwargs)

        setattr(module, name, stopping)

    def fork(self) -> int:
        """Fork a child that keeps everything it inherits until it is killed."""
        pid = os.fork()
        if pid == 0:
            while True:
                signal.pause()
        return pid

    def spawn(self) -> int:
        """Start another program that inherits all inheritable descriptors, until it is killed."""
        return subprocess.Popen(["sleep", "1000"], close_fds=False, stdout=2).pid


def _always(*_: Any) -> bool:
    return True


_POINTS: dict[str, tuple[Any, str, Callable[..., bool]]] = {
    "before the file has a name": (os, "link", _always),
    "before sizing": (os, "posix_fallocate", _always),
    "amid sizing": (os, "posix_fallocate", lambda _, offset, __: offset > 0),
    "after sizing": (fcntl, "flock", lambda _, operation: operation == fcntl.LOCK_SH),
}


def _serve() -> None:
    import kvtier.cpu.region_file

    kvtier.cpu.region_file._RESERVE_STEP = 4096  # so that sizing has a middle
    server = _Server()
    for line in sys.stdin:
        arguments = json.loads(line)
        command = getattr(server, arguments.pop("command"))
        try:
            answer = {"value": command(**arguments)}
        except Exception as error:
            answer = {"error": f"{type(error).__name__}: {error}"}
        print(json.dumps(answer), flush=True)


if __name__ == "__main__":
    _serve()
