"""The engines and tiers of the demo.

Each engine serves one prompt at a time, and counts where the blocks of the prompt came from.
"""

from __future__ import annotations

import time
import uuid
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self

from kvtier.base import OffloadingStats
from kvtier.cli.demo.settings import (
    BLOCK_TOKENS,
    NEW_TOKENS,
    WARM_UP_TOKENS,
    Prompt,
    engine_config,
    num_blocks_of,
)
from kvtier.connector.scheduler import OffloadingConnectorScheduler
from kvtier.engine import Engine, ModelConfig, RequestResult, make_connector, offloading_config
from kvtier.engine.cache import array_page_bytes
from kvtier.tiering.base import SecondaryTierManager
from kvtier.tiering.example.manager import ExampleSecondaryTierManager
from kvtier.tiering.health import BreakerState
from kvtier.tiering.manager import TieringOffloadingManager
from kvtier.tiering.metrics import tier_label, tier_series

if TYPE_CHECKING:
    from kvtier.base import OffloadingSpec
    from kvtier.tiering.base import JobResult, TransferJob

__all__ = ["DoomedTier", "OffloadingServer", "RequestStuck", "Served", "Server"]

_PATIENCE_S = 60.0
_PATIENCE_S_PER_TOKEN = 0.05
"""A request is stuck if it takes longer than `_PATIENCE_S` plus this many seconds for each token of
its prompt. Slow machines need far less."""


class RequestStuck(RuntimeError):
    """A request did not end in time, or its blocks did not reach the tiers in time."""


@dataclass(frozen=True, slots=True)
class Served:
    """One answered prompt, and the blocks that were loaded for it."""

    prompt: Prompt
    result: RequestResult
    first_token_s: float
    host_blocks: int = 0
    """Loaded blocks that were in host memory already, so were not promoted from a tier for this
    request."""
    tier_blocks: tuple[int, ...] = ()
    """For each tier, the number of blocks loaded from it."""
    late_loads: tuple[int, ...] = ()
    """For each tier, the number of loads that missed their deadline."""

    @property
    def device_blocks(self) -> int:
        """Blocks found in the device cache, in the group with full attention."""
        return self.result.num_device_tokens // BLOCK_TOKENS


class Server:
    """An engine without offloading. Its answers are the reference."""

    def __init__(
        self, model: ModelConfig, prompts: Sequence[Prompt], check: Callable[[], None]
    ) -> None:
        """`prompts`: the prompts to serve; the device cache has room for all of them together.
        `check` is called before every step, and may raise."""
        self._check = check
        self._engine = self._start(model, prompts)

    def _start(self, model: ModelConfig, prompts: Sequence[Prompt]) -> Engine:
        return Engine(model, engine_config(model, prompts))

    def __enter__(self) -> Self:
        try:
            # The first request takes longer than later ones, so it is not measured.
            self.serve((0,) * WARM_UP_TOKENS)
        except BaseException:
            self._engine.shutdown()
            raise
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._engine.shutdown()

    def serve(self, prompt: Prompt, after_first_step: Callable[[], None] | None = None) -> Served:
        """Serve a prompt to its end. `after_first_step` is called once, after the first step."""
        result = self._ask(prompt, after_first_step)
        assert result.time_to_first_token_s is not None
        return Served(prompt, result, result.time_to_first_token_s)

    def _ask(self, prompt: Prompt, after_first_step: Callable[[], None] | None) -> RequestResult:
        deadline = _deadline(len(prompt))
        request_id = self._engine.add_request(prompt, NEW_TOKENS, keep_logits=True)
        while True:
            self._check()
            finished = self._engine.step()
            if finished:
                return finished[0]
            if after_first_step is not None:
                after_first_step()
                after_first_step = None
            if time.monotonic() > deadline:
                self._engine.abort(request_id)
                raise RequestStuck(f"a prompt of {len(prompt)} tokens was not answered in time")


