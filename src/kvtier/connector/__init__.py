"""The API for engines: what to load, what to store, and when. See docs/engines.md."""

from kvtier.connector.common import (
    NO_DEVICE_BLOCK,
    ComputedTokens,
    ConnectorMetadata,
    EngineRequest,
    LoadedRequest,
    PrefixMatch,
    ScheduledRequest,
    StepPlan,
    TransferOrder,
    WorkerOutput,
)
from kvtier.connector.events import AllBlocksCleared, BlockRemoved, BlockStored, KVCacheEvent
from kvtier.connector.scheduler import OffloadingConnectorScheduler
from kvtier.connector.worker import OffloadingConnectorWorker

__all__ = [
    "NO_DEVICE_BLOCK",
    "AllBlocksCleared",
    "BlockRemoved",
    "BlockStored",
    "ComputedTokens",
    "ConnectorMetadata",
    "EngineRequest",
    "KVCacheEvent",
    "LoadedRequest",
    "OffloadingConnectorScheduler",
    "OffloadingConnectorWorker",
    "PrefixMatch",
    "ScheduledRequest",
    "StepPlan",
    "TransferOrder",
    "WorkerOutput",
]
