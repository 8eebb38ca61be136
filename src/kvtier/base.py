"""The contract: keys, request contexts, results, and the abstract manager, worker and spec.

The rest of kvtier, every storage tier and every engine adapter use these types. This module imports
numpy, but no tier and no engine.

Threads: the engine calls an `OffloadingManager` from its scheduler thread only, and an
`OffloadingWorker` from the main thread of a worker process (one process per rank). No method blocks
its caller, except `OffloadingWorker.wait` and the `shutdown` methods.
"""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum, StrEnum, auto
from itertools import product
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple, NewType, Protocol, TypeVar

import numpy as np
from numpy.typing import NDArray

if TYPE_CHECKING:
    from kvtier.config import OffloadingConfig

__all__ = [
    "BlockDescriber",
    "BlockIDsLoadStoreSpec",
    "CanonicalKVCacheRef",
    "CanonicalKVCacheTensor",
    "CanonicalKVCaches",
    "GPULoadStoreSpec",
    "LoadStoreSpec",
    "Locality",
    "LookupResult",
    "Medium",
    "MetricDefinition",
    "MetricKind",
    "OffloadKey",
    "OffloadPolicy",
    "OffloadingEvent",
    "OffloadingManager",
    "OffloadingSpec",
    "OffloadingStats",
    "OffloadingWorker",
    "PrefixLookup",
    "PrepareStoreOutput",
    "ReqContext",
    "RequestOffloadingContext",
    "ScheduleEndContext",
    "TierFilter",
    "TierMatcher",
    "TransferResult",
    "WriteHint",
    "get_offload_block_hash",
    "get_offload_group_idx",
    "make_offload_key",
    "metric_series",
]

# ---------------------------------------------------------------------------------------------
# Keys
# ---------------------------------------------------------------------------------------------

OffloadKey = NewType("OffloadKey", bytes)
"""Names one offloaded block: the block's hash followed by its group index.

Plain bytes, because Python caches their hash, compares them in C, and does not track them for
garbage collection.
"""

_GROUP_IDX_BYTES = 4


def make_offload_key(block_hash: bytes, group_idx: int) -> OffloadKey:
    """Join a block hash and a KV-cache group index into a key."""
    return OffloadKey(block_hash + group_idx.to_bytes(_GROUP_IDX_BYTES, "big"))


def get_offload_block_hash(key: OffloadKey) -> bytes:
    """Return the block hash inside `key`."""
    return key[:-_GROUP_IDX_BYTES]


def get_offload_group_idx(key: OffloadKey) -> int:
    """Return the KV-cache group index inside `key`."""
    return int.from_bytes(key[-_GROUP_IDX_BYTES:], "big")


# ---------------------------------------------------------------------------------------------
# Where blocks live, and which of those places a request may read
# ---------------------------------------------------------------------------------------------


class Medium(StrEnum):
    """What kind of memory a block is in."""

    GPU = "GPU"
    CPU = "CPU"
    STORAGE = "STORAGE"


class Locality(StrEnum):
    """Whether a tier's storage belongs to this engine's machine or is reached over a network."""

    LOCAL = "LOCAL"
    REMOTE = "REMOTE"


class TierMatcher(NamedTuple):
    """One pattern of a `TierFilter`. A field that is None matches every tier."""

    medium: Medium | None = None
    locality: Locality | None = None

    def matches(self, medium: Medium | None, locality: Locality | None) -> bool:
        """True if a tier with this medium and locality fits. None (unknown) fits every pattern."""
        return (self.medium is None or medium is None or self.medium == medium) and (
            self.locality is None or locality is None or self.locality == locality
        )


@dataclass(frozen=True, slots=True)
class TierFilter:
    """The tiers below host memory that a request may load from. No matchers: none of them."""

    matchers: tuple[TierMatcher, ...] = ()

    ALL: ClassVar[TierFilter]

    def allows(self, medium: Medium | None, locality: Locality | None) -> bool:
        """True if at least one matcher fits."""
        return any(matcher.matches(medium, locality) for matcher in self.matchers)


