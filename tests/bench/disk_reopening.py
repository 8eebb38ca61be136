"""A process that opens a slab, fills it, and may be killed. See `tests.bench.disk_restart`.

It reads one JSON command per line on standard input and writes one JSON answer per line:
`{"open": slab}`, `{"fill": number of blocks}`, `{"count": number of blocks}`, `{"close": 0}`.
"""

from __future__ import annotations

import json
import sys
import time
from typing import Any

from kvtier.base import LookupResult, ReqContext
from kvtier.cpu.shared_offload_region import SharedOffloadRegion
from tests.bench.disk_subjects import Case
from tests.bench.disk_traffic import Load, hash_of
from tests.bench.kvtier_disk_subjects import make_disk_subject

JOB_BLOCKS = 2048
JOBS_AT_ONCE = 8


class Session:
    """One slab, opened once."""

    def open(self, described: dict[str, Any]) -> dict[str, float]:
        """How long the tier took until it could be used, in wall time and in processor time."""
        case = Case(job_blocks=JOB_BLOCKS, jobs_at_once=JOBS_AT_ONCE, **described)
        num_rows = JOB_BLOCKS * JOBS_AT_ONCE
        self._region = SharedOffloadRegion(
            case.region, num_rows, None, case.block_bytes, case.block_bytes
        )
        view = self._region.create_kv_memoryview()
        started, cpu = time.perf_counter(), time.process_time()
        self._subject = make_disk_subject(case, view)
        return {
            "seconds": time.perf_counter() - started,
            "processor_s": time.process_time() - cpu,
        }

    def fill(self, num_blocks: int) -> int:
        """Store `num_blocks` blocks, wait until the tier has reported them all, and count them."""
        load = Load(self._subject, JOB_BLOCKS * JOBS_AT_ONCE)
        sizes = [JOB_BLOCKS] * (num_blocks // JOB_BLOCKS)
        sizes += [num_blocks % JOB_BLOCKS] if num_blocks % JOB_BLOCKS else []
        return load.run((load.new_keys(size) for size in sizes), False, JOBS_AT_ONCE)

    def count(self, num_blocks: int) -> int:
        """How many of the first `num_blocks` blocks are there."""
        context = ReqContext("count")
        look_up, make_key = self._subject.tier.lookup, self._subject.make_key
        return sum(
            look_up(make_key(hash_of(number), 0), context) is LookupResult.HIT
            for number in range(num_blocks)
        )

    def close(self, _: object = None) -> None:
        self._subject.tier.drain_jobs()
        self._subject.tier.shutdown()
        self._region.cleanup()


def main() -> None:
    session = Session()
    for line in sys.stdin:
        ((command, argument),) = json.loads(line).items()
        print(json.dumps(getattr(session, command)(argument)), flush=True)


if __name__ == "__main__":
    main()
