"""The primary tier seen from below: tiers read from its slots, and write into them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Sequence
from typing import TYPE_CHECKING

from kvtier.cpu.common import CPULoadStoreSpec
from kvtier.cpu.manager import CPUOffloadingManager
from kvtier.cpu.policies.base import QUARANTINED, WRITING, BlockStatus
from kvtier.cpu.request_use import RequestUse

if TYPE_CHECKING:
    from kvtier.base import OffloadKey, ReqContext
    from kvtier.cpu.shared_offload_region import SharedOffloadRegion

_MAX_PROMOTED_SHARE = 0.75
"""What may be on its way up at the same time. The rest is left for stores, also when a tier never
gives back the slots it was to write."""


class TierTransfer:
    """The slots that one job of a tier is using."""

    __slots__ = ("blocks", "context", "is_detached", "is_write", "job_id", "num_resets")

    def __init__(
        self,
        job_id: int,
        blocks: list[BlockStatus],
        is_write: bool,
        context: ReqContext,
        num_resets: int,
    ) -> None:
        self.job_id = job_id
        self.blocks = blocks
        self.is_write = is_write
        self.context = context
        self.num_resets = num_resets
        """How many resets there had been when it began."""
        self.is_detached = False
        """Whether the slots are out of use, and wait for the end of this transfer."""


class CPUPrimaryTierOffloadingManager(CPUOffloadingManager):
    """The CPU manager, and the same operations for the tiers below. Scheduler thread only.

    A tier *reads* the slots of a cascade and *writes* those of a promotion. Its transfers are known
    by job id: what `prepare_*` recorded under it is what `complete_*` ends, whatever has become of
    the keys. A slot that a tier may still be using is never given to another block: after a
    promotion was given up, or a reset, it is quarantined until that very transfer has ended.
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
    ) -> None:
        """`mmap_region` belongs to this object from now on: `shutdown` cleans it up."""
        super().__init__(
            num_blocks,
            cache_policy,
            cache_policy_module_path,
            enable_events,
            store_threshold,
            max_tracker_size,
            strict=strict,
        )
        self._region = mmap_region
        self._kv_memoryview = mmap_region.create_kv_memoryview()
        self.block_bytes = self._kv_memoryview.nbytes // num_blocks
        # What `lookup` consists of, for an orchestrator that has its own.
        self.get_block = self._get
        """The block of a key, readable or not, if it is here."""
        self.note_use = self._note_use
        """A request uses a block, for the first time in this generation of it."""
        self.counts_keys = self._filter is not None
        """Whether keys that are looked up have to be counted."""
        self._transfers: dict[int, TierTransfer] = {}
        self._num_resets = 0
        self._num_promoting = 0
        """Slots of promotions that someone may be waiting for."""
        self.max_promoting = min(
            max(1, int(num_blocks * _MAX_PROMOTED_SHARE)), max(1, num_blocks - self.reserve)
        )

    def get_kv_memoryview(self) -> memoryview:
        """All slots, without a copy: shape (num_blocks, row_bytes). Until `shutdown`."""
        return self._kv_memoryview

    def shutdown(self) -> None:
        """Release the view and the region. Every tier has drained, or can no longer get at it."""
        super().shutdown()
        self._kv_memoryview.release()
        self._region.cleanup()

    # --- reads: a tier copies blocks out of their slots -----------------------------------------

    def prepare_read(
        self,
        job_id: int,
        keys: Sequence[OffloadKey],
        req_context: ReqContext,
        blocks: list[BlockStatus] | None = None,
    ) -> tuple[Sequence[OffloadKey], CPULoadStoreSpec]:
        """Pin those of the blocks that can be read, in the order of `keys`: which, and where.

        Not a use: who is evicted first does not change. `blocks`: those of `keys`, if they are at
        hand and known to be readable.
        """
        if blocks is None:
            found = list(map(self._get, keys))
            blocks = [block for block in found if block is not None and block.ref_cnt >= 0]
        newly_pinned = [block for block in blocks if block.ref_cnt == 0]
        for block in blocks:
            block.ref_cnt += 1
        if newly_pinned:
            self._num_evictable -= len(newly_pinned)
            self._num_pinned += len(newly_pinned)
            self._policy.pinned(newly_pinned)
        self._transfers[job_id] = TierTransfer(job_id, blocks, False, req_context, self._num_resets)
        if len(blocks) < len(keys):
            keys = [block.key for block in blocks]
        return keys, CPULoadStoreSpec([block.block_id for block in blocks])

    def complete_read(self, job_id: int) -> None:
        """The tier does not read these blocks any more."""
        transfer = self._transfers.pop(job_id)
        if transfer.is_detached:
            self._let_go(transfer.blocks)
            return
        unpinned = []
        for block in transfer.blocks:
            block.ref_cnt -= 1
            if block.ref_cnt == 0:
                unpinned.append(block)
        if unpinned:
            self._num_evictable += len(unpinned)
            self._num_pinned -= len(unpinned)
            self._policy.unpinned(unpinned)

    # --- writes: a tier copies blocks into slots ------------------------------------------------

    def num_writable(self, wanted: int, num_leased: int, req_context: ReqContext) -> int:
        """How many slots, up to `wanted`, a promotion for this request could have now.

        `num_leased`: slots of earlier ones, kept for other requests that wanted them.
        """
        in_use = self._num_promoting + len(self._held) + num_leased
        wanted = min(wanted, self.max_promoting - in_use)
        if self._quarantine:
            # The store that ends the quarantine needs one.
            wanted = min(wanted, self._allowance - 1)
        in_transfer = self._num_writing + self._num_pinned
        wanted = min(wanted, self.num_blocks - self.reserve - in_transfer - len(self._held))
        use = self._use_of(req_context)
        num_free = self._num_free()
        if wanted > num_free + max(self._num_evictable - len(use.keys), 0):
            own = sum(
                1 for key in use.keys if (block := self._get(key)) is not None and not block.ref_cnt
            )
            wanted = min(wanted, num_free + self._num_evictable - own)
        return max(wanted, 0)

    def has_room_for(self, num_blocks: int, req_context: ReqContext) -> bool:
        """Whether so many new blocks of a request can be stored now for sure: nothing that a tier
        or the device is using stands in their way."""
        in_transfer = self._num_writing + self._num_pinned + len(self._held)
        num_evictable = self._num_evictable - len(self._use_of(req_context).keys)
        return not self._quarantine and num_blocks <= min(
            self._num_free() + max(num_evictable, 0), self.num_blocks - self.reserve - in_transfer
        )

    def num_fitting(self, req_context: ReqContext) -> int:
        """How many blocks could ever be promoted for this request at the same time, beside those
        that it has found here already."""
        use = self._use_of(req_context)
        most = self.num_blocks - self.reserve - len(self._held)
        fitting = self.max_promoting - len(self._held)
        if most - len(use.keys) < fitting:
            own = sum(1 for key in use.keys if self._get(key) is not None)
            fitting = min(fitting, most - own)
        return fitting

    def blocks_of(self, keys: Iterable[OffloadKey]) -> list[BlockStatus | None]:
        """Each block, if it is here or on its way here. Not a use."""
        return list(map(self._get, keys))

    def find_all(self, keys: Sequence[OffloadKey], req_context: ReqContext) -> bool:
        """Whether all of these blocks can be read. If so, a request uses them, in prompt order."""
        return self._find_all(keys, self._use_of(req_context))

    def note_run(
        self, keys: Sequence[OffloadKey], blocks: list[BlockStatus], req_context: ReqContext
    ) -> bool:
        """A request uses these blocks, in prompt order. Whether all of them can be read."""
        return self._note_run(keys, blocks, self._use_of(req_context))

    def count_key(self, key: OffloadKey, use: RequestUse) -> None:
        """A request brings this key, for the reuse filter."""
        if self._filter is not None:
            self._filter.count((key,), use.brought)

    def use_of(self, req_context: ReqContext) -> RequestUse:
        """What a request has used."""
        return self._use_of(req_context)

    def has(self, key: OffloadKey) -> bool:
        """Whether a block is here, or on its way here."""
        return self._get(key) is not None

    def is_ready(self, key: OffloadKey) -> bool:
        """Whether a block can be read."""
        block = self._get(key)
        return block is not None and block.ref_cnt >= 0

    def finish_store(
        self, keys: Collection[OffloadKey], req_context: ReqContext, success: bool
    ) -> list[BlockStatus]:
        """`complete_store`; the blocks that can be read now and could not before, in this order."""
        return self._complete_store(keys, req_context, success)

    def prepare_write(
        self, job_id: int, keys: Sequence[OffloadKey], req_context: ReqContext
    ) -> tuple[Sequence[OffloadKey], CPULoadStoreSpec] | None:
        """Make room for blocks that a tier is going to write, given in prompt order: for which of
        them, and where. Keys already here are left out.

        None, and nothing changed: there is nothing to write, or too few slots can be freed now.
        """
        use = self._use_of(req_context)
        offered = dict.fromkeys(keys, 0)
        new, present = self._split(offered)
        if not new or self.num_writable(len(new), 0, req_context) < len(new):
            return None
        comes_last = use.bring(offered) and not present
        transfer = TierTransfer(job_id, [], True, req_context, self._num_resets)
        placed = self._place(new, use, comes_last, transfer)
        if placed is None:
            return None
        transfer.blocks, _ = placed
        self._transfers[job_id] = transfer
        self._num_promoting += len(new)
        return new, CPULoadStoreSpec([block.block_id for block in transfer.blocks])

    def complete_write(self, job_id: int, successful_keys: Collection[OffloadKey]) -> int:
        """The tier does not write these blocks any more, and has verified `successful_keys`.

        Those can be read from now on, also if the write was given up meanwhile, unless someone
        else has stored them or there was a reset. Returns how many. The others are forgotten.
        """
        transfer = self._transfers.pop(job_id)
        if transfer.is_detached:
            return self._adopt(transfer, set(successful_keys))
        self._num_promoting -= len(transfer.blocks)
        if len(successful_keys) == len(transfer.blocks):
            written, failed = transfer.blocks, []
        else:
            good = set(successful_keys)
            written = [block for block in transfer.blocks if block.key in good]
            failed = [block for block in transfer.blocks if block.key not in good]
        self._num_writing -= len(transfer.blocks)
        for block in transfer.blocks:
            block.writer = None
        self._publish(written, "kvtier_cpu_promoted_blocks")
        if failed:
            self._abandon(failed, self._use_of(transfer.context))
        return len(written)

    def give_up_write(self, job_id: int) -> None:
        """Nobody waits for this write any more. Its keys are free to be stored; its slots are
        quarantined until the tier reports."""
        transfer = self._transfers[job_id]
        if transfer.is_detached:
            return
        transfer.is_detached = True
        use = self._use_of(transfer.context)
        for block in transfer.blocks:
            self._forget(block, use)
            block.writer = None
            block.ref_cnt = QUARANTINED
            self._held[block] = 1
        self._num_writing -= len(transfer.blocks)
        self._num_promoting -= len(transfer.blocks)

    def writer_of(self, key: OffloadKey) -> int | None:
        """The job that is promoting this block, if one is."""
        block = self._get(key)
        if block is not None and type(block.writer) is TierTransfer:
            return block.writer.job_id
        return None

    def _adopt(self, transfer: TierTransfer, good: set[OffloadKey]) -> int:
        """Take in what has arrived after it was given up, where it is still of use."""
        keys: list[OffloadKey] = []
        blocks: list[BlockStatus] = []
        useless: list[BlockStatus] = []
        is_valid = transfer.num_resets == self._num_resets
        for block in transfer.blocks:
            if is_valid and block.key in good and self._get(block.key) is None:
                keys.append(block.key)
                blocks.append(block)
            else:
                useless.append(block)
        self._let_go(useless)
        if keys:
            self._settle()
            self._generation += 1
            for block in blocks:
                del self._held[block]
                block.ref_cnt = WRITING
                block.generation = self._generation
            self._policy.on_store_miss(keys, transfer.context)
            self._policy.insert_run(keys, blocks, keys, transfer.context)
            if transfer.context.req_id not in self._uses:
                self._policy.on_request_finished(keys, transfer.context)
            self._publish(blocks, "kvtier_cpu_adopted_blocks")
        return len(keys)

    # --- the whole cache ------------------------------------------------------------------------

    def reset_cache(self) -> None:
        for transfer in self._transfers.values():
            if not transfer.is_detached:
                for block in transfer.blocks:
                    self._held[block] = self._held.get(block, 0) + 1
        super().reset_cache()
        for transfer in self._transfers.values():
            transfer.is_detached = True
        self._num_promoting = 0
        self._num_resets += 1

    def _is_used_by_device(self, block: BlockStatus) -> bool:
        if block.ref_cnt == WRITING:
            return type(block.writer) is RequestUse
        return block.ref_cnt > self._held.get(block, 0)

    def _let_go(self, blocks: Sequence[BlockStatus]) -> None:
        """A transfer from below has ended that held these slots."""
        self._generation += 1  # see `_forget`
        for block in blocks:
            self._held[block] -= 1
            if not self._held[block]:
                del self._held[block]
                if block not in self._quarantine:
                    self._release(block)

    def tier_pins(self) -> Counter[int]:
        """How many transfers from below each slot is part of. For tests and inspection."""
        return Counter(b.block_id for t in self._transfers.values() for b in t.blocks)
