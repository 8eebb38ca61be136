"""An engine that has a slab open, and whose server was killed.

    python -m tests.tiering.disk.orphan PATH

The started process ends once its child has the slab. The child prints its own pid and its parent's,
and ends when its standard input ends.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from kvtier.tiering.disk.slab import open_slab

PAYLOAD_BYTES, MAX_BYTES = 4096, 1 << 20
_ROOT = Path(__file__).parents[3]


@contextmanager
def orphaned(path: Path) -> Iterator[tuple[int, int]]:
    """Pids of the engine and of its server, which has ended."""
    server = subprocess.Popen(
        [sys.executable, "-m", "tests.tiering.disk.orphan", str(path)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        cwd=_ROOT,
        env=os.environ | {"PYTHONPATH": f"{_ROOT / 'src'}{os.pathsep}{_ROOT}"},
    )
    with server:  # closes its input, and waits for its output to end
        assert server.stdout is not None
        engine_pid, server_pid = map(int, server.stdout.readline().split())
        assert server.wait(60) == 0
        yield engine_pid, server_pid
        assert server.stdin is not None
        server.stdin.close()
        server.stdout.read()


def main() -> None:
    ready, is_ready = os.pipe()
    if os.fork():
        os.read(ready, 1)
        os._exit(0)
    _slab = open_slab(Path(sys.argv[1]), PAYLOAD_BYTES, MAX_BYTES, "engine-0", None)
    print(os.getpid(), os.getppid(), flush=True)
    os.write(is_ready, b"!")
    sys.stdin.read()


if __name__ == "__main__":
    main()
