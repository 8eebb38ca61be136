"""No more than so many bytes per second."""

from __future__ import annotations

import time

__all__ = ["RateLimit"]

_LONGEST_NAP_S = 0.1


class RateLimit:
    """Makes whoever reads wait. One thread."""

    def __init__(self, bytes_per_s: int | None) -> None:
        """None: no limit."""
        self._bytes_per_s = bytes_per_s
        self._free_at = time.monotonic()

    def wait_for(self, num_bytes: int) -> None:
        """Wait until so many bytes may be read: as long as they take, beforehand, so that the rate
        is kept from the first byte on. Time in which nothing was read is not made up for later."""
        if self._bytes_per_s is None:
            return
        self._free_at = max(self._free_at, time.monotonic()) + num_bytes / self._bytes_per_s
        while (rest := self._free_at - time.monotonic()) > 0:
            time.sleep(min(rest, _LONGEST_NAP_S))
