"""Speed of the mooncake tier, beside the client's own batch calls, and LMCache's backend if
KVTIER_LMCACHE_PYTHON names a Python that has LMCache. The pool runs here, in a network of its own.
"""

from __future__ import annotations

import json
import os
import sys
from contextlib import ExitStack
from dataclasses import asdict, replace
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory
from typing import Any

from tests.bench.disk_rounds import KVTIER, KiB, MiB, with_spread
from tests.bench.disk_subjects import LMCACHE, MOONCAKE, RAW_MOONCAKE, RAW_PARTS, Case
from tests.bench.mooncake_lookups import ROUNDS
from tests.bench.mooncake_subjects import CONNECTIONS
from tests.bench.report import print_table, run_alone, save, verdict
from tests.bench.server_speed import JOB_BYTES, Comparison, compare
from tests.bench.worker import worker
from tests.tiering.mooncake.pool import Master, mooncake_master, segment
from tests.tiering.networks import Namespace, private_network

BARE, IN_PARTS, THEIRS = "bare calls", "bare, in parts", "LMCache"
TIER_BYTES = 128 * MiB
MOST_STORED = 512 * MiB
SEGMENT_BYTES = 1408 * MiB
"""Enough for twice what is stored in one round, besides the tier, without evicting."""
SHARED_BYTES = 3 << 30
"""The same for all that is compared, one block size after the other."""
LEASE = "-default_kv_lease_ttl=10000"
"""The master's own default."""
NUM_KEYS = 2048
MAX_LOOKUPS = 1.5
MAX_ON_THREAD_S = 1e-6


def run() -> None:
    with private_network() as network, TemporaryDirectory() as directory:
        os.environ["MC_TCP_BIND_ADDRESS"] = "127.0.0.1"
        for name, lends_itself in (("own segment", True), ("another process, TCP", False)):
            with ExitStack() as stack:
                place = Path(directory) / name.split()[0]
                master = stack.enter_context(mooncake_master(place, network, LEASE))
                if not lends_itself:
                    stack.enter_context(segment(master, SHARED_BYTES, network))
                _compare(name, _keys(master, SEGMENT_BYTES if lends_itself else 0))
        _lookups(network, Path(directory))


def _keys(master: Master, segment_bytes: int) -> dict[str, Any]:
    return {
        "master": master.address,
        "metadata": master.metadata_url,
        "segment_bytes": segment_bytes,
        "connections": CONNECTIONS,
    }


def _compare(where: str, keys: dict[str, Any]) -> None:
    subjects = {KVTIER: MOONCAKE, BARE: RAW_MOONCAKE, IN_PARTS: RAW_PARTS}
    theirs = os.environ.get("KVTIER_LMCACHE_PYTHON")
    if theirs is not None:
        subjects[THEIRS] = LMCACHE
    compare(
        Comparison(
            f"mooncake_speed_{where.split(maxsplit=1)[0]}",
            subjects,
            limit=BARE,
            least=0.9,
            tier_bytes=TIER_BYTES,
            stores_are_judged=True,
            about=f"Blocks in the memory of: {where}. {CONNECTIONS} threads that load, "
            f"{CONNECTIONS} that store. `{IN_PARTS}`: with 256 bytes beside each block, as kvtier.",
            most_stored=MOST_STORED,
            pythons={THEIRS: theirs or sys.executable},
            rounds=ROUNDS,
            looks_up=False,
        ),
        keys,
    )


def _lookups(network: Namespace, directory: Path) -> None:
    """Beside a bare call, and what the scheduler's thread pays for each block."""
    case = Case(
        directory="",
        region=f"bench-{os.getpid()}",
        block_bytes=64 * KiB,
        num_blocks=NUM_KEYS,
        job_blocks=JOB_BYTES // (64 * KiB),
        jobs_at_once=1,
    )
    with (
        mooncake_master(directory / "lookups", network, LEASE) as master,
        segment(master, 4 * NUM_KEYS * 64 * KiB, network),
        worker(sys.executable, "tests.bench.mooncake_lookups", MOONCAKE) as tier,
    ):
        tier.ask({"begin": asdict(replace(case, server=json.dumps(_keys(master, 0))))})
        rounds = [tier.ask({"round": number}) for number in range(ROUNDS + 1)][1:]
        tier.ask({"end": 0})
    ratios = [each["lookups"]["tier"] / each["lookups"]["bare"] for each in rounds]
    bare, ours = (median(each["lookups"][name] for each in rounds) for name in ("bare", "tier"))
    print_table(
        f"Lookups of {NUM_KEYS:,} blocks that are there",
        ["", "ms", "ratio"],
        [
            ["one bare batch_is_exist", f"{1e3 * bare:.2f}", ""],
            ["kvtier, until answered", f"{1e3 * ours:.2f}", with_spread(ratios)],
        ],
    )
    print("  " + verdict("lookups, kvtier/bare call", median(ratios), MAX_LOOKUPS))
    phases = {
        phase: median(each["on_thread"][phase] for each in rounds)
        for phase in rounds[0]["on_thread"]
    }
    print_table(
        "Processor time of the scheduler's thread, blocks of 64 KiB",
        ["", "ns per block"],
        [[phase, f"{1e9 * seconds:.0f}"] for phase, seconds in phases.items()],
    )
    for what in ("lookup", "load", "store"):
        seconds = sum(s for phase, s in phases.items() if phase.startswith(what))
        print("  " + verdict(f"scheduler's thread, {what}, s per block", seconds, MAX_ON_THREAD_S))
    save("mooncake_lookups", {"rounds": rounds, "ratios": ratios, "on_thread_s": phases})


if __name__ == "__main__":
    run_alone(run, __doc__)
