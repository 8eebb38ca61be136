"""The class that vLLM loads by name: it makes a kvtier spec and hands out its two halves."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import ExitStack
from typing import Any

from kvtier.base import OffloadingWorker
from kvtier.config import ConfigError, OffloadingConfig, Problem
from kvtier.cpu.notice_board import NoticeBoard
from kvtier.cpu.region_file import RegionFile, RegionShape
from kvtier.cpu.spec import CPUOffloadingSpec
from kvtier.integrations.vllm import differences, vllm_api
from kvtier.integrations.vllm.block_hashes import lasting_tiers, refuse_random_root, tell_about
from kvtier.integrations.vllm.config import config_from_vllm
from kvtier.integrations.vllm.facts import facts_in
from kvtier.integrations.vllm.logs import (
    log_banner,
    log_why_it_cannot_start,
    speak_through_vllm,
)
from kvtier.integrations.vllm.manager import ManagerAdapter
from kvtier.integrations.vllm.metrics import DEFINITIONS, metric_to_vllm
from kvtier.integrations.vllm.model_kinds import layer_specs, require_proven, unproven_kinds
from kvtier.integrations.vllm.worker import WorkerAdapter, kv_caches_from_vllm
from kvtier.tiering.spec import TieringOffloadingSpec

_PLAIN_DOOR = (
    "vLLM's own OffloadingConnector has no word for a failed load. Use KVTierConnector, which lets "
    "vLLM compute such blocks"
)


def kvtier_spec_cls(extra_config: Mapping[str, Any]) -> type[CPUOffloadingSpec]:
    """What the user's keys ask for. `spec_name`, which says it elsewhere, is vLLM's here."""
    return TieringOffloadingSpec if extra_config.get("secondary_tiers") else CPUOffloadingSpec


class KVTierOffloadingSpec(vllm_api.OffloadingSpec):
    """kvtier's CPU tier inside vLLM, with the tiers below it.

    vLLM makes one in every worker and calls `get_worker`, and then one on the scheduler side and
    calls `get_manager`; where engine and worker are one process, there are still two.
    """

    @classmethod
    def build_metric_definitions(
        cls, extra_config: Mapping[str, Any]
    ) -> dict[str, vllm_api.OffloadingMetricMetadata]:
        """Called by whoever exports vLLM's metrics, maybe without any spec being made."""
        _, users_keys = facts_in(extra_config)
        definitions = kvtier_spec_cls(users_keys).build_metric_definitions(users_keys)
        return {
            vllm_api.METRIC_PREFIX + name: metric_to_vllm(definition)
            for name, definition in (definitions | DEFINITIONS).items()
        }

    def __init__(self, config: vllm_api.OffloadingConfig) -> None:
        super().__init__(config)
        speak_through_vllm()
        vllm_api.warn_if_untested()
        self._facts, users_keys = facts_in(config.extra_config)
        with log_why_it_cannot_start():
            self.kvtier_config = config_from_vllm(config, users_keys, self._facts)
            self._spec = kvtier_spec_cls(users_keys)(self.kvtier_config)
        self._spec.engine = None if self._facts is None else self._facts.engine
        self._manager: ManagerAdapter | None = None
        self._worker: WorkerAdapter | None = None

    def get_manager(self) -> ManagerAdapter:
        """The manager, with all tiers started. The ranks have their workers by now.

        Raises `ConfigError`, and leaves nothing behind, besides for what kvtier's own spec refuses
        also when a rank does not share this process's memory, and when a tier outlives the process
        but no other process will ever find a block in it.
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
                cannot_tell=_PLAIN_DOOR if self._facts is None else self._facts.cannot_tell,
                flush=self._flush_of(worker),
            )
        return self._worker

    def _require_proven_model(self) -> None:
        """Through the plain door; `KVTierConnector` knows before it makes a spec.

        Asked of a rank alone: vLLM tells a spec on the scheduler's side nothing of the model.
        """
        vllm_config = vllm_api.get_current_vllm_config_or_none()
        if self._facts is None and vllm_config is not None:
            require_proven(
                unproven_kinds(vllm_config, layer_specs(vllm_config)),
                self.kvtier_config.extra_config,
                warn=self.kvtier_config.parallel.rank == 0,
            )

    def _flush_of(self, worker: OffloadingWorker) -> Callable[[], None] | None:
        """What makes sure that the device has all jobs, where that matters."""
        facts = self._facts
        may_sleep = vllm_api.may_sleep() if facts is None else facts.may_sleep
        return getattr(worker, "flush", None) if may_sleep else None

    @property
    def _has_random_hashes(self) -> bool:
        """As far as it is known before vLLM has made their root."""
        facts = self._facts
        return differences.draws_hash_root(None) if facts is None else facts.has_random_hashes

    def _start(self) -> ManagerAdapter:
        config = self.kvtier_config
        tiers = lasting_tiers(config.options.secondary_tiers)
        shape = RegionShape(config.num_blocks, config.row_bytes, config.cpu_page_size)
        with ExitStack() as at_the_end:
            file = RegionFile.join("/dev/shm", config.engine_id, shape)
            if file is None:
                raise _missing(config, range(config.parallel.world_size))
            at_the_end.callback(file.leave)
            # Whatever comes of this, and however the ranks end, no memory is left behind: all that
            # will ever join are there, or the engine does not start.
            at_the_end.callback(file.remove_name)
            if tiers and self._has_random_hashes:
                raise refuse_random_root(tiers, differences.default_hash_seed())
            with ExitStack() as undo_board:
                board = NoticeBoard(file.map_board(), shape)
                undo_board.callback(board.close)
                if missing := board.missing_ranks(config.parallel.world_size):
                    raise _missing(config, missing)
                manager = self._spec.get_manager()
                undo_board.pop_all()
        log_banner(config, manager, None if self._facts is None else self._facts.longest_prompt)
        return ManagerAdapter(
            manager,
            board,
            self._spec.build_metric_definitions(config.extra_config) | DEFINITIONS,
            config.row_bytes,
            has_groups=len(config.groups) > 1,
            check_hashes=(lambda: _hashes_told(tiers)) if tiers else None,
        )


def _hashes_told(tiers: Sequence[str]) -> bool:
    """Say which other processes can find what this one stores, or raise; False: not known yet.

    vLLM makes the root of its hashes after the manager.
    """
    root = differences.hash_root()
    if root is None:
        return False
    tell_about(root, tiers)
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
