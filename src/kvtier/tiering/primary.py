"""The primary tier as the tiers below use it: they read from its slots, and write into them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Sequence
from typing import TYPE_CHECKING

from kvtier.cpu.common import CPULoadStoreSpec
from kvtier.cpu.manager import CPUOffloadingManager

if TYPE_CHECKING:
    from kvtier.base import OffloadKey, ReqContext
    from kvtier.cpu.policies.base import BlockStatus
    from kvtier.cpu.policies.tenants import Tenancy
    from kvtier.cpu.shared_offload_region import SharedOffloadRegion

_MAX_PROMOTED_SHARE = 0.75
"""Share of the slots that promotions may take at the same time. The rest stays for stores, even if
a tier never ends its promotions."""


class TierTransfer:
    """The slots that one job of a tier is using, or that a lease keeps."""

    __slots__ = ("blocks", "context", "is_detached", "job_id", "num_resets")

    def __init__(
        self, job_id: int, blocks: list[BlockStatus], context: ReqContext, num_resets: int
    ) -> None:
        self.job_id = job_id
        self.blocks = blocks
        self.context = context
        self.num_resets = num_resets
        """Number of resets before the transfer began."""
        self.is_detached = False
        """True once the transfer was given up or the cache was reset. Its slots are then out of use
        until the transfer ends."""


class CPUPrimaryTierOffloadingManager(CPUOffloadingManager):
    """The CPU manager, with operations for the tiers below. Scheduler thread only.

    A tier *reads* the slots of a cascade and *writes* those of a promotion. Its transfers are
    identified by job id: `complete_*` ends exactly what `prepare_*` recorded under that id, even
    if the keys have other blocks by then. A slot that a tier may still be using is never reused:
    after a promotion was given up, or a reset, it is held until that very transfer has ended.
    """

    def __init__(
        self,
        num_blocks: int,
        mmap_region: SharedOffloadRegion,
        cache_policy: str = "lru",
        cache_policy_module_path: str | None = None,
        enable_events: bool = False,
        store_threshold: int = 1,
        max_tracker_size: int = 64_000,
        *,
        strict: bool | None = None,
        tenancy: Tenancy | None = None,
    ) -> None:
        """The manager owns `mmap_region` from now on: `shutdown` cleans it up."""
        super().__init__(
            num_blocks,
            cache_policy,
            cache_policy_module_path,
            enable_events,
            store_threshold,
            max_tracker_size,
            strict=strict,
            tenancy=tenancy,
        )
        self._region = mmap_region
        self._kv_memoryview = mmap_region.create_kv_memoryview()
        self.block_bytes = self._kv_memoryview.nbytes // num_blocks
        self.transfers: dict[int, TierTransfer] = {}
        """Transfers of tiers under way, by job id; and leases, by negative ids."""
        self._num_resets = 0
        self.num_promoting = 0
        """Slots that promotions are writing, except for promotions that were given up."""
        self.max_promoting = min(
            max(1, int(num_blocks * _MAX_PROMOTED_SHARE)), max(1, num_blocks - self.reserve)
        )

    def get_kv_memoryview(self) -> memoryview:
        """All slots, without a copy: shape (num_blocks, row_bytes). Valid until `shutdown`."""
        return self._kv_memoryview

    def shutdown(self) -> None:
        """Release the view and the region. Call it once no tier can reach them any more."""
        super().shutdown()
        self._kv_memoryview.release()
        self._region.cleanup()

    # --- questions of the tiering manager -------------------------------------------------------

    def has(self, key: OffloadKey) -> bool:
        """True if a block is here, readable or being written."""
        return self._get(key) is not None

    def is_ready(self, key: OffloadKey) -> bool:
        """True if a block is readable."""
        block = self._get(key)
        return block is not None and block.ref_cnt >= 0

    def blocks_of(self, keys: Iterable[OffloadKey]) -> list[BlockStatus | None]:
        """The block of each key, readable or being written. Does not count as a use."""
        return list(map(self._get, keys))

    def find_all(self, keys: Sequence[OffloadKey], req_context: ReqContext) -> bool:
        """True if all of these blocks are readable; notes that the request uses them, in prompt
        order. False if one is missing, or while any slot of host memory is being written, even for
        a block that is not among these."""
        use = self.uses.of(req_context)
        if self.slots.num_writing:
            return False  # one of them may be unreadable; the caller looks at each
        try:
            generations = [block.generation for block in map(self._get, keys)]  # type: ignore[union-attr]
        except AttributeError:  # one is missing
            return False
        self.uses.note_run(keys, generations, use)
        return True

    def writer_of(self, key: OffloadKey) -> int | None:
        """The job that is promoting this block, if one is."""
        block = self._get(key)
        if block is not None and type(block.writer) is TierTransfer:
            return block.writer.job_id
        return None

    def has_room_for(self, num_blocks: int, req_context: ReqContext) -> bool:
        """True if a request can certainly store this number of new blocks now. False if it may have
        to wait for a transfer of a tier or the device."""
        slots = self.slots
        num_kept = len(self.uses.of(req_context).keys)
        return not slots.quarantine and num_blocks <= min(
            slots.sure_room_for(req_context, num_kept),
            self.num_blocks - self.reserve - slots.num_in_transfer(),
        )

    def num_writable(self, wanted: int, num_leased: int, req_context: ReqContext) -> int:
        """How many slots, up to `wanted`, a promotion for this request can get now.

        `num_leased`: slots of earlier promotions that are kept for other requests.
        """
        slots = self.slots
        if slots.is_only_for_device:
            return 0
        wanted = min(wanted, self.max_promoting - self.num_promoting - len(slots.held) - num_leased)
        if slots.quarantine:
            # Leave one slot for a store: the end of a device transfer ends the quarantine.
            wanted = min(wanted, slots.allowance - 1)
        wanted = min(wanted, self.num_blocks - self.reserve - slots.num_in_transfer())
        use = self.uses.of(req_context)
        if wanted > slots.sure_room_for(req_context, len(use.keys)):
            own = [block for key in use.keys if (block := self._get(key)) is not None]
            wanted = min(wanted, slots.room_for(req_context, own)[0])
        return max(wanted, 0)

    def num_fitting(self, req_context: ReqContext) -> int:
        """How many blocks could be promoted for this request at the same time, beside those that it
        has found here, if no other transfer ran. Slots that are held for transfers that were given
        up, or were under way at a reset, count as taken."""
        if self.slots.is_only_for_device:
            return 0
        use = self.uses.of(req_context)
        num_held = len(self.slots.held)
        most = self.num_blocks - self.reserve - num_held
        fitting = self.max_promoting - num_held
        if most - len(use.keys) < fitting or self.slots.has_tenants:
            own = [block for key in use.keys if (block := self._get(key)) is not None]
            room = self.slots.room_for(req_context, own)[1] - num_held
            fitting = min(fitting, most - len(own), room)
        return fitting

    def tier_pins(self) -> Counter[int]:
        """By slot number, how many tier transfers and leases are using it. For tests and
        inspection."""
        return Counter(b.block_id for t in self.transfers.values() for b in t.blocks)

    # --- reads: a tier copies blocks out of their slots -----------------------------------------

    def prepare_read(
        self,
        job_id: int,
        keys: Sequence[OffloadKey],
        req_context: ReqContext,
        blocks: list[BlockStatus] | None = None,
    ) -> tuple[Sequence[OffloadKey], CPULoadStoreSpec]:
        """Pin the readable blocks of `keys`. Returns their keys, in order, and their slots.

        Does not count as a use: the order of eviction does not change. `blocks`: the blocks of
        `keys`, if the caller has them and knows that they are readable.
        """
        if blocks is None:
            found = list(map(self._get, keys))
            blocks = [block for block in found if block is not None and block.ref_cnt >= 0]
        self.slots.pin(blocks)
        self.transfers[job_id] = TierTransfer(job_id, blocks, req_context, self._num_resets)
        if len(blocks) < len(keys):
            keys = [block.key for block in blocks]
        return keys, CPULoadStoreSpec([block.block_id for block in blocks])

    def complete_read(self, job_id: int) -> Sequence[BlockStatus]:
        """The tier no longer reads these blocks. Returns them; none if there was a reset."""
        transfer = self.transfers.pop(job_id)
        if transfer.is_detached:
            self.slots.let_go(transfer.blocks)
            return ()
        self.slots.unpin(transfer.blocks)
        return transfer.blocks

    # --- writes: a tier copies blocks into slots ------------------------------------------------

    def prepare_write(
        self, job_id: int, keys: Sequence[OffloadKey], req_context: ReqContext
    ) -> tuple[Sequence[OffloadKey], CPULoadStoreSpec] | None:
        """Take slots for blocks that a tier is going to write, given in prompt order.

        Returns the keys and their slots; keys that are already here are left out. Returns None and
        takes nothing if there is nothing to write, or too few slots can be freed now.
        """
        use = self.uses.of(req_context)
        offered = dict.fromkeys(keys, 0)
        new, present = self.slots.split(offered)
        if not new or self.num_writable(len(new), 0, req_context) < len(new):
            return None
        comes_last = use.bring(offered) and not present
        transfer = TierTransfer(job_id, [], req_context, self._num_resets)
        placed = self._place(new, use, comes_last, transfer)
        if placed is None:
            return None
        transfer.blocks, _ = placed
        self.transfers[job_id] = transfer
        self.num_promoting += len(new)
        return new, CPULoadStoreSpec([block.block_id for block in transfer.blocks])

    def complete_write(
        self, job_id: int, successful_keys: Collection[OffloadKey]
    ) -> Sequence[OffloadKey]:
        """The tier no longer writes these blocks, and has verified `successful_keys`.

        Those become readable, even if the write was given up, unless another transfer has stored
        them or there was a reset. Returns those that became readable. The others are dropped.
        """
        transfer = self.transfers.pop(job_id)
        if transfer.is_detached:
            return self._adopt(transfer, set(successful_keys))
        self.num_promoting -= len(transfer.blocks)
        if len(successful_keys) == len(transfer.blocks):
            written, failed = transfer.blocks, []
        else:
            good = set(successful_keys)
            written = [block for block in transfer.blocks if block.key in good]
            failed = [block for block in transfer.blocks if block.key not in good]
        for block in transfer.blocks:
            block.writer = None
        readable = self._publish(written, "kvtier_cpu_promoted_blocks")
        if failed:
            self.uses.of(transfer.context).lose(failed)
            self.slots.discard(failed)
        return readable

    def give_up_write(self, job_id: int) -> None:
        """No request waits for this write any more.

        Its keys can be stored again. Its slots are held until the tier reports.
        """
        transfer = self.transfers[job_id]
        if transfer.is_detached:
            return
        transfer.is_detached = True
        self.uses.of(transfer.context).lose(transfer.blocks)
        self.slots.give_up(transfer.blocks)
        self.num_promoting -= len(transfer.blocks)

    def _adopt(self, transfer: TierTransfer, good: set[OffloadKey]) -> list[OffloadKey]:
        """End a write that was given up, or was under way at a reset. Makes the `good` blocks
        readable, unless there was a reset or their key has another block by now. Returns those that
        became readable."""
        keys: list[OffloadKey] = []
        blocks: list[BlockStatus] = []
        useless: list[BlockStatus] = []
        is_valid = transfer.num_resets == self._num_resets
        most = self.slots.num_chargeable(transfer.context) if is_valid else 0
        for block in transfer.blocks:
            if len(keys) < most and block.key in good and self._get(block.key) is None:
                keys.append(block.key)
                blocks.append(block)
            else:
                useless.append(block)
        self.slots.let_go(useless)
        if keys:
            context = transfer.context
            self.uses.settle()
            self.slots.take_back(keys, blocks, context)
            if context.req_id not in self.uses:
                self.slots.policy.on_request_finished(keys, context)
            self._publish(blocks, "kvtier_cpu_adopted_blocks")
        return keys

    # --- the whole cache ------------------------------------------------------------------------

    def reset_cache(self) -> None:
        for transfer in self.transfers.values():
            if not transfer.is_detached:
                self.slots.hold(transfer.blocks)
                transfer.is_detached = True
        super().reset_cache()
        self.num_promoting = 0
        self._num_resets += 1
