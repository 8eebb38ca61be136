"""The options and exit codes of `kvtier replay`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Annotated

import typer

__all__ = ["HELP", "TIER_HELP", "end_with", "replay"]

TIER_HELP = (
    "A tier below host memory; may be given several times, in the order in which they are asked. "
    "Keys: read_speed and write_speed (bytes per second: 6GB, 4GB), latency of each job (0.1ms), "
    "policy of eviction (lru), write (which blocks it gets: through, second_use, on_evict or "
    "adaptive), write_budget (bytes per day: no limit). With --engines, also shared: lent (each "
    "engine lends SIZE of its memory to all) or server (SIZE in all); replicas of each block in "
    "lent memory (1); link_speed of each engine, each way (25GB)."
)

HELP = """
Replay a request trace: which tiers and sizes pay off, before you buy or configure them.

The requests of TRACE go through kvtier's own managers, without a GPU and without any KV cache: only
keys are kept. The result shows the hits of each tier, the bytes it would write and read, and, by a
cost model in virtual time, the time to first token and the throughput.

\b
    kvtier replay trace.jsonl --host 64GiB
    kvtier replay trace.jsonl.xz --host 64GiB --tier disk:2TiB
    kvtier replay trace.jsonl --tier disk:2TiB,read_speed=12GB --tier nas:20TiB,read_speed=1GB
    kvtier replay trace.jsonl --tier disk:2TiB,write=adaptive,write_budget=4TiB
    kvtier replay trace.npz --host 512GiB --policy arc --no-timing
    kvtier replay trace.jsonl --gpu 80GiB --prefill-times 8192:212ms,32768:1.22s
    kvtier replay trace.jsonl --host 64GiB --speed-up 2 --limit 5000 --json | jq .timing.ttft_s
    kvtier replay --calibrate /mnt/nvme

A fleet: 8 engines serve 8 copies of the trace and lend each other 64 GiB each; then engine 3 dies
when 40 % of the time have passed. docs/fleet.md says when sharing pays.

\b
    kvtier replay trace.jsonl --engines 8 --copies 8 --tier pool:64GiB,shared=lent
    kvtier replay trace.jsonl --engines 8 --copies 8 --tier pool:64GiB,shared=lent,replicas=2 \\
        --fail 3@40%
    kvtier replay trace.jsonl --engines 8 --copies 8 --common 5 --router prefix \\
        --tier nas:20TiB,shared=server,read_speed=12GB,write_speed=12GB,link_speed=3GB

TRACE is a JSONL file in Mooncake's form (one request in each line: timestamp in ms, input_length,
output_length, hash_ids with one id for each block of 512 tokens), or an npz archive; .xz is fine.

The defaults are the shape of Llama-3-8B on one H200. Your model's prefill speed cannot be measured
without the model: send your idle engine a short and a long prompt, and give --prefill-times.
--kv-bytes-per-token is 2 x layers x KV heads x head size x bytes per number.