TierFilter.ALL = TierFilter(matchers=(TierMatcher(),))


# ---------------------------------------------------------------------------------------------
# Requests
# ---------------------------------------------------------------------------------------------


class WriteHint(StrEnum):
    """What tiers below get of a request, instead of what their write policies choose."""

    NEVER = "never"
    """None of the blocks that it stores, until another request has used them."""
    THROUGH = "through"
    """All blocks that it stores, at once."""


_T = TypeVar("_T")


@dataclass(slots=True, eq=False)
class ReqContext:
    """One request. The engine makes it once, and passes it to every call for this request.

    `set_state` and `get_state` keep one value per type, so that a tier can parse a request's hints
    once, in `on_new_request`, and read the result in later calls.
    """

    req_id: str
    kv_transfer_params: Mapping[str, Any] | None = None
    load_tier_filter: TierFilter = TierFilter.ALL
    num_prompt_tokens: int | None = field(default=None, kw_only=True)
    """Tokens of the prompt. None: the engine does not say, or looks up only part of the prompt."""
    write_hint: WriteHint | None = field(default=None, kw_only=True)
    """None: each tier's write policy decides which blocks it gets."""
    created_s: float = field(default_factory=time.monotonic, init=False, repr=False)
    """When the request arrived, on the monotonic clock."""
    is_prefetch: bool = field(default=False, kw_only=True)
    """True if nobody waits for this request: it brings up blocks for one that is still to come."""
    may_load: bool = field(default=True, kw_only=True)
    """False if `OffloadingManager.serves` said that the request may not load."""
    is_served: bool = field(default=True, kw_only=True)
    """False if `OffloadingManager.serves` said that the request may neither load nor store."""
    _state: dict[type, Any] = field(default_factory=dict, init=False, repr=False)

    def set_state(self, value: object) -> None:
        """Remember `value` under its own type, replacing an earlier one of that type."""
        self._state[type(value)] = value

    def get_state(self, cls: type[_T]) -> _T | None:
        """Return the last value set with exactly this type, or None."""
        return self._state.get(cls)


class LookupResult(Enum):
    """Answer of `OffloadingManager.lookup`."""

    MISS = auto()
    """Not stored, or not loadable in time: compute the block."""
    HIT = auto()
    """Readable now."""
    HIT_PENDING = auto()
    """Found, but not readable yet: ask again at the next step."""
    RETRY = auto()
    """Not known yet whether it is stored: ask again at the next step."""


class PrefixLookup(NamedTuple):
    """Answer of `OffloadingManager.lookup_prefix`."""

    num_hits: int
    """Number of leading keys that are HIT or HIT_PENDING."""
    is_final: bool
    """False if a key is HIT_PENDING or RETRY: ask again at the next step."""


class OffloadPolicy(Enum):
    """Which of a request's blocks a manager wants to be offered."""

    BLOCK_LEVEL = "block_level"
    """New blocks only; prefix hits are not offered again."""
    REQUEST_LEVEL = "request_level"
    """All blocks of the request, prefix hits included."""


@dataclass(slots=True)
class RequestOffloadingContext:
    """How the engine should offer a request's blocks. Answer of `on_new_request`."""

    policy: OffloadPolicy = OffloadPolicy.BLOCK_LEVEL


class ScheduleEndContext(NamedTuple):
    """What happened in the scheduling step that just ended."""

    new_req_ids: Collection[str] = ()
    preempted_req_ids: Collection[str] = ()


# ---------------------------------------------------------------------------------------------
# Transfers
# ---------------------------------------------------------------------------------------------


class LoadStoreSpec(ABC):
    """Where the blocks on one side of a transfer are. Pickled for the workers."""

    @staticmethod
    @abstractmethod
    def medium() -> Medium:
        """The kind of memory this spec points into."""


class BlockIDsLoadStoreSpec(LoadStoreSpec):
    """Blocks named by their index in an array of blocks of equal size.

    An index of -1 stands for a block that does not exist; the worker must report a transfer with
    such an index as failed.
    """

    def __init__(self, block_ids: Sequence[int] | NDArray[np.integer[Any]]) -> None:
        self.block_ids: NDArray[np.int64] = np.asarray(block_ids, dtype=np.int64)

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.block_ids.tolist()})"


