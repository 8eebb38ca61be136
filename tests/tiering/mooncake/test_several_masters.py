"""Two masters and etcd: one takes over from the other, and knows its blocks."""

from __future__ import annotations

import json
import re
import shutil
import urllib.request
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import pytest

from kvtier.base import OffloadingSpec, OffloadKey
from kvtier.testing import TierHarness
from kvtier.tiering.base import TransferJob
from kvtier.tiering.mooncake.manager import MooncakeSecondaryTierManager
from tests.tiering.mooncake.harness import SEGMENT_BYTES
from tests.tiering.mooncake.pool import Master
from tests.tiering.networks import Namespace
from tests.tiering.patience import PATIENCE_S, wait_until
from tests.tiering.processes import ServerProcess, free_port


class Etcd(ServerProcess):
    """One etcd server. It can be started again with what it knew."""

    def __init__(self, directory: Path) -> None:
        super().__init__(directory)
        self.address = f"127.0.0.1:{free_port()}"
        self._peer_url = f"http://127.0.0.1:{free_port()}"
        self.start()

    def command(self) -> list[str]:
        program = shutil.which("etcd")
        if program is None:
            pytest.skip("needs etcd (Debian: etcd-server)")
        url = f"http://{self.address}"
        return [
            *(program, "--data-dir", str(self.directory / "data")),
            *("--listen-client-urls", url, "--advertise-client-urls", url),
            *("--listen-peer-urls", self._peer_url),
        ]

    def is_ready(self) -> bool:
        try:
            with urllib.request.urlopen(f"http://{self.address}/health", timeout=10) as answer:
                return bool(json.loads(answer.read())["health"] == "true")
        except OSError:
            return False


class StandbyMaster(Master):
    """One of several masters: it runs when it has taken part in the election."""

    def is_ready(self) -> bool:
        try:
            return bool(json.loads(self.ask("/health"))["ha_state"] in {"serving", "standby"})
        except OSError:
            return False

    @property
    def leads(self) -> bool:
        try:
            return bool(json.loads(self.ask("/health"))["service_ready"])
        except OSError:
            return False

    def num_applied(self) -> int:
        """Entries of the leader's log that this one knows."""
        found = re.search(r"(?m)^ha_oplog_applied_entries_total (\d+)", self.ask("/metrics"))
        return int(found[1]) if found else 0


@contextmanager
def two_masters(directory: Path, place: Namespace) -> Iterator[tuple[Etcd, list[StandbyMaster]]]:
    with ExitStack() as stack:
        etcd = Etcd(directory / "etcd")
        stack.callback(etcd.kill)
        flags = (
            "-enable_ha=true",
            "-enable_oplog=true",
            "-ha_backend_type=etcd",
            f"-ha_backend_connstring={etcd.address}",
        )
        masters = []
        for number in range(2):
            masters.append(StandbyMaster(directory / f"master-{number}", place, *flags))
            stack.callback(masters[-1].kill)
        yield etcd, masters


def engine_of(etcd: Etcd) -> TierHarness:
    def make_tier(spec: OffloadingSpec, view: memoryview) -> MooncakeSecondaryTierManager:
        keys = {"master": f"etcd://{etcd.address}", "hostname": "127.0.0.1"}
        return MooncakeSecondaryTierManager(
            spec, view, "mooncake", segment_bytes=SEGMENT_BYTES, **keys
        )

    # The client's close alone takes half a minute.
    return TierHarness(make_tier, patience_s=3 * PATIENCE_S)


def moved(engine: TierHarness, job: TransferJob) -> set[OffloadKey]:
    (report,) = engine.wait_for(job)
    return report.moved


# One test: a process can only ever have clients of one etcd. It takes half a minute.
@pytest.mark.soak
def test_masters_take_over_from_each_other_and_etcd_may_fail(
    tmp_path: Path, network: Namespace
) -> None:
    with two_masters(tmp_path, network) as (etcd, masters), ExitStack() as stack:
        wait_until(lambda: any(master.leads for master in masters), "there is a leader")
        leader, other = sorted(masters, key=lambda master: not master.leads)
        engine = stack.enter_context(engine_of(etcd))
        early, late = set(engine.keys(4)), set(engine.keys(4, start=100))
        assert moved(engine, engine.store(list(early))) == early
        # A leader answers before etcd has the entry, so what it stored last is lost with it.
        # Entries are applied in order, and fewer than 16 are under way before the blocks below.
        applied = other.num_applied()
        engine.wait_for(engine.store(engine.keys(16, start=1000)))
        wait_until(lambda: other.num_applied() >= applied + 16, "the other knows the blocks")

        leader.kill()
        wait_until(lambda: other.leads, "the other leads")
        wait_until(lambda: moved(engine, engine.store(list(late))) == late, "the pool stores again")
        assert moved(engine, engine.load([*early, *late])) == early | late
        leader.start()
        assert not leader.leads

        etcd.kill()
        wait_until(lambda: not any(master.leads for master in masters), "the leader steps down")
        wait_until(lambda: not moved(engine, engine.load(list(early))), "no master answers")
        etcd.start()
        wait_until(lambda: any(master.leads for master in masters), "there is a leader again")
        wait_until(
            lambda: moved(engine, engine.load([*early, *late])) == early | late,
            "the blocks can be loaded again",
        )