Exit code 0: done; 2: wrong input, or the result could not be written; 130: ended by Ctrl-C, and the
figures until then are printed; 141: the reader of standard output has gone.
docs/replay.md says more.
"""


def replay(
    trace: Annotated[
        str | None,
        typer.Argument(metavar="TRACE", help="The trace to replay.", show_default=False),
    ] = None,
    host: Annotated[str, typer.Option(metavar="SIZE", help="Size of host memory.")] = "64GiB",
    tier: Annotated[
        list[str] | None,
        typer.Option(
            metavar="NAME:SIZE[,KEY=VALUE...]",
            help=TIER_HELP,
        ),
    ] = None,
    policy: Annotated[
        str,
        typer.Option(metavar="NAME", help="Eviction policy of host memory: lru, arc, density, ..."),
    ] = "lru",
    kv_bytes_per_token: Annotated[
        str, typer.Option(metavar="SIZE", help="KV cache of one token, all layers and ranks.")
    ] = "128KiB",
    block_tokens: Annotated[
        int | None,
        typer.Option(
            metavar="N", help="Tokens per block of the trace. Default: 512, or what an npz says."
        ),
    ] = None,
    timing: Annotated[
        bool,
        typer.Option(
            "--timing/--no-timing",
            help="With --no-timing, only hits and bytes are counted: requests run one after the "
            "other, and no transfer takes time.",
        ),
    ] = True,
    gpu: Annotated[
        str | None,
        typer.Option(
            metavar="SIZE",
            help="KV cache on the GPU, in which the engine keeps blocks of earlier prompts. What "
            "it holds is not asked of tiers. Default: nothing stays there.",
        ),
    ] = None,
    prefill: Annotated[
        float | None,
        typer.Option(
            metavar="N",
            help="Prompt tokens that the engine computes per second, at any position. Default: "
            "26000.",
        ),
    ] = None,
    prefill_times: Annotated[
        str | None,
        typer.Option(
            metavar="TOKENS:TIME[,TOKENS:TIME]",
            help="Instead of --prefill: measured times to first token of one or two prompts, such "
            "as 8192:212ms,32768:1.22s. From two, the cost of attention follows: tokens deep in a "
            "prompt take longer.",
        ),
    ] = None,
    decode_step: Annotated[
        str, typer.Option(metavar="TIME", help="What an engine step takes besides prompt tokens.")
    ] = "10ms",
    step_tokens: Annotated[
        int, typer.Option(metavar="N", help="The most prompt tokens computed in one step.")
    ] = 8192,
    running: Annotated[
        int, typer.Option(metavar="N", help="The most requests that run at the same time.")
    ] = 64,
    host_speed: Annotated[
        str | None,
        typer.Option(
            metavar="SIZE",
            help="Bytes per second between GPU and host memory, each way. Default: 50GB.",
        ),
    ] = None,
    speed_up: Annotated[
        float, typer.Option(metavar="X", help="Requests arrive X times as fast as in the trace.")
    ] = 1.0,
    limit: Annotated[
        int | None, typer.Option(metavar="N", help="Replay only the first N requests.")
    ] = None,
    engines: Annotated[
        int | None,
        typer.Option(
            metavar="N",
            help="Engines that serve the load together. --host, --gpu and tiers that are not "
            "shared are for each of them.",
            show_default=False,
        ),
    ] = None,
    router: Annotated[
        str | None,
        typer.Option(
            metavar="NAME",
            help="Who gets a request: round-robin (the engines in turn), sticky (the engine that "
            "has had the conversation) or prefix (the engine whose host memory has most of the "
            "prompt, unless another is done sooner). Default: sticky.",
        ),
    ] = None,
    copies: Annotated[
        int | None,
        typer.Option(
            metavar="N",
            help="The load of the fleet: N copies of the trace at the same time. Default: 1.",
            show_default=False,
        ),
    ] = None,
    common: Annotated[
        float | None,
        typer.Option(
            metavar="PERCENT",
            help="Conversations that are the same in all copies, with what others share with them. "
            "Default: 0: the copies have no block in common.",
            show_default=False,
        ),
    ] = None,
    fail: Annotated[
        list[str] | None,
        typer.Option(
            metavar="ENGINE@PERCENT",
            help="An engine dies when this share of the time has passed, with its GPU, its host "
            "memory, its own tiers and the memory that it lends. Others take over its requests. "
            "May be given several times; engines have numbers from 0.",
        ),
    ] = None,
    restart_after: Annotated[
        str | None,
        typer.Option(
            metavar="TIME",
            help="From an engine's death to the moment when it serves again, with empty caches. "
            "Default: 60s.",
        ),
    ] = None,
    calibrate: Annotated[
        str | None,
        typer.Option(
            metavar="DIR",
            help="Measure host copies and the disk of this directory for some seconds, and use the "
            "figures where no speed is given. Without TRACE: print them.",
        ),
    ] = None,
    json: Annotated[
        bool, typer.Option("--json", help="Print one JSON document on standard output.")
    ] = False,
) -> None:
    def work() -> int:
        from kvtier.cli.replay.command import Wishes, run_replay
        from kvtier.cli.replay.options import FleetWishes

        wishes = Wishes(
            trace=trace,
            host=host,
            tiers=tier or [],
            policy=policy,
            kv_bytes_per_token=kv_bytes_per_token,
            block_tokens=block_tokens,
            is_timed=timing,
            gpu=gpu,
            prefill=prefill,
            prefill_times=prefill_times,
            decode_step=decode_step,
            step_tokens=step_tokens,
            running=running,
            host_speed=host_speed,
            speed_up=speed_up,
            limit=limit,
            calibrate=calibrate,
            fleet=FleetWishes(engines, router, copies, common, fail or [], restart_after),
        )
        return run_replay(wishes, as_json=json)

    end_with("replay", work)


def end_with(command: str, work: Callable[[], int]) -> None:
    """Run the work of a command, and exit with its code. Prints one sentence for an error. Used by
    several commands."""
    # Imported here and in `work`, because numpy takes time and `kvtier --help` does not need it.
    from kvtier.cli.doctor.source import WrongSource
    from kvtier.cli.output import run_to_exit_code
    from kvtier.config import ConfigError
    from kvtier.replay.calibration import NotMeasured
    from kvtier.replay.plan import ModelError
    from kvtier.replay.settings import SettingError
    from kvtier.replay.trace import TraceError

    problems = TraceError, ModelError, NotMeasured, WrongSource, ConfigError
    try:
        code = run_to_exit_code(command, work, problems)
    except SettingError as wrong:
        raise typer.BadParameter(str(wrong), param_hint=wrong.option) from None
    raise typer.Exit(code)
