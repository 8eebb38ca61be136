"""When a block goes to a tier. The orchestrator asks; no tier knows."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from enum import Enum
from typing import TYPE_CHECKING

from kvtier.config.options import WritePolicyName

if TYPE_CHECKING:
    from kvtier.base import OffloadKey, ReqContext


class WriteMoment(Enum):
    """What has just happened to blocks in the primary tier."""

    STORED = "stored"
    """They came from the device."""
    HIT = "hit"
    """A request has brought them that were there already, and the tier wants whole requests."""
    USED = "used"
    """A request that used them has ended, and the tier lacks them."""


class WritePolicy(ABC):
    """Decides for one tier which blocks it gets, and when. Scheduler thread only.

    Asked at every moment with the blocks, which can be read and are pinned until the tier has them.
    """

    @abstractmethod
    def select(
        self, keys: Sequence[OffloadKey], moment: WriteMoment, req_context: ReqContext
    ) -> Sequence[OffloadKey]:
        """Those of `keys`, in their order, that go to the tier now."""


class WriteThrough(WritePolicy):
    """Everything, as soon as it is there."""

    def select(
        self, keys: Sequence[OffloadKey], moment: WriteMoment, req_context: ReqContext
    ) -> Sequence[OffloadKey]:
        return keys


WRITE_POLICIES: dict[WritePolicyName, type[WritePolicy]] = {WritePolicyName.THROUGH: WriteThrough}
"""By the user's word for them."""
