"""The rules for calls of the manager to a tier."""

from __future__ import annotations

from kvtier.base import Locality, Medium, ReqContext
from kvtier.tiering.base import TransferJob
from kvtier.tiering.health import BreakerState, CircuitBreaker
from tests.tiering.simulation.world import Promotion, World, name


class CallerRules:
    """Checks the calls to one tier."""

    def __init__(
        self, world: World, who: str, medium: Medium | None, locality: Locality | None
    ) -> None:
        self._world = world
        self._who = who
        self._medium = medium
        self._locality = locality
        self._announced: set[ReqContext] = set()
        self._ended: set[ReqContext] = set()
        self._touched: set[ReqContext] = set()
        self._loaded_in_step: set[ReqContext] = set()
        self._was_polled = False
        self._last_job_id = 0
        self.breaker: CircuitBreaker | None = None
        """The manager's breaker for this tier. Set by `Life`."""
        self.max_pinned = 0
        """Slots that cascades to this tier may pin. Set by `Life`."""

    def begin_step(self) -> None:
        """A step of the manager has ended: calls that may come once in a step may come again."""
        self._was_polled = False
        self._loaded_in_step.clear()

    def announced(self, context: ReqContext) -> None:
        """Every request is announced once."""
        if context in self._announced:
            self._broken(f"{context.req_id} was announced twice")
        self._announced.add(context)

    def finished(self, context: ReqContext) -> None:
        """Every request that was announced finishes once."""
        if context not in self._announced:
            self._broken(f"{context.req_id} finished without having been announced")
        if context in self._ended:
            self._broken(f"{context.req_id} finished twice")
        self._ended.add(context)

    def num_open_requests(self) -> int:
        """Requests that were announced and have not finished."""
        return len(self._announced) - len(self._ended)

    def asked_for(self, context: ReqContext, for_loading: bool = True) -> None:
        """Calls for a request come between its announcement and its end, while the tier is not cut
        off. Lookups and loads come only if its filter allows this tier."""
        if context not in self._announced:
            self._broken(f"asked for {context.req_id}, which was not announced")
        if context in self._ended:
            self._broken(f"asked for {context.req_id}, which has finished")
        breaker = self.breaker
        if (
            breaker is not None
            and breaker.state is BreakerState.OPEN
            and self._world.time.now < breaker._opened_at + breaker._pause
        ):
            self._broken("asked while it is cut off")
        if for_loading and not context.load_tier_filter.allows(self._medium, self._locality):
            self._broken(f"{context.req_id} may not load from it")

    def touched(self, context: ReqContext) -> None:
        """`touch` is called once for a request."""
        if context in self._touched:
            self._broken(f"touch was called twice for {context.req_id}")
        self._touched.add(context)

    def polled(self) -> None:
        """Polls come once in a step, once more if a store finds no room, and at the end."""
        if self._world.is_offering_store or self._world.is_ending:
            return
        if self._was_polled:
            self._broken("polled twice in one step")
        self._was_polled = True

    def submitted(self, job: TransferJob) -> None:
        """A job is well-formed, and is the only one while the breaker is half-open."""
        slots = job.block_ids
        if not len(job.keys) == len(set(job.keys)) == len(set(slots.tolist())) == len(slots) > 0:
            self._broken(f"job {job.job_id} is for {list(map(name, job.keys))} in {slots}")
        if slots.flags.writeable:
            self._broken(f"job {job.job_id} can be changed")
        if job.job_id <= self._last_job_id:
            self._broken(f"job id {job.job_id} is not new")
        self._last_job_id = job.job_id
        self.asked_for(job.req_context, for_loading=job.is_promotion)
        breaker = self.breaker
        if breaker is not None and breaker.state is BreakerState.HALF_OPEN:
            self._world.tally["probes"] += 1
            if breaker.probe != job.job_id:
                self._broken(f"job {job.job_id} was sent beside the probe {breaker.probe}")
        if job.is_promotion:
            self._loading(job)

    def _loading(self, job: TransferJob) -> None:
        if job.req_context in self._loaded_in_step:
            self._broken(f"two loads in one step for {job.req_context.req_id}")
        self._loaded_in_step.add(job.req_context)
        if self._world.version_of(job.fingerprint) != self._world.version:
            self._broken(f"job {job.job_id} loads blocks of an earlier epoch")

    def promoting(self, job: TransferJob, overdue_at: float) -> None:
        """No block is loaded twice at the same time, by any tier."""
        world = self._world
        num_resets = world.num_resets
        for key in job.keys:
            other = world.promoting.get(key)
            if (
                other is not None
                and world.time.now < other.overdue_at
                and other.num_resets == num_resets
            ):
                self._broken(f"{name(key)} is promoted twice: jobs {other.job_id}, {job.job_id}")
            world.promoting[key] = Promotion(job.job_id, overdue_at, num_resets)

    def pinned(self, num_slots: int) -> None:
        """Cascades of one tier pin no more than their share."""
        if num_slots > self.max_pinned:
            self._broken(f"its cascades pin {num_slots} slots of {self.max_pinned}")

    def _broken(self, what: str) -> None:
        raise self._world.witness.saw(f"{self._who}: {what}")
