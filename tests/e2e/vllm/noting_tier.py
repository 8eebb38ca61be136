"""A tier that notes what it is told of requests, and of the engine it is in."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any

from kvtier.base import LookupResult, OffloadKey, ReqContext, RequestOffloadingContext
from kvtier.tiering.base import TransferJob
from kvtier.tiering.example.manager import ExampleSecondaryTierManager

NOTING = {
    "type": "NotingTier",
    "module_path": "tests.e2e.vllm.noting_tier",
    "max_pinned_share": 1,
    # Nothing is to depend on how fast this machine is.
    "lookup_timeout_ms": 60_000,
    "load_timeout_ms": 60_000,
    "store_timeout_ms": 60_000,
}
"""Its entry in `secondary_tiers`."""

CALLS: list[dict[str, Any]] = []
"""Method and hints, of all calls for requests in this process."""

ENGINES: list[Any] = []
"""What each tier of this process has found in its constructor."""


class NotingTier(ExampleSecondaryTierManager):
    """The example tier, with these two lists."""

    def __init__(self, **keys: Any) -> None:
        super().__init__(**keys)
        ENGINES.append(self.offloading_spec.engine)

    def _note(self, method: str, context: ReqContext) -> None:
        params = context.kv_transfer_params
        CALLS.append({"method": method, "hints": None if params is None else dict(params)})

    def on_new_request(self, req_context: ReqContext) -> RequestOffloadingContext:
        self._note("on_new_request", req_context)
        return super().on_new_request(req_context)

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
