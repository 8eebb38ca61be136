"""An engine whose server is gone ends, and lets go of its tiers.

vLLM's engine is a process of its own, and does not notice when the server that started it is
killed: it waits for requests for ever, with the slab of its disk tier locked. A server that is
started again could not use that slab.
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
    """Waits in a thread for the end of one process, and ends this one then as vLLM's own server
    would: with SIGTERM, which has vLLM shut the engine down in order."""

    def __init__(self, server_pid: int) -> None:
        """Raises `OSError` where processes cannot be watched, or this one is gone."""
        self._pid = server_pid
        # Not by the signal that Linux sends when a parent ends: it comes with the end of the
        # thread that has started this process. Nor by a pipe, whose end others may inherit.
        self._server = os.pidfd_open(server_pid)
        self._wake, self._waker = os.pipe()
        self._thread = threading.Thread(target=self._run, name="kvtier-server-watch", daemon=True)
        self._thread.start()

    @classmethod
    def of_this_engine(cls, vllm_config: vllm_api.VllmConfig) -> ServerWatch | None:
        """For an engine that nobody but the process that started it can reach; else None. If that
        process is gone already, killed while the model was loaded, this engine ends at once.

        With several servers or replicas, and with a front end that is another program, that process
        only starts the others, which may go on without it.
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
        # The number of a server that is gone may be another process's by now. A fork server stands
        # between the server and its engine, so there the number is all there is to go by.
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
        """Stop watching. Once more changes nothing."""
        if self._waker < 0:
            return
        os.close(self._waker)
        self._waker = -1
        self._thread.join()
        os.close(self._wake)
        os.close(self._server)


def _end_this_engine(server_pid: int) -> None:
    logger.error(
        "the server that started this engine, process %d, has ended without ending it: nobody can "
        "reach this engine any more, and it ends",
        server_pid,
    )
    os.kill(os.getpid(), signal.SIGTERM)
