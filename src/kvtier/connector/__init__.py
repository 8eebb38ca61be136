"""The API for engines: it decides what to load, what to store, and when. See docs/engines.md.

vLLM does not use it. vLLM has a connector of its own, which decides the same from vLLM's block
tables, and `kvtier.integrations.vllm` plugs in below that connector. This package and
`kvtier.integrations.vllm` share the code that reads a request's hints
(`kvtier.hints`), the code that counts the prompt tokens that a step computes
(`common.prefill_in`), and the manager with everything below it.
"""

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
