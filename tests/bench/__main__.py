"""Runs all benchmarks, or those named. Prints tables and verdicts, and saves JSON in
build/bench."""

from __future__ import annotations

import argparse
import time

from tests.arguments import one_of
from tests.bench import (
    disk_jitter,
    disk_restart,
    disk_speed,
    event_cost,
    fleet,
    fs_jitter,
    fs_lookups,
    fs_speed,
    gpu_copy,
    gpu_threads,
    gpu_ttft,
    hit_ratios,
    host_copy,
    mooncake_speed,
    obj_speed,
    replay_speed,
    scale,
    scheduler_cost,
    seal_cost,
    serve_load,
    tenant_cost,
    tiering_cost,
    tiering_scale,
    valkey_speed,
    vllm_step,
    vllm_ttft,
    write_policies,
)
from tests.bench.report import missed, unmeasured, verdict_of_all

BENCHMARKS = {
    "event_cost": (event_cost.run, "events, on the scheduler's and on the disk tier's thread"),
    "seal_cost": (seal_cost.run, "sealing and verifying, beside bare digests and copies"),
    "scheduler_cost": (scheduler_cost.run, "cost per block on the scheduler, beside vLLM's own"),
    "scale": (scale.run, "the same with up to a million blocks, and memory per block"),
    "host_copy": (host_copy.run, "the host worker's copies, beside bare memory copies"),
    "tiering_cost": (tiering_cost.run, "scheduler_cost with tiers below (two minutes)"),
    "tenant_cost": (tenant_cost.run, "tiering_cost with a hundred tenants, and without"),
    "tiering_scale": (tiering_scale.run, "the same with many blocks, and after many requests"),
    "disk_speed": (disk_speed.run, "the disk tier beside fio and vLLM's fs tier (five minutes)"),
    "disk_jitter": (disk_jitter.run, "how late the scheduler is while the disk tier works"),
    "disk_restart": (disk_restart.run, "how long the disk tier takes to start (two minutes)"),
    "fs_speed": (fs_speed.run, "the fs tier beside fio and vLLM's (five minutes)"),
    "fs_jitter": (fs_jitter.run, "how late the scheduler is while the fs tier works"),
    "fs_lookups": (fs_lookups.run, "how long the fs tier takes to answer lookups"),
    "valkey_speed": (valkey_speed.run, "the valkey tier beside other clients (two minutes)"),
    "obj_speed": (obj_speed.run, "the obj tier beside plain clients (two minutes)"),
    "mooncake_speed": (mooncake_speed.run, "the mooncake tier beside bare calls (three minutes)"),
    "vllm_step": (vllm_step.run, "time in the manager per step of vLLM (three minutes)"),
    "vllm_ttft": (vllm_ttft.run, "time to first token in vLLM, by where the prompt is"),
    "gpu_copy": (gpu_copy.run, "the CUDA worker beside a plain copy, and a model beside it"),
    "gpu_threads": (gpu_threads.run, "how many threads a copying kernel should have (two minutes)"),
    "gpu_ttft": (gpu_ttft.run, "time to first token in vLLM on a GPU (ten to fifteen minutes)"),
    "serve_load": (serve_load.run, "many requests at once in vLLM on a GPU (ten minutes)"),
    "replay_speed": (replay_speed.run, "kvtier replay, beside a bare loop over a dictionary"),
    "fleet": (fleet.run, "fleets of 8, 64 and 512 engines over real traces (half an hour)"),
    "hit_ratios": (hit_ratios.run, "hits of each policy over real traces (some minutes)"),
    "write_policies": (write_policies.run, "hits and writes of each write policy (ten minutes)"),
}


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m tests.bench",
        description=__doc__,
        epilog="benchmarks: "
        + "; ".join(f"{name}: {text}" for name, (_, text) in BENCHMARKS.items()),
    )
    parser.add_argument(
        "names",
        nargs="*",
        type=one_of("benchmark", BENCHMARKS),
        metavar="benchmark",
        help="all, if none is named",
    )
    asked_for = parser.parse_args().names
    for name in asked_for or BENCHMARKS:
        start = time.monotonic()
        BENCHMARKS[name][0]()
        print(f"  ({name} took {time.monotonic() - start:.0f} s)")
    # A run of all benchmarks may skip those that need special hardware.
    if missed or (unmeasured and asked_for):
        raise SystemExit(verdict_of_all())


if __name__ == "__main__":
    main()