class GPULoadStoreSpec(BlockIDsLoadStoreSpec):
    """Device blocks, ordered by KV-cache group.

    `group_sizes[i]` is the number of blocks of group i; they sum to `len(block_ids)`.
    `block_indices[i]` is the logical index, within its request, of group i's first block. An
    offloaded block may span several device blocks; the index tells the worker how far into the
    first offloaded block the transfer starts.
    """

    def __init__(
        self,
        block_ids: Sequence[int] | NDArray[np.integer[Any]],
        group_sizes: Sequence[int],
        block_indices: Sequence[int],
    ) -> None:
        super().__init__(block_ids)
        if sum(group_sizes) != len(self.block_ids):
            raise ValueError(
                f"group_sizes {list(group_sizes)} sum to {sum(group_sizes)}, "
                f"but there are {len(self.block_ids)} block_ids"
            )
        if len(block_indices) != len(group_sizes):
            raise ValueError(
                f"{len(block_indices)} block_indices for {len(group_sizes)} groups: "
                "give one per group"
            )
        self.group_sizes = tuple(group_sizes)
        self.block_indices = tuple(block_indices)

    @staticmethod
    def medium() -> Medium:
        return Medium.GPU


@dataclass(slots=True)
class PrepareStoreOutput:
    """Answer of `OffloadingManager.prepare_store`."""

    keys_to_store: list[OffloadKey]
    """The keys to be copied, in the order in which they were offered."""
    store_spec: LoadStoreSpec
    """Where to copy the blocks to: one entry per key to store."""
    evicted_keys: list[OffloadKey]
    """The keys that were evicted to make room."""


@dataclass(slots=True)
class TransferResult:
    """Outcome of one worker transfer."""

    job_id: int
    success: bool
    transfer_size: int | None = None
    """Bytes moved, where known."""
    transfer_time: float | None = None
    """Seconds from the first to the last byte, where known."""


# ---------------------------------------------------------------------------------------------
# Events and statistics
# ---------------------------------------------------------------------------------------------


@dataclass(slots=True)
class OffloadingEvent:
    """Blocks that appeared in, or disappeared from, one tier.

    There is no block size: keys of groups with different block sizes may share one event.
    """

    keys: list[OffloadKey]
    medium: Medium
    removed: bool
    locality: Locality | None = None
    tier: str | None = None
    """The tier's label in the metrics, such as `0:disk`; None for host memory. It distinguishes
    tiers of one medium. The tier leaves it None; the manager above the tiers sets it."""
    descriptions: Sequence[Any] | None = None
    """Only for blocks that an earlier engine has left: for each key, what `BlockDescriber.read` has
    returned, or None."""


class BlockDescriber(Protocol):
    """Describes blocks to consumers of events, such as routers: tokens, parent, and so on.

    An engine's connector implements it. A tier that outlives the process keeps the description with
    the block, so that the next engine can report what the tier has. Any thread may call it.
    """

    def describe(self, key: OffloadKey) -> bytes | None:
        """The description of a block that is being stored; None if it is not known any more.
        Usually about 150 bytes, but there is no limit."""

    def read(self, key: OffloadKey, data: bytes) -> Any | None:
        """Decode what `describe` has returned in this or an earlier process, for
        `OffloadingEvent.descriptions`. None if it is damaged or of another format."""


class MetricKind(Enum):
    """How a metric behaves over time."""

    COUNTER = "counter"
    GAUGE = "gauge"
    HISTOGRAM = "histogram"


@dataclass(frozen=True, slots=True)
class MetricDefinition:
    """Describes one metric of `OffloadingStats` to a metrics endpoint."""

    kind: MetricKind
    documentation: str
    buckets: tuple[float, ...] | None = None
    """Upper bounds, for histograms only."""
    labels: tuple[tuple[str, tuple[str, ...]], ...] = ()
    """Each label with all values that it may have, so that no label is unbounded."""

    def series(self, name: str) -> dict[str, tuple[str, ...]]:
        """All series of the metric with this name: their label values, by `metric_series`."""
        names = [label for label, _ in self.labels]
        return {
            metric_series(name, dict(zip(names, values, strict=True))): values
            for values in product(*(values for _, values in self.labels))
        }


