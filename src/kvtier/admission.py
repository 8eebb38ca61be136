"""The reuse filter: a block is stored only after enough requests have brought its key.

A request *brings* the keys of its prompt.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from kvtier.base import OffloadKey


class ReuseFilter:
    """Counts how many requests brought each key, for up to `max_keys` keys. Scheduler thread only.

    All keys of a prompt count, not only those that are looked up: a lookup ends at the first miss,
    but blocks after the miss are used as often as the blocks before it.
    """

    def __init__(self, threshold: int, max_keys: int) -> None:
        self.threshold = threshold
        self.max_keys = max_keys
        self._num_requests: OrderedDict[OffloadKey, int] = OrderedDict()

    def __len__(self) -> int:
        return len(self._num_requests)

    def count(self, keys: Iterable[OffloadKey], brought: set[OffloadKey]) -> None:
        """Count each key of a request once. `brought`: the request's keys counted so far; the newly
        counted ones are added to it.

        When `max_keys` keys are counted, a new key replaces the one not seen for the longest time.
        Keys in `brought` are not replaced, so only the first `max_keys` keys of a longer prompt are
        counted.
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
        """Forget the oldest key that is not in `brought`. Returns False if there is none."""
        if len(brought) >= self.max_keys:
            return False
        num_requests = self._num_requests
        while (oldest := next(iter(num_requests))) in brought:
            num_requests.move_to_end(oldest)
        del num_requests[oldest]
        return True

    def admitted(
        self, keys: Iterable[OffloadKey], threshold: int | None = None
    ) -> list[OffloadKey]:
        """Those of the given keys that at least `threshold` requests have brought. None: as given
        to the constructor."""
        num_requests = self._num_requests
        threshold = self.threshold if threshold is None else threshold
        return [key for key in keys if num_requests.get(key, 0) >= threshold]
