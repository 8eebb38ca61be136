"""The test's side of an engine whose copies between host memory and the device fail."""

from __future__ import annotations

from collections.abc import Mapping
from itertools import count
from pathlib import Path
from typing import Any

from tests.e2e.vllm.processes import VLLM
from tests.e2e.vllm.remote_engine import RemoteEngine
from tests.e2e.vllm.scenarios.faulty_transfers import WITH_FAULTS, FaultyEngine


class FaultyRemoteEngine(RemoteEngine):
    """An engine whose copies can be made to fail, or to wait."""

    def __init__(
        self, vllm: VLLM, model: Path, kvtier: Mapping[str, Any], **engine_args: Any
    ) -> None:
        options = WITH_FAULTS | dict(kvtier)
        engine_args = {"device_blocks": 64, "max_model_len": 512} | engine_args
        self.process = vllm.start(FaultyEngine, str(model), options, **engine_args)
        self._numbers = count()

    def set_faults(self, **faults: Any) -> None:
        self.process.ask("set_faults", **faults)

    def under_way(self) -> list[str]:
        """The kinds of copies that wait while `are_held`: `load` or `store`."""
        held: list[str] = self.process.ask("under_way")
        return held
