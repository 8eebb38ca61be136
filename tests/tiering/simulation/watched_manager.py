"""The orchestrator, which also records when it may poll tiers more than once in a step."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

from kvtier.base import OffloadKey, PrepareStoreOutput, ReqContext
from kvtier.tiering.manager import TieringOffloadingManager
from tests.tiering.simulation.world import World


class WatchedManager(TieringOffloadingManager):
    """The manager, which also records when it looks for room and when it shuts down."""

    def __init__(self, world: World, *args: Any, **kwargs: Any) -> None:
        self._world = world
        super().__init__(*args, **kwargs)

    def prepare_store(
        self, keys: Collection[OffloadKey], req_context: ReqContext
    ) -> PrepareStoreOutput | None:
        self._world.is_offering_store = True
        try:
            return super().prepare_store(keys, req_context)
        finally:
            self._world.is_offering_store = False

    def shutdown(self) -> None:
        self._world.is_ending = True
        super().shutdown()
