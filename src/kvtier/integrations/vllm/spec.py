"""The class that vLLM loads by name: it makes a kvtier spec, a manager and the workers."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import ExitStack
from typing import Any

from kvtier.base import MetricDefinition, OffloadingWorker
from kvtier.config import ConfigError, OffloadingConfig, Problem, read_secondary_tiers
from kvtier.cpu.notice_board import NoticeBoard
from kvtier.cpu.region_file import RegionFile, RegionShape
from kvtier.cpu.spec import CPUOffloadingSpec
from kvtier.hints import HintReader
from kvtier.integrations.vllm import vllm_api
from kvtier.integrations.vllm.config import config_from_vllm, facts_in
from kvtier.integrations.vllm.identity import lasting_tiers, log_hash_root, random_root_error
from kvtier.integrations.vllm.logs import (
    log_banner,
    log_through_vllm,
    log_why_it_cannot_start,
)
from kvtier.integrations.vllm.manager import ManagerAdapter
from kvtier.integrations.vllm.metrics import DEFINITIONS, VllmMetrics, metric_to_vllm
from kvtier.integrations.vllm.model_kinds import layer_specs, require_proven, unproven_kinds
from kvtier.integrations.vllm.worker import WorkerAdapter, kv_caches_from_vllm
from kvtier.tiering.metrics import tier_label
from kvtier.tiering.spec import TieringOffloadingSpec

_PLAIN_CONNECTOR = (
    "vLLM's own OffloadingConnector cannot report a failed load. Use KVTierConnector, which lets "
    "vLLM compute such blocks"
)


def kvtier_spec_cls(extra_config: Mapping[str, Any]) -> type[CPUOffloadingSpec]:
    """The class of kvtier's spec for the user's keys. In other engines, the user can choose it with
    the key `spec_name`. In vLLM, that key names the class that vLLM loads."""
    return TieringOffloadingSpec if extra_config.get("secondary_tiers") else CPUOffloadingSpec


def metric_definitions(extra_config: Mapping[str, Any]) -> dict[str, MetricDefinition]:
    """All metrics of kvtier and of the plug-in, for the keys that vLLM passes to the connector."""
    _, users_keys = facts_in(extra_config)
    return kvtier_spec_cls(users_keys).build_metric_definitions(users_keys) | DEFINITIONS


def vllm_metrics(extra_config: Mapping[str, Any]) -> VllmMetrics:
    """vLLM's own metrics, for the keys that vLLM passes to the connector."""
    _, users_keys = facts_in(extra_config)
    tiers = read_secondary_tiers(users_keys)
    return VllmMetrics(users_keys, [tier_label(tier.position, tier.type) for tier in tiers])