class OffloadingServer(Server):
    """An engine with offloading to host memory and to tiers below it."""

    def __init__(
        self,
        model: ModelConfig,
        prompts: Sequence[Prompt],
        check: Callable[[], None],
        tiers: Sequence[Mapping[str, Any]],
        *,
        spare_prompts: int = 0,
    ) -> None:
        """`spare_prompts`: number of prompts, each as long as the longest one, for which host
        memory has extra room, because a dead tier never gives back the slots of its jobs."""
        self._tiers = tiers
        self._spare_prompts = spare_prompts
        super().__init__(model, prompts, check)

    def _start(self, model: ModelConfig, prompts: Sequence[Prompt]) -> Engine:
        engine = engine_config(model, prompts)
        sizes = [num_blocks_of(prompt) * len(model.groups) for prompt in prompts]
        # Twice the slots that the prompts need, because stores may pin only a share of all slots.
        num_slots = 2 * sum(sizes) + self._spare_prompts * max(sizes) + WARM_UP_TOKENS
        self.block_bytes = sum(array_page_bytes(model, engine))
        options = {
            "cpu_bytes_to_use": num_slots * self.block_bytes,
            "secondary_tiers": self._tiers,
            # A reset empties host memory and leaves the tiers alone.
            "reset_scope": "primary",
            # Turn the guard off: on a busy machine, it might measure that computing is faster.
            "prefill_tokens_per_s": 0,
        }
        name = f"kvtier-demo-{uuid.uuid4().hex}"
        config = offloading_config(model, engine, options, name)
        assert config.row_bytes == self.block_bytes  # whole pages: nothing is padded
        connector = make_connector(config)
        assert isinstance(connector.scheduler, OffloadingConnectorScheduler)
        self._scheduler = connector.scheduler
        return Engine(model, engine, connector)

    @property
    def tiers(self) -> Sequence[SecondaryTierManager]:
        """In lookup order."""
        manager = self._scheduler.manager
        assert isinstance(manager, TieringOffloadingManager)
        return manager.secondary_tiers

    @property
    def tier_types(self) -> list[str]:
        """In lookup order."""
        return [tier.tier_type for tier in self.tiers]

    def serve(self, prompt: Prompt, after_first_step: Callable[[], None] | None = None) -> Served:
        self._scheduler.get_stats()  # reset its counters
        result = self._ask(prompt, after_first_step)
        assert result.time_to_first_token_s is not None
        counters = self._figures().counters
        tier_blocks = tuple(
            int(counters.get(self._series(place, "loaded_blocks"), 0))
            for place in range(len(self.tiers))
        )
        loaded = int(counters.get("kvtier_cpu_loaded_blocks", 0))
        return Served(
            prompt,
            result,
            result.time_to_first_token_s,
            host_blocks=max(0, loaded - sum(tier_blocks)),
            tier_blocks=tier_blocks,
            late_loads=tuple(
                int(counters.get(self._series(place, "late_loads"), 0))
                for place in range(len(self.tiers))
            ),
        )

    def settle(self) -> None:
        """Step until all blocks have been stored in the tiers."""
        deadline = _deadline(0)
        while self._scheduler.has_pending_push_work() or self._is_moving_blocks():
            self._check()
            if time.monotonic() > deadline:
                raise RequestStuck("blocks did not get to their tiers in time")
            self._engine.step()

    def _is_moving_blocks(self) -> bool:
        manager = self._scheduler.manager
        return isinstance(manager, TieringOffloadingManager) and manager.is_moving_blocks()

    def drop_device_cache(self) -> None:
        """Empty the device cache."""
        self._engine.drop_device_cache()

    def flush_host_memory(self) -> int:
        """Empty the device cache and host memory. Returns how many blocks host memory still has."""
        self._engine.reset_cache()
        return int(self._figures().gauges["kvtier_cpu_resident_blocks"])

    def is_cut_off(self, position: int) -> bool:
        """True if the breaker of the tier at `position` in `tiers` is open or half-open."""
        state = self._figures().gauges[self._series(position, "breaker_state")]
        return state != BreakerState.CLOSED.value

    def _figures(self) -> OffloadingStats:
        stats = self._scheduler.get_stats()
        assert stats is not None
        return stats

    def _series(self, place: int, name: str) -> str:
        return tier_series(tier_label(place, self.tier_types[place]), name)


def _deadline(num_tokens: int) -> float:
    return time.monotonic() + _PATIENCE_S + _PATIENCE_S_PER_TOKEN * num_tokens


class DoomedTier(ExampleSecondaryTierManager):
    """An example tier that can be killed. After `kill`, it accepts every job and reports none as
    finished, not even jobs that it had begun: the worst way for a tier to fail."""

    def __init__(
        self,
        offloading_spec: OffloadingSpec,
        primary_kv_view: memoryview,
        tier_type: str,
        max_blocks: int = 1000,
    ) -> None:
        self._is_dead = False
        super().__init__(
            offloading_spec,
            primary_kv_view,
            tier_type,
            max_blocks=max_blocks,
            simulate_async=True,
        )

    def kill(self) -> None:
        """Make the tier die. Called on the scheduler's thread."""
        self._is_dead = True

    def submit_store(self, job: TransferJob) -> None:
        if not self._is_dead:
            super().submit_store(job)

    def submit_load(self, job: TransferJob) -> None:
        if not self._is_dead:
            super().submit_load(job)

    def get_finished_jobs(self) -> Iterable[JobResult]:
        return () if self._is_dead else super().get_finished_jobs()
