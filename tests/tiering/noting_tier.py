"""A tier that records the calls for requests, and the engine it runs in."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any
from weakref import WeakSet

from kvtier.base import (
    LookupResult,
    OffloadKey,
    OffloadPolicy,
    ReqContext,
    RequestOffloadingContext,
)
from kvtier.tiering.base import TransferJob
from kvtier.tiering.example.manager import ExampleSecondaryTierManager

NOTING = {
    "type": "NotingTier",
    "module_path": "tests.tiering.noting_tier",
    "max_pinned_share": 1,
    # Nothing is to depend on how fast this machine is.
    "lookup_timeout_ms": 60_000,
    "load_timeout_ms": 60_000,
    "store_timeout_ms": 60_000,
}
"""Its entry in `secondary_tiers`."""

TIERS: WeakSet[NotingTier] = WeakSet()
"""The tiers of this process, for tests that make the engine and not the tier."""


class NotingTier(ExampleSecondaryTierManager):
    """The example tier; it records calls."""

    def __init__(self, whole_requests: bool = False, **keys: Any) -> None:
        super().__init__(**keys)
        self._whole_requests = whole_requests
        self.engine = self.offloading_spec.engine
        self.calls: list[dict[str, Any]] = []
        """Method, request, hints and context of all calls for requests."""
        self.stored: list[tuple[str, list[OffloadKey]]] = []
        """Request and keys of every store."""
        TIERS.add(self)

    def _note(self, method: str, context: ReqContext) -> None:
        params = context.kv_transfer_params
        hints = None if params is None else dict(params)
        self.calls.append(
            {
                "method": method,
                "request": context.req_id,
                "hints": hints,
                "context": id(context),
            }
        )

    def on_new_request(self, req_context: ReqContext) -> RequestOffloadingContext:
        self._note("on_new_request", req_context)
        super().on_new_request(req_context)
        whole = OffloadPolicy.REQUEST_LEVEL if self._whole_requests else OffloadPolicy.BLOCK_LEVEL
        return RequestOffloadingContext(whole)

    def lookup(self, key: OffloadKey, req_context: ReqContext) -> LookupResult:
        self._note("lookup", req_context)
        return super().lookup(key, req_context)

    def lookup_batch(
        self, keys: Sequence[OffloadKey], req_context: ReqContext
    ) -> Sequence[LookupResult]:
        self._note("lookup", req_context)
        return super().lookup_batch(keys, req_context)

    def submit_store(self, job: TransferJob) -> None:
        self._note("submit_store", job.req_context)
        self.stored.append((job.req_context.req_id, list(job.keys)))
        super().submit_store(job)

    def submit_load(self, job: TransferJob) -> None:
        self._note("submit_load", job.req_context)
        super().submit_load(job)

    def touch(self, keys: Collection[OffloadKey], req_context: ReqContext) -> None:
        self._note("touch", req_context)
        super().touch(keys, req_context)

    def on_request_finished(self, req_context: ReqContext) -> None:
        self._note("on_request_finished", req_context)
        super().on_request_finished(req_context)