def metric_series(name: str, labels: Mapping[str, str]) -> str:
    """The name of one series as Prometheus writes it: `name{label="value",...}`. The labels are in
    the order of the metric's definition; without labels, it is the metric's name."""
    if not labels:
        return name
    escaped = (
        (label, value.replace("\\", r"\\").replace('"', r"\"").replace("\n", r"\n"))
        for label, value in labels.items()
    )
    return name + "{" + ",".join(f'{label}="{value}"' for label, value in escaped) + "}"


@dataclass(slots=True)
class OffloadingStats:
    """Metrics of one manager, by series: the names of `build_metric_definitions`, with labels as in
    `metric_series`."""

    counters: dict[str, float] = field(default_factory=dict)
    """Increase since the last `get_stats`."""
    gauges: dict[str, float] = field(default_factory=dict)
    """Current value."""
    histograms: dict[str, list[float]] = field(default_factory=dict)
    """Observations since the last `get_stats`."""


# ---------------------------------------------------------------------------------------------
# The manager
# ---------------------------------------------------------------------------------------------


class OffloadingManager(ABC):
    """Keeps track of offloaded blocks. Scheduler thread only; no method but `shutdown` blocks.

    Transfers. `prepare_load` and `prepare_store` return slots. The manager reuses such a slot only
    after `complete_load` or `complete_store` with the same request and key, or, after a reset, when
    its quarantine has ended (`reset_cache`). A completion may name its keys in any order. A
    completion that matches no open transfer changes nothing: one that comes twice, names the wrong
    request, or belongs to a transfer from before a reset.

    A caller's mistake does not raise, except in strict mode (`kvtier.misuse`): it is counted and
    logged, and the method returns the safe answer (a miss, no store).
    """

    media: Sequence[Medium | None] = (None,)
    """The medium of each place that events name; None: not known. Empty if there are no events."""

    @abstractmethod
    def lookup(self, key: OffloadKey, req_context: ReqContext) -> LookupResult:
        """Return whether one block can be loaded. Called in every step while its request waits."""

    def lookup_prefix(self, keys: Iterable[OffloadKey], req_context: ReqContext) -> PrefixLookup:
        """Return how many leading keys hit, and whether that is final.

        The scan ends at the first MISS. A RETRY ends the count of hits, but not the scan, so that
        tiers also start to look for the keys after it.
        """
        num_hits = 0
        counting = True
        is_final = True
        for key in keys:
            result = self.lookup(key, req_context)
            if result is LookupResult.MISS:
                break
            if result is LookupResult.RETRY:
                counting = is_final = False
            else:
                num_hits += counting
                is_final = is_final and result is LookupResult.HIT
        return PrefixLookup(num_hits, is_final)

    @abstractmethod
    def prepare_load(self, keys: Collection[OffloadKey], req_context: ReqContext) -> LoadStoreSpec:
        """Pin the blocks and return where they are, in the order of `keys`.

        The engine calls it only for keys that were a HIT in the same step.
        """

    def complete_load(self, keys: Collection[OffloadKey], req_context: ReqContext) -> None:
        """Unpin the blocks: the worker has read them, or the load has failed."""
        return

    @abstractmethod
    def prepare_store(
        self, keys: Collection[OffloadKey], req_context: ReqContext
    ) -> PrepareStoreOutput | None:
        """Reserve room for the blocks of `keys`, which are in prompt order.

        Leaves out keys that are stored already or not worth storing, and evicts no key of this
        call. Returns None if nothing can be stored now; the engine then offers the keys again.
        """

    def complete_store(
        self, keys: Collection[OffloadKey], req_context: ReqContext, success: bool = True
    ) -> None:
        """Make the blocks readable, now that they are written; if not `success`, drop them."""
        return

    def touch(self, keys: Collection[OffloadKey], req_context: ReqContext) -> None:
        """Count a use of these blocks, loaded or computed. `keys` are in prompt order."""
        return

    @abstractmethod
    def on_new_request(self, req_context: ReqContext) -> RequestOffloadingContext:
        """Begin a request. Called once, before any other call for it."""

    def on_request_finished(self, req_context: ReqContext) -> None:
        """End a request: no `prepare_*` follows for it. Completions may still follow."""
        return

    def on_schedule_end(self, context: ScheduleEndContext) -> None:
        """End a scheduling step. Called once per step."""
        return

    def on_request_queued(
        self,
        req_context: ReqContext,
        find_blocks: Callable[[], Sequence[OffloadKey]],
        *,
        priority: int = 0,
    ) -> None:
        """A request waits in the engine's queue. Its blocks may be brought up before the engine
        looks them up.

        Called after `on_new_request`, if at all. `find_blocks`: returns the blocks that the request
        will look up, from the first one that the device does not have. The manager may call it
        until the engine looks up the request, starts it or ends it, at the end of any step.
        `priority`: requests with a lower number start earlier.
        """
        return

    def note_start(
        self,
        req_context: ReqContext,
        num_prompt_tokens: int,
        num_device_tokens: int,
        num_loaded_tokens: int,
    ) -> None:
        """Record where the tokens of a prompt come from: the device's own cache, a load; the rest
        is computed.

        Called at most once, when the engine starts a request; if the request loads, right after its
        `prepare_load`. Managers count it in their metrics, and `kvtier explain` shows it.
        """
        return

    def note_failed_load(self, req_context: ReqContext) -> None:
        """Record that a load of a request has failed, so that it computes at least a part of what
        it would have loaded."""
        return

    def note_prompt(
        self,
        keys: Sequence[OffloadKey],
        req_context: ReqContext,
        num_prompt_tokens: int,
        num_output_tokens: int = 0,
    ) -> None:
        """Record which blocks a request had: those of one KV-cache group that needs all earlier
        tokens, from the first block on, whether they were on the device, loaded or computed.

        Called once, before `on_request_finished`, for a request that has run. Managers use it to
        estimate what more memory would bring.
        """
        return

    def note_first_token(
        self, req_context: ReqContext, num_prompt_tokens: int, seconds: float
    ) -> None:
        """Record that a request has produced its first token, `seconds` after it arrived. Managers
        show it in their metrics."""
        return

    def note_ignored_hints(self, num_hints: int) -> None:
        """Record that requests had this many hints that could not be read."""
        return

    def serves(self, req_id: str) -> tuple[bool, bool]:
        """Whether a new request may load, and whether it may store. The engine asks when the
        request arrives. An operator may exclude requests while the engine runs."""
        return True, True

    def note_prefill(self, num_tokens: int, mean_position: float, seconds: float) -> None:
        """Record that one engine step computed `num_tokens` prompt tokens in `seconds`.

        `mean_position`: the mean position of these tokens in their prompts. A token's position is
        the number of tokens before it, computed or cached. An engine that measures its steps calls
        `note_prefill` after each step, except after steps that mostly decode; a call takes about a
        microsecond. Managers use the measurements to decide whether to load a prefix or to let the
        engine compute it.
        """
        return

    def has_pending_work(self) -> bool:
        """True while the engine must keep stepping, even without requests.

        True while a request waits for something that can still arrive. For work that no request
        waits for, such as stores to tiers, it is True only for a bounded time after the engine last
        brought work (a request came or ended, or a store completed), so that an engine can pause,
        sleep and shut down. Transfers then continue without steps; the next call of any method
        collects their results.
        """
        return False

    def take_events(self) -> Iterable[OffloadingEvent]:
        """Return the events since the last call, in the order in which they happened."""
        return ()

    def reset_cache(self) -> None:
        """Make everything that was computed before this call unreachable. Never waits.

        Slots that a transfer may still be using are quarantined. The quarantine ends when a
        transfer that was prepared after the reset has completed. So, before the engine starts such
        a transfer, it must wait for all transfers that were prepared before the reset; it must not
        report the completion of these earlier transfers. Requests that are running now store
        nothing until they are preempted (`on_schedule_end`), because their blocks on the device
        were computed before the reset.
        """
        return

    def get_stats(self) -> OffloadingStats | None:
        """Return the metrics since the last call; None if this manager has none."""
        return None

    def shutdown(self) -> None:
        """Release everything. No call follows."""
        return


