"""An engine of the demo: serves one prompt at a time, and says where its blocks came from."""

from __future__ import annotations

import time
import uuid
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import Any, Self

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
from kvtier.tiering.health import BreakerState
from kvtier.tiering.link import metric_prefix
from kvtier.tiering.manager import TieringOffloadingManager

__all__ = ["OffloadingServer", "RequestStuck", "Served", "Server"]

# Far beyond what a slow machine takes: whoever waits longer waits for nothing.
_PATIENCE_S = 60.0
_PATIENCE_S_PER_TOKEN = 0.05


class RequestStuck(RuntimeError):
    """A request that does not end. That must not happen, whatever a tier does."""


@dataclass(frozen=True, slots=True)
class Served:
    """One answered prompt, and what was counted meanwhile."""

    prompt: Prompt
    result: RequestResult
    first_token_s: float
    host_blocks: int = 0
    """Loaded from host memory, less those that came from a tier just before."""
    tier_blocks: tuple[int, ...] = ()
    """Loaded from each tier."""
    late_loads: tuple[int, ...] = ()
    """Loads that each tier has not ended in time."""

    @property
    def device_blocks(self) -> int:
        """Found in the device's own cache, in the group that looks at all tokens."""
        return self.result.num_device_tokens // BLOCK_TOKENS


class Server:
    """Without offloading: computes everything. What it answers is what is right."""

    def __init__(
        self, model: ModelConfig, prompts: Sequence[Prompt], check: Callable[[], None]
    ) -> None:
        """`prompts`: all that there must be room for at the same time. `check` is called before
        every step, and may raise."""
        self._check = check
        self._engine = self._start(model, prompts)

    def _start(self, model: ModelConfig, prompts: Sequence[Prompt]) -> Engine:
        return Engine(model, engine_config(model, prompts))

    def __enter__(self) -> Self:
        try:
            # What is done for the first time takes longer.
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
        """Ask, and wait for the answer."""
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
    """With offloading, to host memory and to tiers below it."""

    def __init__(
        self,
        model: ModelConfig,
        prompts: Sequence[Prompt],
        check: Callable[[], None],
        tiers: Sequence[Mapping[str, Any]],
        *,
        spare_prompts: int = 0,
    ) -> None:
        """`spare_prompts`: room in host memory beyond the prompts, in prompts of the longest kind,
        for slots that a dead tier does not give back."""
        self._tiers = tiers
        self._spare_prompts = spare_prompts
        super().__init__(model, prompts, check)

    def _start(self, model: ModelConfig, prompts: Sequence[Prompt]) -> Engine:
        engine = engine_config(model, prompts)
        sizes = [num_blocks_of(prompt) * len(model.groups) for prompt in prompts]
        # Twice: stores on their way to a tier take some of it, and may take no more than a share.
        num_slots = 2 * sum(sizes) + self._spare_prompts * max(sizes) + WARM_UP_TOKENS
        self.block_bytes = sum(array_page_bytes(model, engine))
        options = {
            "cpu_bytes_to_use": num_slots * self.block_bytes,
            "secondary_tiers": self._tiers,
            # A reset empties host memory, and leaves the tiers as they are.
            "reset_scope": "primary",
            # A busy moment must not make loading look slower than computing.
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
        self._scheduler.get_stats()  # what it counts begins here
        result = self._ask(prompt, after_first_step)
        assert result.time_to_first_token_s is not None
        counters = self._figures().counters
        prefixes = self._prefixes()
        tier_blocks = tuple(int(counters.get(p + "loaded_blocks", 0)) for p in prefixes)
        loaded = int(counters.get("kvtier_cpu_loaded_blocks", 0))
        return Served(
            prompt,
            result,
            result.time_to_first_token_s,
            host_blocks=max(0, loaded - sum(tier_blocks)),
            tier_blocks=tier_blocks,
            late_loads=tuple(int(counters.get(p + "late_loads", 0)) for p in prefixes),
        )

    def settle(self) -> None:
        """Wait until all blocks are where they are going."""
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
        """Find nothing on the device any more."""
        self._engine.drop_device_cache()

    def flush_host_memory(self) -> int:
        """Find nothing on the device, nor in host memory. Returns the blocks left there."""
        self._engine.reset_cache()
        return int(self._figures().gauges["kvtier_cpu_resident_blocks"])

    def is_cut_off(self, position: int) -> bool:
        """Whether a tier's breaker is not closed."""
        state = self._figures().gauges[self._prefixes()[position] + "breaker_state"]
        return state != BreakerState.CLOSED.value

    def _figures(self) -> OffloadingStats:
        stats = self._scheduler.get_stats()
        assert stats is not None
        return stats

    def _prefixes(self) -> list[str]:
        return [metric_prefix(place, name) for place, name in enumerate(self.tier_types)]


def _deadline(num_tokens: int) -> float:
    return time.monotonic() + _PATIENCE_S + _PATIENCE_S_PER_TOKEN * num_tokens