class KVTierOffloadingSpec(vllm_api.OffloadingSpec):
    """kvtier's host memory and the tiers below it, as a spec of vLLM's.

    vLLM makes one in every worker and calls `get_worker`. Then it makes one on the scheduler side
    and calls `get_manager`. If engine and worker are one process, there are still two.
    """

    @classmethod
    def build_metric_definitions(
        cls, extra_config: Mapping[str, Any]
    ) -> dict[str, vllm_api.OffloadingMetricMetadata]:
        """All metrics of kvtier. Called by vLLM's exporter of metrics, maybe in a process that has
        no spec."""
        ours = {
            vllm_api.METRIC_PREFIX + name: metric_to_vllm(definition)
            for name, definition in metric_definitions(extra_config).items()
        }
        return ours | vllm_metrics(extra_config).definitions

    def __init__(self, config: vllm_api.OffloadingConfig) -> None:
        super().__init__(config)
        log_through_vllm()
        vllm_api.warn_if_untested()
        self._facts, users_keys = facts_in(config.extra_config)
        with log_why_it_cannot_start():
            self.kvtier_config = config_from_vllm(config, users_keys, self._facts)
            self._spec = kvtier_spec_cls(users_keys)(self.kvtier_config)
        self._spec.engine = None if self._facts is None else self._facts.engine
        self._manager: ManagerAdapter | None = None
        self._worker: WorkerAdapter | None = None

    def get_manager(self) -> ManagerAdapter:
        """The manager, with all tiers started. vLLM calls this after `get_worker` on all ranks.

        Raises `ConfigError` and leaves nothing behind if kvtier's own spec refuses the
        configuration, if a rank does not share this process's memory, or if a tier outlives the
        process but the block hashes are random, so that no other process would find its blocks.
        """
        if self._manager is None:
            with log_why_it_cannot_start():
                self._manager = self._start()
        return self._manager

    def get_worker(self, kv_caches: vllm_api.CanonicalKVCaches) -> WorkerAdapter:
        if self._worker is None:
            with log_why_it_cannot_start():
                self._require_proven_model()
                worker = self._spec.get_worker(kv_caches_from_vllm(kv_caches))
            self._worker = WorkerAdapter(
                worker,
                worker.board,
                self.kvtier_config.parallel.rank,
                fatal_because=self._fatal_because,
                flush=self._flush_of(worker),
            )
        return self._worker

    @property
    def _fatal_because(self) -> str | None:
        """Why a load that fails after all retries stops the engine. None: it does not, because vLLM
        computes the blocks."""
        return _PLAIN_CONNECTOR if self._facts is None else self._facts.fatal_because

    def _require_proven_model(self) -> None:
        """Refuse unproven kinds of models (`model_kinds`) if the connector is vLLM's own.
        `KVTierConnector` refuses them earlier.

        Called only in a worker: on the scheduler side, vLLM does not describe the model to a spec.
        """
        vllm_config = vllm_api.get_current_vllm_config_or_none()
        if self._facts is None and vllm_config is not None:
            require_proven(
                unproven_kinds(vllm_config, layer_specs(vllm_config)),
                self.kvtier_config.extra_config,
                warn=self.kvtier_config.parallel.rank == 0,
            )

    def _flush_of(self, worker: OffloadingWorker) -> Callable[[], None] | None:
        """A function that returns when all submitted jobs are on the device's streams. None if the
        engine never sleeps, or if the worker has no such function."""
        facts = self._facts
        may_sleep = vllm_api.may_sleep() if facts is None else facts.may_sleep
        return getattr(worker, "flush", None) if may_sleep else None

    @property
    def _has_random_hashes(self) -> bool:
        """True if it is known, before vLLM has made the root of the block hashes, that no other
        process will compute the same hashes. The first hash of each prompt depends on the root."""
        facts = self._facts
        return vllm_api.draws_hash_root(None) if facts is None else facts.has_random_hashes

    def _start(self) -> ManagerAdapter:
        config = self.kvtier_config
        tiers = lasting_tiers(config.options.secondary_tiers)
        shape = RegionShape(config.num_blocks, config.row_bytes, config.cpu_page_size)
        with ExitStack() as at_the_end:
            file = RegionFile.join("/dev/shm", config.engine_id, shape)
            if file is None:
                raise _missing(config, range(config.parallel.world_size))
            at_the_end.callback(file.leave)
            # The name is not needed any more: if a rank has not joined yet, the engine does not
            # start. Once the name is removed, the memory is freed when the last process that uses
            # it ends, even by `kill -9`.
            at_the_end.callback(file.remove_name)
            if tiers and self._has_random_hashes:
                raise random_root_error(tiers, vllm_api.default_hash_seed())
            with ExitStack() as undo_board:
                board = NoticeBoard(file.map_board(), shape)
                undo_board.callback(board.close)
                if missing := board.missing_ranks(config.parallel.world_size):
                    raise _missing(config, missing)
                hints = HintReader(config.options)  # first: it may refuse the configuration
                manager = self._spec.get_manager()
                undo_board.pop_all()
        log_banner(config, manager, None if self._facts is None else self._facts.longest_prompt)
        return ManagerAdapter(
            manager,
            board,
            self._spec.build_metric_definitions(config.extra_config) | DEFINITIONS,
            config.row_bytes,
            hints,
            spec=self._spec,
            vllm_metrics=vllm_metrics(config.extra_config),
            has_groups=len(config.groups) > 1,
            check_hashes=(lambda: _check_hash_root(tiers)) if tiers else None,
        )


def _check_hash_root(tiers: Sequence[str]) -> bool:
    """Log the root of the block hashes, or raise `ConfigError` if it is random. Returns False if
    vLLM has not made the root yet: vLLM makes the manager first, then the root."""
    root = vllm_api.hash_root()
    if root is None:
        return False
    log_hash_root(root, tiers)
    return True


def _missing(config: OffloadingConfig, ranks: Iterable[int]) -> ConfigError:
    return ConfigError(
        Problem(
            "parallel.world_size",
            f"{config.parallel.world_size}, of which ranks {', '.join(map(str, ranks))} do not "
            "share the memory of the scheduler's host (/dev/shm)",
            "ranks that are all on the host of the scheduler, and in its container",
            "Run each engine on one host (data-parallel replicas may be on several); containers of "
            "one engine must share /dev/shm, as with --ipc=host",
        )
    )
