"""A primary tier that tenants share, and requests of them. For tests."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from kvtier.base import OffloadKey, ReqContext, make_offload_key
from kvtier.config.tenants import TenantRule
from kvtier.cpu.manager import CPUOffloadingManager
from kvtier.cpu.policies.tenants import BlockQuota, Tenancy, TenantPolicy
from kvtier.hints import RequestHints, new_context


def request_of(tenant: int, req_id: str, **hints: object) -> ReqContext:
    """The context of a request of one tenant."""
    rule = TenantRule(f"tenant-{tenant}", tenant)
    return new_context(req_id, None, RequestHints(tenant=rule, **hints))  # type: ignore[arg-type]


def prompt_of(name: str, num_blocks: int, first: int = 0) -> list[OffloadKey]:
    """The keys of a prompt that no other name has."""
    blocks = range(first, first + num_blocks)
    return [make_offload_key(f"{name}:{n:06}".encode(), 0) for n in blocks]


class SharedCache:
    """A manager, used by one request after the other."""

    manager: CPUOffloadingManager
    policy: TenantPolicy
    num_requests = 0

    def __init__(
        self,
        num_blocks: int,
        *quotas: tuple[int, int],
        policy: str = "lru",
        max_retained: float = 0.25,
        clock: Callable[[], float] = lambda: 0.0,
    ) -> None:
        """`quotas`: floor and cap of each tenant; the first one is "default"."""
        named = tuple(BlockQuota(f"tenant-{n}", *quota) for n, quota in enumerate(quotas))
        tenancy = Tenancy(named, max_retained, clock)
        self.manager = CPUOffloadingManager(num_blocks, policy, tenancy=tenancy, strict=True)
        policy_of_all = self.manager.slots.policy
        assert isinstance(policy_of_all, TenantPolicy)
        self.policy = policy_of_all

    @classmethod
    def around(cls, manager: CPUOffloadingManager) -> SharedCache:
        """Requests for this manager, which may have no tenants."""
        cache = cls.__new__(cls)
        cache.manager = manager
        return cache

    def run(self, tenant: int, prompt: Sequence[OffloadKey], **hints: object) -> int:
        """A request from its arrival to its end. Returns how many of its blocks were found."""
        self.num_requests += 1
        manager = self.manager
        context = request_of(tenant, f"request-{self.num_requests}", **hints)
        manager.on_new_request(context)
        num_hits = manager.lookup_prefix(prompt, context).num_hits
        output = manager.prepare_store(prompt, context)
        if output is not None:
            manager.complete_store(output.keys_to_store, context)
        manager.on_request_finished(context)
        return num_hits

    def num_blocks(self, tenant: int) -> int:
        return self.policy.accounts[tenant].num_blocks

    def has(self, prompt: Sequence[OffloadKey]) -> list[bool]:
        return [self.manager.slots.get(key) is not None for key in prompt]
