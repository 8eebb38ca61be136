"""A tier whose load fails by the library's own time limit, because a host stands still that goes on
afterwards. Prints what has become of the slots.

    python -m tests.tiering.mooncake.late_host MASTER METADATA PID GUARD

PID: the process of the host that lends all memory. GUARD: "guarded", or "unguarded" for a tier that
does not replace its client.
"""

from __future__ import annotations

import os
import signal
import sys
import time

from kvtier.base import OffloadingSpec
from kvtier.testing import TierHarness
from kvtier.tiering.base import SecondaryTierManager
from kvtier.tiering.mooncake.manager import MooncakeSecondaryTierManager
from kvtier.tiering.mooncake.pool import Pool

_LATE_FOR_S = 5.0


def main() -> None:
    master, metadata, pid, guard = sys.argv[1:]
    # The library's limits of one transfer, which would end it in time.
    os.environ["MC_TCP_STATUS_TIMEOUT_SEC"] = os.environ["MC_TCP_PROGRESS_TIMEOUT_SEC"] = "600"
    if guard == "unguarded":
        Pool.replace_if_in_doubt = lambda *_: None  # type: ignore[method-assign]

    def make_tier(spec: OffloadingSpec, view: memoryview) -> SecondaryTierManager:
        return MooncakeSecondaryTierManager(
            spec, view, "mooncake", master=master, metadata=metadata, connections=1
        )

    with TierHarness(make_tier, row_bytes=1 << 16, num_slots=64, patience_s=150) as harness:
        keys = harness.keys(64)
        assert harness.wait_for(harness.store(keys))[0].result.success
        assert harness.wait_for(harness.load(keys))[0].result.success
        os.kill(int(pid), signal.SIGSTOP)
        began = time.monotonic()
        try:
            (report,) = harness.wait_for(harness.load(keys))
            assert not report.moved
            assert time.monotonic() - began > 50, "it was not the library's limit"
        finally:
            os.kill(int(pid), signal.SIGCONT)
        end = time.monotonic() + _LATE_FOR_S
        while time.monotonic() < end and not harness.slots.touched():
            harness.step()
            time.sleep(0.05)
        print("touched" if harness.slots.touched() else "untouched", flush=True)
        os._exit(0)


if __name__ == "__main__":
    main()
