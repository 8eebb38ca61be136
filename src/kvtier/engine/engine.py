"""The engine: accepts requests, and runs steps until every request has its tokens."""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from kvtier.connector.common import ComputedTokens
from kvtier.engine.block_manager import BlockManager
from kvtier.engine.cache import KVCache
from kvtier.engine.config import EngineConfig, ModelConfig
from kvtier.engine.model import Model, Span
from kvtier.engine.request import FinishReason, Request, RequestResult, encode
from kvtier.engine.scheduler import Scheduler, Step

if TYPE_CHECKING:
    from kvtier.engine.offloading import Connector

__all__ = ["Engine"]

# Seconds to sleep after a step that computed nothing, so that transfers get the processor.
_IDLE_S = 0.0002


class Engine:
    """Runs on one thread and decodes greedily. A connector does not change the resulting tokens.

    `step` and `Scheduler.schedule` show how an engine calls a connector.
    """

    def __init__(
        self,
        model_config: ModelConfig,
        engine_config: EngineConfig,
        connector: Connector | None = None,
    ) -> None:
        engine_config.check_against(model_config)
        if connector is not None and len(connector.workers) != engine_config.world_size:
            raise ValueError(
                f"the connector has {len(connector.workers)} worker(s), but world_size="
                f"{engine_config.world_size}: give one for each rank"
            )
        self.config = engine_config
        self.model = Model(model_config)
        self.cache = KVCache(model_config, engine_config)
        self.blocks = BlockManager(model_config.groups, engine_config)
        self._connector = connector
        self._untaken: list[RequestResult] = []
        """Results of other requests that ended during `generate`. The next `step` returns them."""
        hooks = None if connector is None else connector.scheduler
        self._scheduler = Scheduler(engine_config, self.blocks, hooks)
        self._events: list[Any] = []
        """Events from before a reset, for the next `take_events`."""
        self._num_arrivals = 0
        self._is_shut_down = False
        try:
            self._register_caches()
        except BaseException:
            self.shutdown()
            raise

    def _register_caches(self) -> None:
        if self._connector is not None:
            for rank, worker in enumerate(self._connector.workers):
                worker.register_kv_caches(self.cache.canonical(rank))

    # --- requests -------------------------------------------------------------------------------

    @property
    def has_requests(self) -> bool:
        """True while any request waits, loads or runs."""
        return self._scheduler.has_requests

    def add_request(
        self,
        prompt: str | Sequence[int],
        max_tokens: int,
        *,
        request_id: str | None = None,
        eos: int | None = None,
        keep_logits: bool = False,
        kv_transfer_params: Mapping[str, Any] | None = None,
    ) -> str:
        """Queue a prompt, as text or token ids. Returns the request's id."""
        token_ids = encode(prompt) if isinstance(prompt, str) else list(prompt)
        self._check_size(token_ids, max_tokens)
        self._num_arrivals += 1
        if request_id is None:
            request_id = f"request-{self._num_arrivals}"
        if self._scheduler.is_known(request_id):
            raise ValueError(
                f"request_id={request_id!r} is in use: its request, or a load for it, has not "
                "ended. Give another id, or none"
            )
        self._scheduler.add(
            Request(
                request_id=request_id,
                token_ids=token_ids,
                max_tokens=max_tokens,
                eos=eos,
                keep_logits=keep_logits,
                kv_transfer_params=kv_transfer_params,
                tokens_per_hash=self.config.tokens_per_hash,
                num_groups=len(self.model.config.groups),
                arrival=self._num_arrivals,
            )
        )
        return request_id

    def _check_size(self, token_ids: Sequence[int], max_tokens: int) -> None:
        vocab = self.model.config.vocab
        if not token_ids or not all(0 <= token < vocab for token in token_ids):
            raise ValueError(
                f"a prompt of {len(token_ids)} tokens: give at least 1, each from 0 to {vocab - 1}"
            )
        if max_tokens < 1:
            raise ValueError(f"max_tokens={max_tokens}: give 1 or more")
        total = len(token_ids) + max_tokens
        if total > self.model.config.max_tokens or not self.blocks.fits(total):
            raise ValueError(
                f"a prompt of {len(token_ids)} tokens with max_tokens={max_tokens}: the model "
                f"takes {self.model.config.max_tokens} tokens, and the cache has num_blocks="
                f"{self.config.num_blocks} of {self.config.block_tokens} tokens"
            )

    def abort(self, request_id: str) -> RequestResult | None:
        """End a request now and return its result. None if there is no such request."""
        for request in self._scheduler.requests:
            if request.request_id == request_id:
                self._scheduler.end(request)
                return request.result(FinishReason.ABORTED)
        return None

    # --- steps ----------------------------------------------------------------------------------

    def step(self) -> list[RequestResult]:
        """Run one step. Returns the results of the requests that have finished."""
        untaken, self._untaken = self._untaken, []
        step = self._scheduler.schedule()
        connector = self._connector
        if connector is not None:
            metadata = connector.scheduler.build_connector_meta(step.plan)
            for worker in connector.workers:
                worker.start_kv_transfers(metadata)
        self._scheduler.planned(step)
        finished = self._run_model(step) if step.work else []
        if connector is not None:
            outputs = [worker.get_finished() for worker in connector.workers]
            self._scheduler.loads_ended(connector.scheduler.update_connector_output(outputs))
        for request, _ in finished:
            self._scheduler.end(request)
        if not step.work:
            time.sleep(_IDLE_S)
        return untaken + [request.result(reason) for request, reason in finished]

    def _run_model(self, step: Step) -> list[tuple[Request, FinishReason]]:
        spans = []
        for request, num_tokens in step.work:
            start = request.num_computed_tokens
            tokens = request.token_ids[start : start + num_tokens]
            spans.append(Span(tokens, start, request.block_tables))
        began = time.perf_counter()
        all_logits = self.model.run(spans, self.cache)
        if self._connector is not None:
            self._connector.scheduler.note_model_run(
                [ComputedTokens(span.start, len(span.token_ids)) for span in spans],
                time.perf_counter() - began,
            )
        self._scheduler.computed(step)
        finished = []
        for (request, _), logits in zip(step.work, all_logits, strict=True):
            if request.num_computed_tokens == request.num_tokens:
                if request.first_token_at is None and self._connector is not None:
                    self._connector.scheduler.note_first_token(request.request_id)
                reason = request.add_token(int(logits.argmax()), logits)
                if reason is not None:
                    finished.append((request, reason))
        return finished

    def generate(
        self,
        prompts: Iterable[str | Sequence[int]],
        max_tokens: int = 16,
        *,
        eos: int | None = None,
        keep_logits: bool = False,
        kv_transfer_params: Mapping[str, Any] | None = None,
    ) -> list[RequestResult]:
        """Run steps until all prompts have their results, and return these in order. The next
        `step` returns the results of other requests that finish meanwhile."""
        ids = [
            self.add_request(
                prompt,
                max_tokens,
                eos=eos,
                keep_logits=keep_logits,
                kv_transfer_params=kv_transfer_params,
            )
            for prompt in prompts
        ]
        results: dict[str, RequestResult] = {}
        others: list[RequestResult] = []
        while not results.keys() >= set(ids):
            for result in self.step():
                if result.request_id in ids:
                    results[result.request_id] = result
                else:
                    others.append(result)
        self._untaken += others
        return [results[request_id] for request_id in ids]

    def drain(self, timeout_s: float = 60.0) -> bool:
        """Run steps until no request and no transfer is left. Returns False if that takes longer
        than `timeout_s`."""
        deadline = time.monotonic() + timeout_s
        while self.has_requests or self._has_transfers:
            if time.monotonic() > deadline:
                return False
            self.step()
        return True

    @property
    def _has_transfers(self) -> bool:
        return self._connector is not None and self._connector.scheduler.has_pending_push_work()

    # --- the caches -----------------------------------------------------------------------------

    def take_events(self) -> list[Any]:
        """Return the events since the last call: those of the connector and, if the configuration
        has `device_events`, those of the device."""
        events, self._events = self._events, []
        events += self.blocks.take_events()
        if self._connector is not None:
            events += self._connector.scheduler.take_events()
        return events

    def drop_device_cache(self) -> None:
        """Forget all cached prefixes on the device. Offloaded blocks and requests stay."""
        self.blocks.drop_cache()

    def reset_cache(self) -> None:
        """Make everything computed so far unreachable: on the device, in host memory, and in the
        lower tiers unless the connector's option `reset_scope` is "primary". Requests that are
        running or loading start again."""
        self._scheduler.reset()
        if self._connector is not None:
            self._connector.scheduler.reset_cache()
        # Later events of the device must come after the end of this reset.
        self._events = self.take_events()

    def load_weights(self, seed: int) -> None:
        """Load other weights, and reset the cache, whose content the old weights computed."""
        self.model = Model(replace(self.model.config, seed=seed))
        self.reset_cache()

    def shutdown(self) -> None:
        """Release everything, without waiting for requests. Idempotent."""
        if self._connector is None or self._is_shut_down:
            return
        self._is_shut_down = True
        for worker in self._connector.workers:
            worker.shutdown()
        self._connector.scheduler.shutdown()
