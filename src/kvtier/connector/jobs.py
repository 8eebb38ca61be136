"""Transfers between device and host memory that not all ranks have acknowledged."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from kvtier.base import OffloadKey
    from kvtier.connector.request_state import RequestOffloadState


@dataclass(slots=True, eq=False)
class ConnectorJob:
    """One transfer. Done when every rank has reported it; failed if one of them failed."""

    job_id: int
    state: RequestOffloadState
    keys: list[OffloadKey]
    is_store: bool
    device_blocks: list[int]
    """What it reads or writes on the device. Groups may share one pool of blocks, so it does not
    matter which of them a block is in."""
    tokens_before: int = 0
    """A load: tokens on the device before it,"""
    tokens_after: int = 0
    """and after it, if it succeeds."""
    ranks: set[int] = field(default_factory=set)
    """Those that have reported it."""
    has_failed: bool = False
    is_stale: bool = False
    """Whether it is from before a reset."""
