"""Fleets of 8, 64 and 512 engines over real traces: when shared tiers pay, how much room they need,
what links and routers do to them, and what a dead engine costs. Replayed, not measured."""

from __future__ import annotations

import os
import sys
import time
from concurrent.futures import ProcessPoolExecutor
from dataclasses import replace
from itertools import islice
from typing import Any, NamedTuple

from kvtier.config.options import WritePolicyName
from kvtier.replay.copies import FleetLoad
from kvtier.replay.fleet import Fleet
from kvtier.replay.settings import (
    EngineSettings,
    Failure,
    FleetSettings,
    ReplaySettings,
    RouterName,
    Sharing,
    TierSettings,
)
from kvtier.replay.trace import open_trace
from tests.bench.report import print_table, run_alone, save
from tests.traces import CODING_AGENTS, CONVERSATION

GIB, GB = 1 << 30, 10**9
TRACES = {"agents": CODING_AGENTS, "conversation": CONVERSATION}
LONG = {"agents": 1500, "conversation": 6000}
"""Requests of each copy where nothing takes time: half an hour of chats, more of the agents."""
ENGINES_PER_COPY = 4
"""With one copy of the trace for four engines, these are busy but not overloaded."""
ENGINE = EngineSettings().fitted_to([(8192, 0.212), (32_768, 1.22)])
"""Llama-3-8B on one H200."""
SIZES = (8, 64, 512)
HOST_GIB, POOL_GIB = 32, 64
SETTINGS_OF_SIZES: dict[str, dict[str, Any]] = {
    "round-robin, nothing shared": {"router": RouterName.ROUND_ROBIN, "pool": 0},
    "round-robin, pool": {"router": RouterName.ROUND_ROBIN},
    "sticky, nothing shared": {"pool": 0},
    "sticky, pool": {},
    "prefix, nothing shared": {"router": RouterName.PREFIX, "pool": 0},
    "prefix, pool": {"router": RouterName.PREFIX},
    "sticky, own memory instead": {"pool": 0, "host": HOST_GIB + POOL_GIB},
}
POOLS_GIB = (0, 32, 64, 128, 256, 512)
LINKS_GB = (1.4, 3, 6, 12.5, 25, 50)
COMMON_PERCENT = (0, 5, 25, 100)
SERVER_GB = 50
"""What a server carries each way: a link of 400 Gbit per second."""
FAILURES: dict[str, dict[str, Any]] = {
    "nothing shared": {"pool": 0},
    "pool": {},
    "pool, 2 replicas": {"replicas": 2},
    "server": {"server": True},
}


class Run(NamedTuple):
    """One replay."""

    trace: str = "agents"
    engines: int = 8
    router: RouterName = RouterName.STICKY
    host: int = HOST_GIB
    """GiB of host memory of each engine."""
    pool: int = POOL_GIB
    """GiB that each engine lends; 0: nothing is shared."""
    replicas: int = 1
    server: bool = False
    """A server with as much room as the pool would have."""
    link: float = 25
    """GB per second of each engine."""
    common: float = 0
    is_timed: bool = True
    limit: int = 200
    """Requests of each copy of the trace: with the agents, 12 minutes."""
    write: WritePolicyName = WritePolicyName.THROUGH
    """Which blocks the pool gets."""
    fails: int = -1
    """The engine that dies when half of the time has passed; -1: none."""

    def settings(self) -> ReplaySettings:
        speed = 50e9
        tiers: tuple[TierSettings, ...] = ()
        if self.pool:
            tier = TierSettings(
                name="pool",
                num_bytes=self.pool * GIB,
                read_bytes_per_s=speed,
                write_bytes_per_s=speed,
                latency_s=1e-4,
                write_policy=self.write,
                sharing=Sharing.LENT,
                replicas=self.replicas,
                link_bytes_per_s=self.link * GB,
            )
            if self.server:
                tier = replace(
                    tier,
                    num_bytes=self.pool * GIB * self.engines,
                    read_bytes_per_s=SERVER_GB * GB,
                    write_bytes_per_s=SERVER_GB * GB,
                    sharing=Sharing.SERVER,
                )
            tiers = (tier,)
        return ReplaySettings(
            host=TierSettings(
                name="host",
                num_bytes=self.host * GIB,
                read_bytes_per_s=speed,
                write_bytes_per_s=speed,
            ),
            tiers=tiers,
            engine=ENGINE,
            is_timed=self.is_timed,
            fleet=FleetSettings(
                num_engines=self.engines,
                router=self.router,
                copies=self.engines // ENGINES_PER_COPY,
                common_percent=self.common,
                failures=() if self.fails < 0 else (Failure(self.fails, 50.0),),
            ),
        )

    @property
    def cost(self) -> float:
        """Roughly how long it takes, so that the longest begin first."""
        return self.engines * (10 if self.is_timed and self.pool else 1)


