"""kvtier logs through vLLM's handlers, each line marked with `kvtier: `."""

from __future__ import annotations

import copy
import logging
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from fractions import Fraction

import vllm

from kvtier.config import OffloadingConfig
from kvtier.cpu.manager import CPUOffloadingManager
from kvtier.tiering.manager import TieringOffloadingManager

__all__ = ["log_banner", "log_why_it_cannot_start", "log_through_vllm"]

logger = logging.getLogger(__name__)

_LOGGED = "_kvtier_has_logged"


class _ThroughVllm(logging.Handler):
    """Passes records on to vLLM's handlers, each with `kvtier: ` before its text.

    vLLM's format shows the name of a file, which another package may have too, but not the name of
    the logger. Without the prefix, nobody could search a log for kvtier's lines.
    """

    def __init__(self, handlers: Sequence[logging.Handler]) -> None:
        super().__init__()
        self._handlers = tuple(handlers)

    def emit(self, record: logging.LogRecord) -> None:
        line = copy.copy(record)  # other handlers get the record unchanged
        line.msg, line.args = f"kvtier: {record.getMessage()}", None
        line.filename = f"{record.name.replace('.', '/')}.py"
        for handler in self._handlers:
            if line.levelno >= handler.level:
                handler.handle(line)


def log_through_vllm() -> None:
    """Log with vLLM's handlers and level, unless the logger `kvtier` is configured already.

    vLLM configures logging only for itself: other loggers would show only warnings, without time or
    level.
    """
    ours, theirs = logging.getLogger("kvtier"), logging.getLogger("vllm")
    if ours.handlers or ours.level != logging.NOTSET:
        return
    if theirs.handlers:
        ours.addHandler(_ThroughVllm(theirs.handlers))
        ours.propagate = False
    ours.setLevel(theirs.level)


@contextmanager
def log_why_it_cannot_start() -> Iterator[None]:
    """Log an exception that keeps an engine from starting: once, in one line, with the remedy.

    vLLM itself shows only tracebacks, and further exceptions follow the one that matters. Entering
    this context also sets up the log, because vLLM may call kvtier before it makes any of kvtier's
    objects.
    """
    log_through_vllm()
    try:
        yield
    except Exception as error:
        if not hasattr(error, _LOGGED):
            setattr(error, _LOGGED, True)
            reason = " ".join(str(error).split()) or type(error).__name__
            logger.error("cannot start: %s", reason)
        raise


def log_banner(
    config: OffloadingConfig,
    manager: CPUOffloadingManager | TieringOffloadingManager,
    longest_prompt: int | None,
) -> None:
    """Log the release and the capacity of each tier. Warn about tiers that cannot hold a prompt of
    `longest_prompt` tokens; None: not known. Called once, when an engine starts."""
    tiers: list[tuple[str, int | None]] = [("host memory", config.num_blocks)]
    if isinstance(manager, TieringOffloadingManager):
        tiers += [(tier.tier_type, tier.capacity_blocks) for tier in manager.secondary_tiers]
    blocks_per_token = sum(Fraction(1, tokens) for tokens in config.tokens_per_chunk.values())
    room = []
    for name, blocks in tiers:
        tokens = None if blocks is None else int(blocks / blocks_per_token)
        room.append(name if blocks is None else f"{name} {blocks} blocks ({tokens} tokens)")
        if tokens is not None and longest_prompt is not None and tokens < longest_prompt:
            logger.warning(
                "%s holds %d tokens, and a prompt may have %d (--max-model-len): only a part of "
                "such a prompt can be kept. Give it more room, or lower --max-model-len",
                name,
                tokens,
                longest_prompt,
            )
    logger.info(
        "release %s in vLLM %s, blocks of %d bytes: %s",
        sys.modules["kvtier"].__version__,  # not imported: imports go from higher layers to lower
        vllm.__version__,
        config.row_bytes,
        ", ".join(room),
    )
