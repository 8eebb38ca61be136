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
    kvtier plan config.json --host 64GiB --trace trace.jsonl.xz
    kvtier plan --kv-bytes-per-token 128KiB --host 64GiB --json | jq .tiers
    kvtier plan --engine

MODEL is a model's config.json, as Hugging Face has it. A conversation is a prompt of --conversation
tokens. "computes below" is the break-even: loading from the tier is faster if your engine computes
fewer prompt tokens per second than that. With --prefill, the table also says by how much.

With --engine alone, it shows what the engines that run here estimate from their own requests: the
hit ratio with other sizes of their tiers.

With --trace, the requests of the trace are replayed with host memory of an eighth to eight times of
--host, and the table shows the hits at each size. It needs some seconds for each.

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
    trace: Annotated[
        str | None,
        typer.Option(metavar="FILE", help="Replay this trace with several sizes of host memory."),
    ] = None,
    block_tokens: Annotated[
        int | None,
        typer.Option(
            metavar="N", help="Tokens per block of the trace. Default: 512, or what an npz says."
        ),
    ] = None,
    policy: Annotated[
        str, typer.Option(metavar="NAME", help="Eviction policy of host memory: lru, arc, ...")
    ] = "lru",
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
            trace=trace,
            block_tokens=block_tokens,
            policy=policy,
            limit=limit,
        )
        return run_plan(wishes, as_json=json)

    end_with("plan", work)
