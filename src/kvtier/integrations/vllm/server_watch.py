"""Ends an engine whose server was killed, so that its tiers are released.

vLLM's engine is a process of its own. It does not notice when the server that started it is killed.
It waits for requests forever, and keeps the slab (the file of its disk tier) locked, so a new
server cannot use the slab.
"""

from __future__ import annotations

import logging
import multiprocessing
import os
import select
import signal
import threading
from multiprocessing.context import ForkServerProcess
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from kvtier.integrations.vllm import vllm_api

__all__ = ["ServerWatch"]

logger = logging.getLogger(__name__)


class ServerWatch:
    """Waits in a thread for the end of the server's process, and then sends SIGTERM to this
    process, as vLLM's server would. On SIGTERM, vLLM shuts the engine down in order."""

    def __init__(self, server_pid: int) -> None:
        """Raises `OSError` if processes cannot be watched here, or if the server has ended."""
        self._pid = server_pid
        # PR_SET_PDEATHSIG is not enough: it signals the end of the thread that started this
        # process. A pipe is not enough either: other processes may inherit its other end.
        self._server = os.pidfd_open(server_pid)
        self._wake, self._waker = os.pipe()
        self._thread = threading.Thread(target=self._run, name="kvtier-server-watch", daemon=True)
        self._thread.start()

    @classmethod
    def of_this_engine(cls, vllm_config: vllm_api.VllmConfig) -> ServerWatch | None:
        """A watch on the parent process, if only the parent can reach this engine; else None. If
        the parent was killed while the model was loaded, this engine ends at once.

        With several servers or replicas, or a front end that is another program, the parent only
        starts the other processes, which may continue without it.
        """
        parent, engine = multiprocessing.parent_process(), multiprocessing.current_process()
        if (
            parent is None
            or parent.pid is None
            # Replicas have a number in their name.
            or engine.name != "EngineCore"
            or getattr(vllm_config.parallel_config, "_api_process_count", None) != 1
            or "VLLM_RUST_FRONTEND_PATH" in os.environ
        ):
            return None
        # Check that the server is still this process's parent: after its end, another process may
        # have its id. With a fork server in between, the server is not the parent, and its id is
        # all that is known.
        if not isinstance(engine, ForkServerProcess) and os.getppid() != parent.pid:
            _end_this_engine(parent.pid)
            return None
        try:
            return cls(parent.pid)
        except ProcessLookupError:
            _end_this_engine(parent.pid)
        except OSError as error:
            logger.debug("the server, process %d, cannot be watched: %s", parent.pid, error)
        return None

    def _run(self) -> None:
        poll = select.poll()  # select() takes no descriptor above 1023
        poll.register(self._server, select.POLLIN)
        poll.register(self._wake, select.POLLIN)
        if self._wake not in dict(poll.poll()):
            _end_this_engine(self._pid)

    def close(self) -> None:
        """Stop watching. A second call does nothing."""
        if self._waker < 0:
            return
        os.close(self._waker)
        self._waker = -1
        self._thread.join()
        os.close(self._wake)
        os.close(self._server)


def _end_this_engine(server_pid: int) -> None:
    logger.error(
        "the server that started this engine, process %d, has ended without ending the engine: "
        "requests can no longer reach the engine, so it ends now and releases its tiers",
        server_pid,
    )
    os.kill(os.getpid(), signal.SIGTERM)
