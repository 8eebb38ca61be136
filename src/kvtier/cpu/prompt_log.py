"""What the prompts of an engine's requests are used for: the hit curve."""

from __future__ import annotations

import logging
import time
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from kvtier.base import OffloadingManager, OffloadKey, ReqContext, get_offload_group_idx
from kvtier.config import AttentionKind
from kvtier.cpu.hit_curve import HOST, CurveBoard, CurveSize, HitCurve, host_sizes

if TYPE_CHECKING:
    from kvtier.config import OffloadingConfig

__all__ = ["PromptLog", "PromptWatching", "num_prompt_blocks"]

logger = logging.getLogger(__name__)

_SHOWN_EVERY_S = 1.0
_MAX_NAME = 200


class PromptWatching(OffloadingManager):
    """A manager whose engine reports prompts. Scheduler thread only."""

    prompts: PromptLog | None = None
    """Where they go. The spec sets it; None: nowhere."""

    def note_prompt(
        self,
        keys: Sequence[OffloadKey],
        req_context: ReqContext,
        num_prompt_tokens: int,
        num_output_tokens: int = 0,
    ) -> None:
        if self.prompts is not None:
            self.prompts.note(keys, req_context, num_prompt_tokens, num_output_tokens)

    def prompt_gauges(self) -> Mapping[str, float]:
        """The metrics of the hit curve."""
        return {} if self.prompts is None else self.prompts.curve.gauges

    def reset_cache(self) -> None:
        if self.prompts is not None:
            self.prompts.curve.reset()

    def shutdown(self) -> None:
        if self.prompts is not None:
            self.prompts.close()


class PromptLog:
    """Passes the prompts of an engine on. The methods are for the scheduler's thread."""

    def __init__(self, config: OffloadingConfig, sizes: Sequence[CurveSize] = ()) -> None:
        """`sizes`: of the hit curve, besides those of host memory."""
        per_chunk = config.cache.blocks_per_chunk
        self._tokens = {g.group_id: g.tokens_per_block * per_chunk for g in config.groups}
        self._prompt_only = config.options.offload_prompt_only
        num_host = num_prompt_blocks(config, config.num_blocks)
        self.curve = HitCurve([*host_sizes(num_host), *sizes])
        block_bytes = config.row_bytes * config.num_blocks // num_host
        self._about = {
            "engine_id": config.engine_id[:_MAX_NAME],
            "model": config.model.name[:_MAX_NAME],
            "block_bytes": block_bytes,
            "block_tokens": self._tokens[_main_group(config)],
        }
        self._board: CurveBoard | None = None
        try:
            self._board = CurveBoard()
        except OSError as error:
            logger.info("`kvtier plan --engine` will not find this engine: %s", error)
        self._show_at = 0.0
        self._show()

    def note(
        self,
        keys: Sequence[OffloadKey],
        req_context: ReqContext,
        num_prompt_tokens: int,
        num_output_tokens: int,
    ) -> None:
        """A request has ended. The arguments are those of `OffloadingManager.note_prompt`."""
        if req_context.is_prefetch or not keys:
            return
        num_prompt = num_prompt_tokens // self._tokens[get_offload_group_idx(keys[0])]
        if num_prompt >= len(keys):
            num_prompt = len(keys)
        elif self._prompt_only:
            keys = keys[:num_prompt]
        if self.curve.note_prompt(keys, num_prompt):
            self._show()

    def _show(self) -> None:
        """Show the curve to other processes, at most once in a second."""
        now = time.monotonic()
        if self._board is None or now < self._show_at:
            return
        self._show_at = now + _SHOWN_EVERY_S
        sizes = [
            {
                "place": size.place,
                "is_host": size.place == HOST,
                "factor": size.factor,
                "num_blocks": size.num_blocks,
                "hit_ratio": ratio,
            }
            for size, ratio in self.curve.points()
        ]
        self._board.show(self._about | {"num_blocks": self.curve.num_blocks, "sizes": sizes})

    def close(self) -> None:
        """Remove the curve from the sight of other processes. Idempotent."""
        if self._board is not None:
            self._board.close()
            self._board = None


def _main_group(config: OffloadingConfig) -> int:
    """The group whose blocks engines report: the first one that needs all earlier tokens."""
    full = (group.group_id for group in config.groups if group.kind is AttentionKind.FULL)
    return next(full, config.groups[0].group_id)


def num_prompt_blocks(config: OffloadingConfig, num_slots: int) -> int:
    """How many blocks of the main group fit into slots beside the same tokens of all groups."""
    tokens = {group.group_id: group.tokens_per_block for group in config.groups}
    main = tokens[_main_group(config)]
    return max(1, int(num_slots / sum(main / its for its in tokens.values())))
