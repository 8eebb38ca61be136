"""Engines that must not start, or not serve."""

from __future__ import annotations

import ctypes
import logging
import threading
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tests.e2e.vllm.scenarios.engine import Engine

if TYPE_CHECKING:
    from kvtier.integrations.vllm.manager import ManagerAdapter

FROM_ANOTHER_HOST = {
    "spec_name": "SpecOfAnotherHost",
    "spec_module_path": "tests.e2e.vllm.scenarios.refusals",
}
"""Keys of kvtier's options for an engine whose scheduler does not share memory with its rank."""

_CLONE_NEWNS, _MS_REC, _MS_PRIVATE = 0x20000, 0x4000, 1 << 18


def refusal(model: str, options: dict[str, Any], **engine_args: Any) -> dict[str, Any]:
    """Start an engine and give it a request. Returns the error, when it came, and what is left."""
    when, why = "never", ""
    engine = None
    try:
        engine = Engine(model, options, **engine_args)
        engine.add("first", list(range(3, 75)), 2)
        engine.run()
    except Exception as error:
        when, why = "at start" if engine is None else "at the first request", str(error)
    left = [] if engine is None else engine.close()
    left += [thread.name for thread in threading.enumerate() if "kvtier" in thread.name]
    # Only regions that this process has mapped: other engines on this machine have theirs.
    mapped = {Path(part) for part in Path("/proc/self/maps").read_text().split()}
    left += [str(path) for path in mapped if path.match("/dev/shm/kvtier-*") and path.exists()]
    return {"when": when, "why": why, "left": left}


def last_words(model: str, options: dict[str, Any], **engine_args: Any) -> dict[str, Any]:
    """The error lines of kvtier, and the exception, of an engine that does not start."""
    errors: list[str] = []

    class Errors(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            errors.append(record.getMessage())

    logging.getLogger("kvtier").addHandler(Errors(logging.ERROR))
    raised = refusal(model, options, **engine_args)["why"]
    return {"errors": errors, "raised": raised}


def lines_before_the_start(options: dict[str, Any]) -> list[str]:
    """What vLLM's log shows if the keys are refused where vLLM first asks about them, before it
    makes an engine."""
    from kvtier.config import ConfigError
    from kvtier.integrations.vllm.connector import KVTierConnector

    lines: list[str] = []

    class Lines(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            lines.append(record.getMessage())

    logging.getLogger("vllm").addHandler(Lines())
    with suppress(ConfigError):
        KVTierConnector.requires_piecewise_for_cudagraph(options)
    return lines


def can_be_elsewhere() -> bool:
    """True if this process may have a thread with a /dev/shm of its own."""
    return bool(_call_elsewhere(lambda: True, lambda: False))


def _call_elsewhere(call: Any, otherwise: Any) -> Any:
    """The result of `call` with a different /dev/shm, as on another host or in another container.
    Calls `otherwise` if this process may not change its mounts."""
    outcome: list[Any] = []

    def run() -> None:
        # For this thread alone.
        libc = ctypes.CDLL(None, use_errno=True)
        is_there = (
            libc.unshare(_CLONE_NEWNS) == 0
            and libc.mount(b"none", b"/", None, _MS_REC | _MS_PRIVATE, None) == 0
            and libc.mount(b"none", b"/dev/shm", b"tmpfs", 0, None) == 0
        )
        try:
            outcome.append((call() if is_there else otherwise(), None))
        except Exception as error:
            outcome.append((None, error))

    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    ((result, error),) = outcome
    if error is not None:
        raise error
    return result


def __getattr__(name: str) -> object:
    # Made when vLLM loads it by name: tests import this module without vLLM.
    if name != "SpecOfAnotherHost":
        raise AttributeError(name)
    from kvtier.integrations.vllm.spec import KVTierOffloadingSpec

    class SpecOfAnotherHost(KVTierOffloadingSpec):
        def get_manager(self) -> ManagerAdapter:
            adapter: ManagerAdapter = _call_elsewhere(super().get_manager, super().get_manager)
            return adapter

    return SpecOfAnotherHost
