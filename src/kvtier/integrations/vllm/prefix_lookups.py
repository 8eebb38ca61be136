"""vLLM asks for the blocks of a prompt one by one: kvtier is told of all of them before."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable
from typing import Any

from kvtier.base import OffloadKey
from kvtier.integrations.vllm import vllm_api
from kvtier.integrations.vllm.manager import ManagerAdapter

__all__ = ["announce_prefix_lookups"]

logger = logging.getLogger(__name__)

_LOOP = "_maximal_prefix_lookup"
"""vLLM's loop over the keys of a prompt, which ends with the first miss. The same in all tested
releases but for arguments that come last."""


def announce_prefix_lookups(scheduler: Any, manager: ManagerAdapter) -> None:
    """Let the manager of vLLM's half of a connector know what it is going to be asked. By the
    connector, once.

    Thousands of keys cost less at once than one after the other. And whether loading what is found
    takes longer than computing it can be said at once: found out block by block, that takes a whole
    engine step, for which the request would wait. In a release without that loop, keys are looked
    up one by one, with the same answers.

    vLLM has no hook for this. To make the keys here, from the hashes of the request, would do
    without, but every key of a prompt would be made, and kept, twice.
    """
    one_by_one: Callable[..., int | None] | None = getattr(scheduler, _LOOP, None)
    if one_by_one is None:
        logger.info("this vLLM has no %s: blocks are looked up one by one, which costs more", _LOOP)
        return

    def look_up(
        keys: Iterable[OffloadKey], req_context: vllm_api.ReqContext, *others: Any, **named: Any
    ) -> int | None:
        prompt = keys if isinstance(keys, list) else list(keys)
        manager.begin_prefix(prompt, req_context)
        try:
            return one_by_one(prompt, req_context, *others, **named)
        finally:
            manager.end_prefix()

    setattr(scheduler, _LOOP, look_up)