# ---------------------------------------------------------------------------------------------
# The worker
# ---------------------------------------------------------------------------------------------


@dataclass(slots=True)
class CanonicalKVCacheTensor:
    """One device cache seen as (num_blocks, page bytes)."""

    tensor: Any
    """A numpy or torch byte array of shape (num_blocks, page_size_bytes or more)."""
    page_size_bytes: int
    """Bytes of one block, padding included."""


@dataclass(slots=True)
class CanonicalKVCacheRef:
    """The part of a canonical tensor that one layer (or several that share it) uses."""

    tensor_idx: int
    page_size_bytes: int
    """Bytes of one block that carry data; the rest of the tensor's page is padding."""


@dataclass(slots=True)
class CanonicalKVCaches:
    """All device caches of one worker, and the parts of them that each KV-cache group uses."""

    tensors: list[CanonicalKVCacheTensor]
    group_data_refs: list[list[CanonicalKVCacheRef]]


class OffloadingWorker(ABC):
    """Copies blocks between the device and one offloading medium. Worker process, main thread.

    `get_finished` reports every accepted job exactly once, even if it failed.
    """

    @abstractmethod
    def submit_store(
        self, job_id: int, src_spec: GPULoadStoreSpec, dst_spec: LoadStoreSpec
    ) -> bool:
        """Start copying blocks from the device. False: refused, and not reported later."""

    @abstractmethod
    def submit_load(self, job_id: int, src_spec: LoadStoreSpec, dst_spec: GPULoadStoreSpec) -> bool:
        """Start copying blocks to the device. False: refused, and not reported later."""

    @abstractmethod
    def get_finished(self) -> list[TransferResult]:
        """Return the jobs that ended since the last call. Does not wait."""

    @abstractmethod
    def wait(self, job_ids: Collection[int]) -> None:
        """Return when these jobs have ended. Jobs already reported, or unknown, count as ended."""

    def shutdown(self) -> None:
        """End all jobs and release everything."""
        return


