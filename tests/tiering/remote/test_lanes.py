"""A server's client that cannot be interrupted: calls that hang cost a thread and their own slots,
and neither other blocks nor the shutdown wait for them.

The server keeps blocks in memory. Calls hang until a test lets them go on, which no real server
does on demand; the mooncake tier's own tests have real ones.
"""

from __future__ import annotations

import threading
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import ClassVar

import pytest

from kvtier.base import OffloadingSpec, OffloadKey
from kvtier.testing import TierHarness
from kvtier.tiering.base import SecondaryTierManager
from kvtier.tiering.io.queue import Piece
from kvtier.tiering.remote import lane
from kvtier.tiering.remote.errors import ServerErrors
from kvtier.tiering.remote.lane import BlockMover, RemoteTransfer
from kvtier.tiering.remote.manager import BlockServer, RemoteTierManager
from kvtier.tiering.remote.namespaces import NamespaceStorage
from tests.tiering.patience import PATIENCE_S, wait_until

MOST_STUCK = 2


class NothingDescribed(NamespaceStorage):
    def count_blocks(self, namespace: str) -> tuple[int, bool]:
        return 0, True

    def namespaces(self) -> Sequence[str]:
        return ()

    def read_description(self, namespace: str) -> bytes | None:
        return None

    def write_description(self, namespace: str, content: bytes) -> None:
        pass


class HangingServer(BlockServer):
    """Keeps blocks. A load hangs if one of its blocks is in `hanging`."""

    num_lookup_threads = 1
    most_stuck_calls = MOST_STUCK

    def __init__(self) -> None:
        self.errors = ServerErrors("nowhere://")
        self.namespaces = NothingDescribed()
        self.blocks: dict[OffloadKey, bytes] = {}
        self.hanging: set[OffloadKey] = set()
        self.goes_on = threading.Event()

    def open_mover(self, tier: SecondaryTierManager) -> BlockMover:
        return HangingMover(tier, self)

    def find(self, namespace: str, keys: Sequence[OffloadKey]) -> Iterable[bool]:
        return [key in self.blocks for key in keys]

    def touch(self, namespace: str, keys: Sequence[OffloadKey]) -> Sequence[OffloadKey]:
        return ()

    def close(self) -> None:
        pass


class HangingMover(BlockMover):
    def __init__(self, tier: SecondaryTierManager, server: HangingServer) -> None:
        self._tier, self._server = tier, server

    def load(
        self, transfer: RemoteTransfer, pieces: Sequence[Piece[OffloadKey]]
    ) -> list[Piece[OffloadKey]]:
        if not self._server.hanging.isdisjoint(key for _, key in pieces):
            slots = [self._tier.rows[row] for row, _ in pieces]
            self._server.goes_on.wait()
            for slot in slots:  # late, into its own slots
                slot[:1] = b"!"
            return []
        for row, key in pieces:
            self._tier.rows[row][:] = self._server.blocks[key]
        return list(pieces)

    def store(
        self, transfer: RemoteTransfer, pieces: Sequence[Piece[OffloadKey]]
    ) -> list[Piece[OffloadKey]]:
        for row, key in pieces:
            self._server.blocks[key] = bytes(self._tier.rows[row])
        return list(pieces)


class HangingTier(RemoteTierManager):
    metric_prefix: ClassVar[str] = "kvtier_hanging"
    server: HangingServer

    def __init__(self, spec: OffloadingSpec, view: memoryview, tier_type: str) -> None:
        self.server = HangingServer()
        super().__init__(spec, view, tier_type, self.server, {"load": 1, "store": 1})


@contextmanager
def harness() -> Iterator[TierHarness]:
    def make_tier(spec: OffloadingSpec, view: memoryview) -> SecondaryTierManager:
        return HangingTier(spec, view, "hanging")

    with TierHarness(make_tier, patience_s=PATIENCE_S) as made:
        yield made


def server_of(made: TierHarness) -> HangingServer:
    assert isinstance(made.tier, HangingTier)
    return made.tier.server


@pytest.fixture(autouse=True)
def _impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lane, "_STUCK_AFTER_S", 0.05)
    monkeypatch.setattr(lane, "_WATCH_EVERY_S", 0.01)
    monkeypatch.setattr(lane, "_JOIN_PATIENCE_S", 0.2)


def test_other_blocks_are_loaded_while_a_call_hangs() -> None:
    with harness() as one:
        server = server_of(one)
        keys = one.keys(6)
        one.wait_for(one.store(keys))
        server.hanging = set(keys[:1])
        stuck = one.load(keys[:1])
        (report,) = one.wait_for(one.load(keys[1:]))
        assert report.result.success
        assert stuck.job_id not in one.ledger.reports, "its slots may still be written"
        server.goes_on.set()
        (report,) = one.wait_for(stuck)
        assert not report.moved
        (report,) = one.wait_for(one.load(keys[1:]))
        assert report.result.success


def test_calls_that_hang_are_bounded_and_nothing_is_lost() -> None:
    with harness() as one:
        server = server_of(one)
        keys = one.keys(8)
        one.wait_for(one.store(keys))
        server.hanging = set(keys[:6])
        stuck = [one.load([key]) for key in keys[:6]]
        last = one.load(keys[6:])
        wait_until(lambda: num_lanes() == MOST_STUCK + 1, "as many lanes hang as may")
        one.step()
        assert not one.ledger.reports.keys() & {job.job_id for job in (*stuck, last)}
        server.hanging = set()
        server.goes_on.set()
        reports = one.wait_for(*stuck, last)
        assert reports[-1].result.success
        wait_until(lambda: num_lanes() == 1, "the replaced lanes end")


def num_lanes() -> int:
    """Lanes that load."""
    return sum(thread.name.startswith("kvtier-hanging-load") for thread in threading.enumerate())


def test_a_shutdown_does_not_wait_for_a_call_that_hangs() -> None:
    one = TierHarness(lambda spec, view: HangingTier(spec, view, "hanging"), patience_s=PATIENCE_S)
    server = server_of(one)
    keys = one.keys(2)
    one.wait_for(one.store(keys))
    server.hanging = set(keys)
    job = one.load(keys)
    wait_until(lambda: num_lanes() >= 2, "the lane is replaced")
    drained = threading.Thread(target=one.tier.drain_jobs)
    drained.start()
    try:
        one.tier.shutdown()
        drained.join(PATIENCE_S)
        assert not drained.is_alive()
        assert job.job_id not in [result.job_id for result in one.tier.get_finished_jobs()]
    finally:
        server.goes_on.set()
    wait_until(lambda: num_lanes() == 0, "the call has ended, and its thread with it")


def test_a_lane_is_replaced_when_there_are_threads_again(monkeypatch: pytest.MonkeyPatch) -> None:
    refusals: list[str] = []
    start = threading.Thread.start

    def refusing(thread: threading.Thread) -> None:
        if thread.name.startswith("kvtier-hanging-load") and len(refusals) < 3:
            refusals.append(thread.name)
            raise RuntimeError("can't start new thread")
        start(thread)

    with harness() as one:
        server = server_of(one)
        keys = one.keys(2)
        one.wait_for(one.store(keys))
        server.hanging = set(keys[:1])
        monkeypatch.setattr(threading.Thread, "start", refusing)
        stuck = one.load(keys[:1])
        (report,) = one.wait_for(one.load(keys[1:]))
        assert report.result.success
        assert len(refusals) == 3
        server.goes_on.set()
        one.wait_for(stuck)
