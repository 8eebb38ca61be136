"""The recommended way to plug in: vLLM's own offloading connector, extended.

    --kv-transfer-config '{"kv_connector": "KVTierConnector", "kv_role": "kv_both",
      "kv_connector_module_path": "kvtier.integrations.vllm",
      "kv_connector_extra_config": {"cpu_bytes_to_use": "8GiB"}}'

vLLM's connector schedules all transfers: it matches prefixes, chooses the blocks to store, and
keeps device blocks from being reused while they are copied. `KVTierConnector` only adds to it. It
passes on to kvtier what vLLM does not tell a spec, checks the configuration before the engine
starts, measures how fast the engine computes prompts, reports failed loads to vLLM, and ends the
engine if its server was killed.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from math import inf
from typing import Any

from kvtier.base import MetricKind, OffloadKey
from kvtier.config import ConfigError, OffloadingOptions, Problem
from kvtier.connector.common import MIN_PREFILL_TOKENS, ComputedTokens, Prefill, prefill_in
from kvtier.integrations.vllm import vllm_api
from kvtier.integrations.vllm.config import EngineFacts, engine_facts, with_facts, with_spec
from kvtier.integrations.vllm.events import ConnectorEvents
from kvtier.integrations.vllm.first_tokens import FirstTokens
from kvtier.integrations.vllm.logs import log_why_it_cannot_start
from kvtier.integrations.vllm.manager import ManagerAdapter
from kvtier.integrations.vllm.manager_state import announce_prefix_lookups
from kvtier.integrations.vllm.model_kinds import (
    can_compute_from_any_block,
    require_proven,
    specs_in,
    unproven_kinds,
)
from kvtier.integrations.vllm.server_watch import ServerWatch
from kvtier.integrations.vllm.spec import KVTierOffloadingSpec, metric_definitions, vllm_metrics
from kvtier.integrations.vllm.worker import WorkerAdapter
from kvtier.tiering.disk.options import DiskOptions
from kvtier.tiering.disk.ownership import SlabRefused, refuse_orphans
from kvtier.tiering.factory import SecondaryTierFactory, TierStartError

__all__ = ["KVTierConnector", "PrefillClock"]

_OLD_RELEASE = (
    "this release of vLLM does not accept the report of a failed load if the model has several "
    "KV-cache groups, or one that is not full attention. "
    "Use vLLM 0.32 or later, which computes such blocks"
)

_ORPHANS_PATIENCE_S = 5.0
"""Seconds to wait until an earlier engine ends, if its server was killed."""


class KVTierConnector(vllm_api.OffloadingConnector):
    """vLLM's offloading connector with kvtier below it. vLLM makes one in every worker, and then
    one on the scheduler side."""

    def __init__(
        self,
        vllm_config: vllm_api.VllmConfig,
        role: vllm_api.KVConnectorRole,
        kv_cache_config: vllm_api.KVCacheConfig,
    ) -> None:
        with log_why_it_cannot_start():
            self._reports_by_block = can_compute_from_any_block(kv_cache_config)
            is_scheduler = role == vllm_api.KVConnectorRole.SCHEDULER
            facts = (
                engine_facts(vllm_config, kv_cache_config)
                if is_scheduler
                else EngineFacts(
                    may_sleep=getattr(vllm_config.model_config, "enable_sleep_mode", True),
                    fatal_because=None
                    if self._reports_by_block or vllm_api.REPORTS_FAILED_REQUESTS
                    else _OLD_RELEASE,
                )
            )
            changed = with_facts(vllm_config, facts)
            _require_kvtiers_spec(changed)
            require_proven(
                unproven_kinds(vllm_config, specs_in(kv_cache_config)),
                vllm_config.kv_transfer_config.kv_connector_extra_config,
                warn=is_scheduler,
            )
            super().__init__(changed, role, kv_cache_config)
        if is_scheduler:
            # vLLM reads this setting later. Its default ends a request whose load has failed.
            vllm_config.kv_transfer_config.kv_load_failure_policy = "recompute"
            self._loading: dict[str, frozenset[int]] = {}
            """Device blocks that loads are filling, by request."""
            self._clock = PrefillClock(self._manager.inner.note_prefill)
            self._first_tokens = FirstTokens(self._manager.note_first_token)
            self._queue: _Queue | None = None
            self._has_priorities = vllm_config.scheduler_config.policy == "priority"
            announce_prefix_lookups(self.connector_scheduler, self._manager)
            spec = self._manager.spec
            assert spec is not None
            self._events = ConnectorEvents(self.connector_scheduler, self._manager, spec)
            self._server_watch = ServerWatch.of_this_engine(vllm_config)
        else:
            self._failed_blocks: set[int] = set()
            self._failed_requests: set[str] = set()

    @classmethod
    def build_prom_metrics(
        cls,
        vllm_config: vllm_api.VllmConfig,
        metric_types: Any,
        labelnames: Any,
        per_engine_labelvalues: dict[int, Any],
    ) -> Any:
        """vLLM's exporter of metrics. Called when the process that serves them starts."""
        changed = with_spec(vllm_config)
        metrics = super().build_prom_metrics(
            changed, metric_types, labelnames, per_engine_labelvalues
        )
        # Export every counter as 0. Otherwise it has no series before it is first increased: then a
        # rate misses the first increase, and a counter that is 0 looks like one that is missing.
        zeros = vllm_api.OffloadingConnectorStats()
        definitions = metric_definitions(changed.kv_transfer_config.kv_connector_extra_config)
        for name, definition in definitions.items():
            if definition.kind is MetricKind.COUNTER:
                for labels in definition.series(name).values():
                    zeros.increase_counter(vllm_api.METRIC_PREFIX + name, 0, labels)
        # vLLM fills its older names for transfers only if the spec is its own.
        if hasattr(metrics, "_observe_deprecated_metrics"):
            metrics._observe_deprecated_metrics = True
        theirs = vllm_metrics(changed.kv_transfer_config.kv_connector_extra_config).zeros()
        for engine in per_engine_labelvalues:
            metrics.observe(zeros.data, engine)
            metrics.observe(theirs.data, engine)
        return metrics

    @classmethod
    def requires_piecewise_for_cudagraph(cls, extra_config: dict[str, Any]) -> bool:
        # With CUDA graphs, vLLM calls this before it loads weights: the earliest time to refuse.
        _refuse_early(extra_config)
        return bool(super().requires_piecewise_for_cudagraph(extra_config))

    @classmethod
    def get_required_kvcache_layout(cls, vllm_config: vllm_api.VllmConfig) -> str | None:
        # Without CUDA graphs, this is the first method that vLLM calls.
        _refuse_early(vllm_config.kv_transfer_config.kv_connector_extra_config)
        layout: str | None = super().get_required_kvcache_layout(vllm_config)
        return layout

    # --- scheduler side -----------------------------------------------------------------------

    @property
    def _manager(self) -> ManagerAdapter:
        manager = self.connector_scheduler.manager
        assert isinstance(manager, ManagerAdapter)
        return manager

    def shutdown(self) -> None:
        watch = getattr(self, "_server_watch", None)  # only on the scheduler side
        if watch is not None:
            watch.close()
        super().shutdown()

    def bind_gpu_block_pool(self, gpu_block_pool: Any) -> None:
        # vLLM calls this once, at the end of the start. For other kinds of caches, the blocks that
        # a request will look up are known only when vLLM looks them up.
        super().bind_gpu_block_pool(gpu_block_pool)
        if self._reports_by_block:
            self._queue = _Queue(self.connector_scheduler, gpu_block_pool)

    def on_new_request(self, request: vllm_api.Request) -> None:
        self._manager.expect_salt(request.request_id, request.cache_salt)
        super().on_new_request(request)
        self._first_tokens.expect(request.request_id, request.num_prompt_tokens)
        # Not with `max_load_tokens`: it may limit the load to a part of the prompt.
        if "max_load_tokens" in (request.kv_transfer_params or ()):
            return
        self._manager.expect_prompt(request.request_id, request.num_prompt_tokens)
        if self._queue is not None and not request.skip_reading_prefix_cache:
            find_blocks = partial(self._queue.blocks_to_load, request)
            priority = request.priority if self._has_priorities else 0
            self._manager.on_request_queued(request.request_id, find_blocks, priority)

    def get_num_new_matched_tokens(
        self, request: vllm_api.Request, num_computed_tokens: int
    ) -> tuple[int | None, bool]:
        self._events.describe((request.request_id,))
        self._manager.note_match(request.request_id, num_computed_tokens)
        matched: tuple[int | None, bool] = super().get_num_new_matched_tokens(
            request, num_computed_tokens
        )
        return matched

    def update_state_after_alloc(
        self, request: vllm_api.Request, blocks: Any, num_external_tokens: int
    ) -> None:
        super().update_state_after_alloc(request, blocks, num_external_tokens)
        self._manager.note_start(request.request_id, request.num_prompt_tokens, num_external_tokens)

    def build_connector_meta(
        self, scheduler_output: vllm_api.SchedulerOutput
    ) -> vllm_api.OffloadingConnectorMetadata:
        # vLLM does not look up requests that must not read the cache.
        self._events.describe(
            scheduler_output.num_scheduled_tokens
            if self._events.stores_output
            else (new.req_id for new in scheduler_output.scheduled_new_reqs)
        )
        metadata = super().build_connector_meta(scheduler_output)
        for job in metadata.load_jobs.values():
            self._loading[job.req_id] = frozenset(job.dst_spec.block_ids.tolist())
        self._clock.step_scheduled(scheduler_output)
        self._first_tokens.step_scheduled(scheduler_output)
        return metadata

    def update_connector_output(self, connector_output: vllm_api.KVConnectorOutput) -> None:
        super().update_connector_output(connector_output)
        if self._loading:
            self._end_loads(connector_output)

    def take_events(self) -> Iterable[Any]:
        # vLLM calls this exactly once for every step whose output has come back.
        self._clock.step_ended()
        self._first_tokens.step_ended()
        return self._events.take()

    def reset_cache(self) -> bool | None:
        # After a reset, the next step tells the workers to wait for the jobs that were under way.
        # vLLM asserts that no second reset comes before that step, but an idle engine takes no
        # steps. So set the jobs aside during the call; they still go to the workers.
        scheduler = self.connector_scheduler
        unsent = scheduler._current_batch_jobs_to_flush
        scheduler._current_batch_jobs_to_flush = set()
        done: bool | None = super().reset_cache()
        scheduler._current_batch_jobs_to_flush |= unsent
        return done

    def request_finished(self, request: vllm_api.Request, block_ids: list[int]) -> Any:
        result = super().request_finished(request, block_ids)
        self._note_prompt(request)
        return result

    def request_finished_all_groups(
        self, request: vllm_api.Request, block_ids: tuple[list[int], ...]
    ) -> Any:
        result = super().request_finished_all_groups(request, block_ids)
        self._note_prompt(request)
        return result

    def _note_prompt(self, request: vllm_api.Request) -> None:
        """Report the blocks of a request that has ended, if it has run. vLLM itself reports the end
        to the manager in the next step."""
        self._first_tokens.forget(request.request_id)
        if self._events.stores_output:
            self._events.describe((request.request_id,))
        status = self.connector_scheduler._req_status.get(request.request_id)
        if status is not None and request.num_computed_tokens:
            configs = self.connector_scheduler.config.kv_group_configs
            places = (n for n, group in enumerate(configs) if not vllm_api.has_window(group))
            place = next(places, 0)
            keys = status.group_states[place].offload_keys
            self._manager.note_prompt(
                request.request_id, keys, request.num_prompt_tokens, request.num_tokens
            )

    def _end_loads(self, output: vllm_api.KVConnectorOutput) -> None:
        """Let a request whose load has failed load nothing more. Forget the loads that have
        ended."""
        invalid = output.invalid_block_ids
        failed = set(getattr(output, "failed_recving", None) or ())
        if invalid:
            failed |= {
                req_id for req_id, blocks in self._loading.items() if not blocks.isdisjoint(invalid)
            }
        for req_id in failed:
            self._manager.give_up_loading(req_id)
        for req_id in output.finished_recving or ():
            self._loading.pop(req_id, None)

    # --- worker side --------------------------------------------------------------------------

    def get_finished(self, finished_req_ids: set[str]) -> tuple[set[str], set[str]]:
        # Copy vLLM's table of loads, because the next line removes the loads that have ended.
        requests: dict[int, str] = dict(self.connector_worker._load_jobs)
        sent, received = super().get_finished(finished_req_ids)
        worker = self.connector_worker.worker
        assert isinstance(worker, WorkerAdapter)
        for lost in worker.take_lost_loads():
            if self._reports_by_block:
                self._failed_blocks |= lost.device_blocks
            else:
                self._failed_requests.add(requests[lost.job_id])
        return sent, received

    def get_transfer_results(self, finished_req_ids: set[str]) -> Any:
        """Report the requests whose load has failed. They compute their whole prompt, because they
        cannot continue at the first failed block.

        Releases of vLLM that accept such reports call this method instead of `get_finished`. The
        base class's method calls `get_finished`.
        """
        results = super().get_transfer_results(finished_req_ids)
        results.failed_recving.update(self._failed_requests)
        self._failed_requests.clear()
        return results

    def get_block_ids_with_load_errors(self) -> set[int]:
        """Device blocks whose load has failed. vLLM computes the prompt from the first of them
        on."""
        failed, self._failed_blocks = self._failed_blocks, set()
        return failed