# ---------------------------------------------------------------------------------------------
# The spec
# ---------------------------------------------------------------------------------------------


class OffloadingSpec(ABC):
    """Builds the two halves of an offloading backend from one configuration.

    The same class is instantiated on the scheduler side, where `get_manager` is called, and in
    every worker process, where `get_worker` is called.
    """

    engine: Any = None
    """The engine's own configuration object, such as vLLM's `VllmConfig` with KVTierConnector. Set
    on the scheduler's side only, by engines that provide it; otherwise None. Not part of `config`
    or of its fingerprint. A tier that reads it works in that engine only."""

    describer: BlockDescriber | None = None
    """Set by the connector, on the scheduler's side only, before the first request, if events
    describe blocks. Tiers that outlive the process keep its descriptions with their blocks."""

    def __init__(self, config: OffloadingConfig) -> None:
        self.config = config

    def __getstate__(self) -> dict[str, Any]:
        # A pickled spec must not carry to a worker what belongs to the scheduler's side.
        ours = ("engine", "describer")
        return {name: value for name, value in vars(self).items() if name not in ours}

    @classmethod
    def build_metric_definitions(
        cls, extra_config: Mapping[str, Any]
    ) -> dict[str, MetricDefinition]:
        """Return every metric that `get_stats` of the manager may report."""
        return {}

    @abstractmethod
    def get_manager(self) -> OffloadingManager:
        """Return the scheduler-side half; the same object at every call."""

    @abstractmethod
    def get_worker(self, kv_caches: CanonicalKVCaches) -> OffloadingWorker:
        """Return the worker-side half for this rank's caches; the same object at every call."""
