"""The recommended door: vLLM's own offloading connector, with what a spec alone cannot do.

    --kv-transfer-config '{"kv_connector": "KVTierConnector", "kv_role": "kv_both",
      "kv_connector_module_path": "kvtier.integrations.vllm",
      "kv_connector_extra_config": {"cpu_bytes_to_use": "8GiB"}}'

All scheduling of transfers is vLLM's. This class tells kvtier what vLLM keeps from a spec, and
tells vLLM of loads that failed.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from kvtier.config import ConfigError, OffloadingOptions, OffloadingParallelConfig, Problem
from kvtier.integrations.vllm import differences, vllm_api
from kvtier.integrations.vllm.facts import (
    EngineFacts,
    engine_facts,
    is_full_attention,
    told,
    with_spec,
)
from kvtier.integrations.vllm.logs import log_why_it_cannot_start, speak_through_vllm
from kvtier.integrations.vllm.manager import ManagerAdapter
from kvtier.integrations.vllm.model_kinds import require_proven, specs_in, unproven_kinds
from kvtier.integrations.vllm.prefill_clock import PrefillClock
from kvtier.integrations.vllm.prefix_lookups import announce_prefix_lookups
from kvtier.integrations.vllm.server_watch import ServerWatch
from kvtier.integrations.vllm.spec import KVTierOffloadingSpec
from kvtier.integrations.vllm.worker import WorkerAdapter
from kvtier.tiering.disk.manager import DiskSecondaryTierManager
from kvtier.tiering.disk.options import DiskOptions
from kvtier.tiering.disk.refusal import SlabRefused
from kvtier.tiering.disk.slab import refuse_orphans
from kvtier.tiering.factory import SecondaryTierFactory, TierStartError

__all__ = ["KVTierConnector"]

_OLD_RELEASE = (
    "this release of vLLM has no word for a failed load of a model that has several KV-cache "
    "groups, or one that is not full attention. "
    "Use vLLM 0.32 or later, which computes such blocks"
)


_ORPHANS_PATIENCE_S = 5.0
"""For an engine that is ending because its server was killed."""


class KVTierConnector(vllm_api.OffloadingConnector):
    """vLLM makes one in every worker, and then one on the scheduler side."""

    def __init__(
        self,
        vllm_config: vllm_api.VllmConfig,
        role: vllm_api.KVConnectorRole,
        kv_cache_config: vllm_api.KVCacheConfig,
    ) -> None:
        speak_through_vllm()
        with log_why_it_cannot_start():
            self._tells_by_block = _can_be_computed_from_any_block(kv_cache_config)
            is_scheduler = role == vllm_api.KVConnectorRole.SCHEDULER
            facts = (
                engine_facts(vllm_config, kv_cache_config)
                if is_scheduler
                else EngineFacts(
                    may_sleep=getattr(vllm_config.model_config, "enable_sleep_mode", True),
                    cannot_tell=None
                    if self._tells_by_block or differences.REPORTS_FAILED_REQUESTS
                    else _OLD_RELEASE,
                )
            )
            changed = told(vllm_config, facts)
            _require_kvtiers_spec(changed)
            require_proven(
                unproven_kinds(vllm_config, specs_in(kv_cache_config)),
                vllm_config.kv_transfer_config.kv_connector_extra_config,
                warn=is_scheduler,
            )
            super().__init__(changed, role, kv_cache_config)
        if is_scheduler:
            # vLLM reads it after this, and would otherwise end a request whose load has failed.
            vllm_config.kv_transfer_config.kv_load_failure_policy = "recompute"
            self._loading: dict[str, frozenset[int]] = {}
            """Device blocks that are being filled, by request."""
            self._clock = PrefillClock(self._manager.inner.note_prefill)
            announce_prefix_lookups(self.connector_scheduler, self._manager)
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
        """Called in the process that serves the metrics, when it starts."""
        changed = with_spec(vllm_config)
        metrics = super().build_prom_metrics(
            changed, metric_types, labelnames, per_engine_labelvalues
        )
        # A counter has no series before it is first increased. A rate over a series that begins
        # with its first event misses that event, and nobody can tell "never" from "not exported".
        zeros = vllm_api.OffloadingConnectorStats()
        definitions = KVTierOffloadingSpec.build_metric_definitions(
            changed.kv_transfer_config.kv_connector_extra_config
        )
        for name, definition in definitions.items():
            if isinstance(definition, vllm_api.OffloadingCounterMetadata):
                zeros.increase_counter(name, 0)
        for engine in per_engine_labelvalues:
            metrics.observe(zeros.data, engine)
        return metrics

    @classmethod
    def requires_piecewise_for_cudagraph(cls, extra_config: dict[str, Any]) -> bool:
        # vLLM asks before it loads weights, if it is to use CUDA graphs: what can be refused at
        # once is.
        _refuse_early(extra_config)
        return bool(super().requires_piecewise_for_cudagraph(extra_config))

    @classmethod
    def get_required_kvcache_layout(cls, vllm_config: vllm_api.VllmConfig) -> str | None:
        # The same for those without CUDA graphs, as early as vLLM asks them anything.
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
        watch = getattr(self, "_server_watch", None)  # which a rank does not have
        if watch is not None:
            watch.close()
        super().shutdown()

    def on_new_request(self, request: vllm_api.Request) -> None:
        super().on_new_request(request)
        if "max_load_tokens" not in (request.kv_transfer_params or ()):  # else it ends earlier
            self._manager.expect_prompt(request.request_id, request.num_prompt_tokens)

    def build_connector_meta(
        self, scheduler_output: vllm_api.SchedulerOutput
    ) -> vllm_api.OffloadingConnectorMetadata:
        metadata = super().build_connector_meta(scheduler_output)
        for job in metadata.load_jobs.values():
            self._loading[job.req_id] = frozenset(job.dst_spec.block_ids.tolist())
        self._clock.step_scheduled(scheduler_output)
        return metadata

    def update_connector_output(self, connector_output: vllm_api.KVConnectorOutput) -> None:
        super().update_connector_output(connector_output)
        if self._loading:
            self._end_loads(connector_output)

    def take_events(self) -> Iterable[Any]:
        # The one call that vLLM makes for every step whose output has come back.
        self._clock.step_ended()
        events: Iterable[Any] = super().take_events()
        return events

    def reset_cache(self) -> bool | None:
        # vLLM asserts that a step was taken since the last reset, in which workers were told to
        # wait for what was under way. An idle engine takes none: they are told with the next one.
        scheduler = self.connector_scheduler
        untold = scheduler._current_batch_jobs_to_flush
        scheduler._current_batch_jobs_to_flush = set()
        done: bool | None = super().reset_cache()
        scheduler._current_batch_jobs_to_flush |= untold
        return done

    def _end_loads(self, output: vllm_api.KVConnectorOutput) -> None:
        """Keep those whose load has failed from loading again, and forget what has ended."""
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
        # Before vLLM forgets those that have ended.
        requests: dict[int, str] = dict(self.connector_worker._load_jobs)
        sent, received = super().get_finished(finished_req_ids)
        worker = self.connector_worker.worker
        assert isinstance(worker, WorkerAdapter)
        for lost in worker.take_lost_loads():
            if self._tells_by_block:
                self._failed_blocks |= lost.device_blocks
            else:
                self._failed_requests.add(requests[lost.job_id])
        return sent, received

    def get_transfer_results(self, finished_req_ids: set[str]) -> Any:
        """Asked for instead of `get_finished` by releases that can be told of failed requests.

        Where it cannot begin at the first block that failed, the request computes its whole prompt.
        """
        results = super().get_transfer_results(finished_req_ids)
        results.failed_recving.update(self._failed_requests)
        self._failed_requests.clear()
        return results

    def get_block_ids_with_load_errors(self) -> set[int]:
        """The device blocks whose load has failed: vLLM computes from the first of them on."""
        failed, self._failed_blocks = self._failed_blocks, set()
        return failed


def _can_be_computed_from_any_block(kv_cache_config: vllm_api.KVCacheConfig) -> bool:
    """Whether all blocks before one that is lost are there. Not in front of a window, nor of a
    state; and with several groups the number of a block does not say whose it is."""
    groups = kv_cache_config.kv_cache_groups
    return len(groups) == 1 and is_full_attention(groups[0].kv_cache_spec)


def _refuse_early(extra_config: dict[str, Any]) -> None:
    """Raise `ConfigError` for a typo, and `TierStartError` for a slab that an engine without a
    server holds. Called before the engine is made, in any of its processes, maybe several times."""
    with log_why_it_cannot_start():
        options = OffloadingOptions.from_extra_config(extra_config)
        for planned in SecondaryTierFactory.plan_secondary_tiers(options.secondary_tiers):
            if not issubclass(planned.tier_cls, DiskSecondaryTierManager):
                continue
            try:
                # Replicas have other files; theirs are looked at when they start.
                path = DiskOptions.parse(planned.keys, OffloadingParallelConfig()).path
                refuse_orphans(path, _ORPHANS_PATIENCE_S)
            except ConfigError:
                continue  # which the tier says better
            except SlabRefused as refused:
                raise TierStartError(f"{planned.config.at}: {refused}") from None


def _require_kvtiers_spec(vllm_config: vllm_api.VllmConfig) -> None:
    """Raise `ConfigError` if the user has named a spec that is not kvtier's, nor made from it."""
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