# --- requests in vLLM's queue --------------------------------------------------------------------

_GROUPS = [0]
"""The only KV-cache group."""


class _Queue:
    """Finds the blocks that a request in vLLM's queue will look up. Scheduler thread only.

    Only for models with one KV-cache group, with full attention.
    """

    def __init__(self, scheduler: Any, device_cache: Any) -> None:
        """`scheduler`: the scheduler side of vLLM's connector. `device_cache`: vLLM's table of the
        blocks on the device."""
        self._scheduler = scheduler
        self._device_cache = device_cache

    def blocks_to_load(self, request: vllm_api.Request) -> Sequence[OffloadKey]:
        """The blocks from the first one that the device does not have."""
        status = self._scheduler._req_status.get(request.request_id)
        if status is None:
            return ()
        status.update_offload_keys()
        (group,) = status.group_states
        (config,) = self._scheduler.config.kv_group_configs
        find = self._device_cache.get_cached_block
        num_cached = 0
        for block_hash in request.block_hashes:
            if find(block_hash, _GROUPS) is None:
                break
            num_cached += 1
        if len(request.block_hashes) - num_cached < config.hashes_per_chunk:
            return ()  # vLLM computes less than a chunk
        keys: list[OffloadKey] = group.offload_keys
        return keys[num_cached // config.hashes_per_chunk :]


# --- how fast the engine computes prompts ---------------------------------------------------------

_MAX_STEPS_UNDER_WAY = 256
"""Largest number of steps to remember. Even with pipeline stages, fewer are under way."""
_NEWEST_DECODE = 0.1
"""Weight of the newest step in the moving average of steps that compute no prompt."""


@dataclass(frozen=True, slots=True)
class _Step:
    began: float
    prefill: Prefill | None
    """None if the step computes no prompt, or only a few tokens of one."""


class PrefillClock:
    """Measures how fast the engine computes prompts, for the decision to load or to compute.
    Scheduler thread only.

    vLLM may schedule a step before the output of the previous step comes back. So a step begins
    when it is scheduled or when the previous step ends, whichever is later, and ends when its
    output comes back.

    The output of a step that only decodes comes back late if vLLM's thread is busy launching the
    next one, which computes a prompt. Such a step counts as ended after the usual time.
    """

    def __init__(
        self,
        note_prefill: Callable[[int, float, float], None],
        now: Callable[[], float] = time.perf_counter,
    ) -> None:
        """`note_prefill` gets the number of prompt tokens of a step, their mean position, and the
        duration of the step in seconds."""
        self._note_prefill = note_prefill
        self._now = now
        self._under_way: deque[_Step] = deque(maxlen=_MAX_STEPS_UNDER_WAY)
        self._last_ended = 0.0
        self._decode_s = inf
        """The usual duration of a step that only decodes; infinite until one was measured."""

    def step_scheduled(self, output: vllm_api.SchedulerOutput) -> None:
        """The engine is about to compute this step."""
        counts: dict[str, int] = output.num_scheduled_tokens
        is_prefill = output.total_num_scheduled_tokens - len(counts) >= MIN_PREFILL_TOKENS
        prefill = self._prefill_in(output, counts) if is_prefill else None
        self._under_way.append(_Step(self._now(), prefill))

    def step_ended(self) -> None:
        """The output of the oldest step under way has come back."""
        if not self._under_way:
            return
        step = self._under_way.popleft()
        now = self._now()
        began = max(step.began, self._last_ended)
        self._last_ended = now
        if step.prefill is not None:
            self._note_prefill(step.prefill.num_tokens, step.prefill.mean_position, now - began)
        elif self._under_way and self._under_way[0].prefill is not None:
            self._last_ended = min(now, began + self._decode_s)
        elif self._decode_s < inf:
            self._decode_s += (now - began - self._decode_s) * _NEWEST_DECODE
        else:
            self._decode_s = now - began

    def _prefill_in(
        self, output: vllm_api.SchedulerOutput, counts: dict[str, int]
    ) -> Prefill | None:
        cached = output.scheduled_cached_reqs
        starts = [
            (request.req_id, request.num_computed_tokens) for request in output.scheduled_new_reqs
        ]
        starts += zip(cached.req_ids, cached.num_computed_tokens, strict=True)
        return prefill_in(ComputedTokens(start, counts.get(req_id, 0)) for req_id, start in starts)


# --- checks before the start ----------------------------------------------------------------------


def _refuse_early(extra_config: dict[str, Any]) -> None:
    """Raise `ConfigError` for a wrong key, and `TierStartError` if a slab (the file of a disk tier)
    is held by an engine whose server has ended. vLLM calls this before it makes the engine, in any
    of its processes, maybe more than once. The tiers themselves report wrong values, later."""
    with log_why_it_cannot_start():
        tiers = OffloadingOptions.from_extra_config(extra_config).secondary_tiers
        for planned in SecondaryTierFactory.plan_secondary_tiers(tiers):
            try:
                # Replicas have their own files, which are checked when the replicas start.
                options = planned.parse_options()
                if not isinstance(options, DiskOptions):
                    continue
                options.require_place()
                refuse_orphans(options.path, _ORPHANS_PATIENCE_S)
            except ConfigError:
                continue  # the tier itself reports it better
            except SlabRefused as refused:
                raise TierStartError(f"{planned.config.at}: {refused}") from None


def _require_kvtiers_spec(vllm_config: vllm_api.VllmConfig) -> None:
    """Raise `ConfigError` if the user has named a spec that does not derive from kvtier's."""
    keys = vllm_config.kv_transfer_config.kv_connector_extra_config
    if not issubclass(vllm_api.OffloadingSpecFactory.get_spec_cls(keys), KVTierOffloadingSpec):
        raise ConfigError(
            Problem(
                "spec_name",
                repr(keys["spec_name"]),
                "nothing, with KVTierConnector",
                "Remove spec_name and spec_module_path: KVTierConnector brings its own spec",
            )
        )
