"""What kvtier logs appears where vLLM's own log does, and can be told from it."""

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

__all__ = ["log_banner", "log_why_it_cannot_start", "speak_through_vllm"]

logger = logging.getLogger(__name__)

_TOLD = "_kvtier_has_told"


class _ThroughVllm(logging.Handler):
    """Passes records on to vLLM's handlers, each with `kvtier: ` before its text.

    vLLM's format has the name of a file, which several packages have, and not that of a logger: a
    log could not be searched for what kvtier says.
    """

    def __init__(self, handlers: Sequence[logging.Handler]) -> None:
        super().__init__()
        self._handlers = tuple(handlers)

    def emit(self, record: logging.LogRecord) -> None:
        line = copy.copy(record)  # others have the record as it is
        line.msg, line.args = f"kvtier: {record.getMessage()}", None
        line.filename = f"{record.name.replace('.', '/')}.py"
        for handler in self._handlers:
            if line.levelno >= handler.level:
                handler.handle(line)


def speak_through_vllm() -> None:
    """Let kvtier log with vLLM's handlers and level, unless somebody has set it up otherwise.

    vLLM sets up logging for itself alone; of others only warnings would be seen, as bare sentences.
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
    """Log an exception that ends the start of an engine, once, in one line with the remedy.

    vLLM logs the same as the end of a traceback, and ends its own log with another exception.
    """
    try:
        yield
    except Exception as error:
        if not hasattr(error, _TOLD):
            setattr(error, _TOLD, True)
            reason = " ".join(str(error).split()) or type(error).__name__
            logger.error("cannot start: %s", reason)
        raise


def log_banner(
    config: OffloadingConfig,
    manager: CPUOffloadingManager | TieringOffloadingManager,
    longest_prompt: int | None,
) -> None:
    """Say once, when an engine has started, which release this is and what each tier has room for;
    and warn of those that cannot hold one prompt of the longest kind, if its tokens are known."""
    tiers: list[tuple[str, int | None]] = [("host memory", config.num_blocks)]
    if isinstance(manager, TieringOffloadingManager):
        tiers += [(tier.tier_type, tier.capacity_blocks) for tier in manager.secondary_tiers]
    blocks_per_token = sum(
        Fraction(1, group.tokens_per_block * config.cache.blocks_per_chunk)
        for group in config.groups
    )
    room = []
    for name, blocks in tiers:
        tokens = None if blocks is None else int(blocks / blocks_per_token)
        room.append(name if blocks is None else f"{name} {blocks} blocks ({tokens} tokens)")
        if tokens is not None and longest_prompt is not None and tokens < longest_prompt:
            logger.warning(
                "%s holds %d tokens, and a prompt may have %d (--max-model-len): of a longer "
                "prompt only a part can be kept. Give it more room, or lower --max-model-len",
                name,
                tokens,
                longest_prompt,
            )
    logger.info(
        "release %s in vLLM %s, blocks of %d bytes: %s",
        sys.modules["kvtier"].__version__,  # which this package may not import from
        vllm.__version__,
        config.row_bytes,
        ", ".join(room),
    )