def replayed(run: Run) -> dict[str, Any]:
    """The figures of a run."""
    settings = run.settings()
    fleet_settings = settings.fleet
    assert fleet_settings is not None
    began = time.monotonic()
    with open_trace(str(TRACES[run.trace])) as trace:
        settings.check(trace.block_tokens)
        requests = islice(trace.requests(), run.limit)
        load = FleetLoad(requests, fleet_settings.copies, fleet_settings.common_percent)
        fleet = Fleet(settings, trace.block_tokens)
        for _ in fleet.serve(load):
            pass
        document = fleet.end().document()
    seconds = time.monotonic() - began
    document["fleet"].pop("by_engine")
    document["wall_seconds"] = round(seconds, 1)
    print(f"  {run}: {seconds:.0f} s", file=sys.stderr, flush=True)
    return document


def runs_of_tables() -> dict[str, dict[str, Run]]:
    """All runs, by table and row."""
    sizes = {
        f"{size}, {what}": Run(engines=size, **chosen)
        for size in SIZES
        for what, chosen in SETTINGS_OF_SIZES.items()
    }
    pools = {
        f"{trace}, {pool} GiB, {router}": Run(
            trace, router=router, pool=pool, is_timed=False, limit=limit
        )
        for trace, limit in LONG.items()
        for pool in POOLS_GIB
        for router in (RouterName.ROUND_ROBIN, RouterName.STICKY)
    }
    pools |= {
        f"{trace}, {pool} GiB, sticky, own memory instead": Run(
            trace, host=HOST_GIB + pool, pool=0, is_timed=False, limit=limit
        )
        for trace, limit in LONG.items()
        for pool in POOLS_GIB[1:]
    }
    pools |= {
        f"{trace}, {pool} GiB, sticky, on_evict": Run(
            trace, pool=pool, is_timed=False, limit=limit, write=WritePolicyName.ON_EVICT
        )
        for trace, limit in LONG.items()
        for pool in POOLS_GIB[2:4]
    }
    links = {
        f"{link:g} GB/s, {router}": Run(router=router, link=link)
        for link in LINKS_GB
        for router in (RouterName.ROUND_ROBIN, RouterName.STICKY)
    }
    servers = {
        f"{size}, server": Run(engines=size, router=RouterName.ROUND_ROBIN, server=True)
        for size in SIZES[:2]
    }
    common = {
        f"{percent} %, pool of {pool} GiB": Run(
            "conversation", 64, pool=pool, common=percent, is_timed=False, limit=750
        )
        for percent in COMMON_PERCENT
        for pool in (0, POOL_GIB)
    }
    failures = {
        f"{what}, {death}": Run(fails=-1 if death == "all live" else 3, **chosen)
        for what, chosen in FAILURES.items()
        for death in ("all live", "one dies")
    }
    return {
        "sizes": sizes,
        "pools": pools,
        "links": links,
        "servers": servers,
        "common": common,
        "failures": failures,
    }


def run() -> None:
    tables = runs_of_tables()
    wanted = sorted(
        {run for rows in tables.values() for run in rows.values()},
        key=lambda run: (-run.cost, run),
    )
    with ProcessPoolExecutor(os.cpu_count()) as processes:
        figures = dict(zip(wanted, processes.map(replayed, wanted), strict=True))
    for table, rows in tables.items():
        print_table(
            table,
            ["", "hits: host, shared %", "first token p50, p90 s", "MB/s per engine", "foreign %"],
            [[what, *_cells(figures[run])] for what, run in rows.items()],
        )
    save(
        "fleet",
        {
            table: {what: figures[run] for what, run in rows.items()}
            for table, rows in tables.items()
        },
    )


def _cells(document: dict[str, Any]) -> list[str]:
    fleet, timing = document["fleet"], document["timing"]
    hits = ", ".join(f"{tier['hit_percent']:.1f}" for tier in document["tiers"])
    if timing is None:
        return [hits, "", "", _foreign(fleet)]
    ttft = timing["ttft_s"]
    return [
        hits,
        f"{ttft['p50']:.2f}, {ttft['p90']:.2f}",
        f"{fleet['link_bytes_per_s_per_engine'] / 1e6:,.0f}",
        _foreign(fleet),
    ]


def _foreign(fleet: dict[str, Any]) -> str:
    read = sum(pool["read_bytes"] for pool in fleet["pools"])
    foreign = sum(pool["foreign_bytes"] for pool in fleet["pools"])
    return f"{100 * foreign / read:.0f}" if read else "-"


if __name__ == "__main__":
    run_alone(run, __doc__)
