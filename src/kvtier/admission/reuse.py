"""The reuse filter: store a block only once enough requests have brought it."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from kvtier.base import OffloadKey


class ReuseFilter:
    """Counts, per key, the requests that brought it; bounded. Scheduler thread only.

    Every key of a prompt counts, also those behind the first miss: a block that comes second
    in a prompt that nobody has stored yet is asked for by nobody, but it is as popular as the
    first.
    """

    def __init__(self, threshold: int, max_keys: int) -> None:
        self.threshold = threshold
        self.max_keys = max_keys
        self._num_requests: OrderedDict[OffloadKey, int] = OrderedDict()

    def __len__(self) -> int:
        return len(self._num_requests)

    def count(self, keys: Iterable[OffloadKey], brought: set[OffloadKey]) -> None:
        """A request brings `keys`. `brought` is what it has brought before, and is updated.

        When the memory is full the keys not seen for the longest time are forgotten, but never
        the request's own: of a prompt larger than the memory, the head is remembered.
        """
        num_requests = self._num_requests
        for key in keys:
            if key in brought:
                continue
            if key in num_requests:
                num_requests[key] += 1
                num_requests.move_to_end(key)
            elif len(num_requests) < self.max_keys or self._forget_oldest(brought):
                num_requests[key] = 1
            else:
                continue
            brought.add(key)

    def _forget_oldest(self, brought: set[OffloadKey]) -> bool:
        """Forget the key not seen for the longest time that is not the request's own."""
        if len(brought) >= self.max_keys:
            return False
        num_requests = self._num_requests
        while (oldest := next(iter(num_requests))) in brought:
            num_requests.move_to_end(oldest)
        del num_requests[oldest]
        return True

    def admits(self, key: OffloadKey) -> bool:
        """Whether enough requests have brought this key."""
        return self._num_requests.get(key, 0) >= self.threshold
