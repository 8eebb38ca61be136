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
        """For an engine that nobody but the process that started it can reach; else None.

        With several servers or replicas, and with a front end that is another program, that process
        only starts the others, which may go on without it.
        """
        parent = multiprocessing.parent_process()
        if (
            parent is None
            or parent.pid is None
            # Replicas have a number in their name.
            or multiprocessing.current_process().name != "EngineCore"
            or getattr(vllm_config.parallel_config, "_api_process_count", None) != 1
            or "VLLM_RUST_FRONTEND_PATH" in os.environ
        ):
            return None
        try:
            return cls(parent.pid)
        except OSError as error:
            logger.debug("the server, process %d, cannot be watched: %s", parent.pid, error)
            return None

    def _run(self) -> None:
        ready, _, _ = select.select([self._server, self._wake], [], [])
        if self._wake in ready:
            return
        logger.error(
            "the server that started this engine, process %d, has ended without ending it: nobody "
            "can reach this engine any more, and it ends",
            self._pid,
        )
        os.kill(os.getpid(), signal.SIGTERM)

    def close(self) -> None:
        """Stop watching. Once more changes nothing."""
        if self._waker < 0:
            return
        os.close(self._waker)
        self._waker = -1
        self._thread.join()
        os.close(self._wake)
        os.close(self._server)
