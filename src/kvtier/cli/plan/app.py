"""The options of `kvtier plan`."""

from __future__ import annotations

from typing import Annotated

import typer

from kvtier.cli.replay.app import TIER_HELP, end_with

__all__ = ["HELP", "plan"]

HELP = """
Plan the sizes of tiers for a model: how many tokens and conversations each holds, and whether
loading them beats computing them.

\b
    kvtier plan Llama-3-8B/config.json --host 64GiB --tier disk:2TiB,read_speed=6GB
    kvtier plan config.json --host 64GiB --kv-dtype fp8 --conversation 32768 --prefill 26000
    kvtier plan config.json --host 64GiB --tier disk:1TiB --trace trace.jsonl.xz --svg curves.svg
    kvtier plan config.json --host 64GiB --trace trace.jsonl.xz --policy all
    kvtier plan config.json --tier disk:1TiB --trace trace.jsonl.xz --target-hits 50 \\
        --cost-per-gb host=4 --cost-per-gb disk=0.10 --ssd-tbw disk=1200TB
    kvtier plan --kv-bytes-per-token 128KiB --host 64GiB --json | jq .tiers
    kvtier plan --engine

MODEL is a model's config.json, as Hugging Face has it. A conversation is a prompt of --conversation
tokens. "computes below" is the break-even: loading from the tier is faster if your engine computes
fewer prompt tokens per second than that. With --prefill, the table also says by how much.

With --engine alone, it shows what the engines that run here estimate from their own requests: the
hit ratio with other sizes of their tiers.

With --trace, the requests of the trace are replayed with an eighth to eight times of the size of
host memory, and of each tier; a table and a picture show the hits at each size. With a target or
prices, the cheapest combination of these sizes that reaches the target is recommended. Each replay
needs some seconds; --limit N makes it quicker.

Exit code 0: done; 2: wrong input, or the result could not be written; 130: ended by Ctrl-C; 141:
the reader of standard output has gone.
docs/replay.md says more.
"""


def plan(
    model: Annotated[
        str | None,
        typer.Argument(metavar="MODEL", help="The model's config.json.", show_default=False),
    ] = None,
    host: Annotated[str, typer.Option(metavar="SIZE", help="Size of host memory.")] = "64GiB",
    host_speed: Annotated[
        str, typer.Option(metavar="SIZE", help="Bytes per second from host memory to the GPU.")
    ] = "50GB",
    tier: Annotated[
        list[str] | None,
        typer.Option(
            metavar="NAME:SIZE[,KEY=VALUE...]",
            help=TIER_HELP,
        ),
    ] = None,
    conversation: Annotated[
        int, typer.Option(metavar="N", help="Tokens of one conversation.")
    ] = 8192,
    kv_dtype: Annotated[
        str | None,
        typer.Option(
            metavar="TYPE",
            help="Type of the numbers in the KV cache: float32, bfloat16, float16, fp8. Default: "
            "the model's.",
        ),
    ] = None,
    kv_bytes_per_token: Annotated[
        str | None,
        typer.Option(metavar="SIZE", help="Instead of MODEL: KV cache of one token."),
    ] = None,
    prefill: Annotated[
        float | None,
        typer.Option(metavar="N", help="Prompt tokens that your engine computes per second."),
    ] = None,
    prefill_times: Annotated[
        str | None,
        typer.Option(
            metavar="TOKENS:TIME[,TOKENS:TIME]",
            help="Instead of --prefill: measured times to first token of one or two prompts, as in "
            "kvtier replay.",
        ),
    ] = None,
    trace: Annotated[
        str | None,
        typer.Option(metavar="FILE", help="Replay this trace with several sizes of each tier."),
    ] = None,
    block_tokens: Annotated[
        int | None,
        typer.Option(
            metavar="N", help="Tokens per block of the trace. Default: 512, or what an npz says."
        ),
    ] = None,
    policy: Annotated[
        str,
        typer.Option(
            metavar="NAME",
            help="Eviction policy of host memory: lru, arc, density, ...; all: compare them.",
        ),
    ] = "lru",
    gpu: Annotated[
        str | None,
        typer.Option(
            metavar="SIZE", help="With --trace: KV cache on the GPU, as in kvtier replay."
        ),
    ] = None,
    speed_up: Annotated[
        float | None,
        typer.Option(
            metavar="X", help="With --trace: requests arrive X times as fast. Default: 1."
        ),
    ] = None,
    target_hits: Annotated[
        float | None,
        typer.Option(
            metavar="PERCENT",
            help="With --trace: recommend the cheapest sizes with at least these hits.",
        ),
    ] = None,
    target_ttft: Annotated[
        str | None,
        typer.Option(
            metavar="TIME",
            help="With --trace: recommend the cheapest sizes with which nine of ten requests have "
            "their first token within this time, such as 800ms. Replays take several times as "
            "long, because they simulate time.",
        ),
    ] = None,
    cost_per_gb: Annotated[
        list[str] | None,
        typer.Option(
            metavar="NAME=PRICE",
            help="With --trace: what 1,000,000,000 bytes of a tier cost, in any currency: "
            "host=4, disk=0.10. Give it for each tier. Without a target, the cheapest sizes with "
            "95 % of the most hits are recommended.",
        ),
    ] = None,
    ssd_tbw: Annotated[
        list[str] | None,
        typer.Option(
            metavar="NAME=SIZE",
            help="With --trace: the bytes that may be written to a tier's drive in its life, from "
            "its data sheet: disk=600TB. The result says how many years that takes.",
        ),
    ] = None,
    svg: Annotated[
        str | None,
        typer.Option(metavar="FILE", help="With --trace: write the curves as a picture."),
    ] = None,
    png: Annotated[
        str | None,
        typer.Option(metavar="FILE", help="The same as PNG; needs the extra pictures."),
    ] = None,
    limit: Annotated[
        int | None, typer.Option(metavar="N", help="Replay only the first N requests.")
    ] = None,
    engine: Annotated[
        bool,
        typer.Option(
            "--engine", help="Show the estimates of the engines of this user that run here."
        ),
    ] = False,
    json: Annotated[
        bool, typer.Option("--json", help="Print one JSON document on standard output.")
    ] = False,
) -> None:
    def work() -> int:
        from kvtier.cli.plan.command import PlanWishes, run_engines, run_plan

        if engine and (model or trace or kv_bytes_per_token):
            raise typer.BadParameter(
                "give it alone, or with --json: a running engine knows its model and its requests",
                param_hint="--engine",
            )
        if engine:
            return run_engines(as_json=json)
        wishes = PlanWishes(
            model=model,
            host=host,
            host_speed=host_speed,
            tiers=tier or [],
            conversation=conversation,
            kv_dtype=kv_dtype,
            kv_bytes_per_token=kv_bytes_per_token,
            prefill=prefill,
            prefill_times=prefill_times,
            trace=trace,
            block_tokens=block_tokens,
            gpu=gpu,
            speed_up=speed_up,
            policy=policy,
            limit=limit,
            target_hits=target_hits,
            target_ttft=target_ttft,
            costs_per_gb=cost_per_gb or [],
            ssd_tbw=ssd_tbw or [],
            svg=svg,
            png=png,
        )
        return run_plan(wishes, as_json=json)

    end_with("plan", work)
