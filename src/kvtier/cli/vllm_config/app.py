"""What `kvtier vllm-config` understands: its options and exit codes."""

from __future__ import annotations

from typing import Annotated

import typer

from kvtier.cli.vllm_config.tier_order import ORDER

__all__ = ["HELP", "vllm_config"]

HELP = """
Print the flag that gives a vLLM server kvtier, and check it against this machine.

\b
    kvtier vllm-config --cpu 8GiB
    kvtier vllm-config --cpu 8GiB --disk /mnt/nvme/kv.slab:200GiB
    kvtier vllm-config --cpu 8GiB --fs /mnt/shared/kv:2TiB --namespace llama3-8b-v2
    kvtier vllm-config --cpu 8GiB --set store_threshold=2 --json | jq .ok
    kvtier vllm-config --cpu 8GiB --disk /mnt/nvme/kv.slab:200GiB --model MODEL > serve.sh

Standard output has the flags and nothing else, quoted for a shell: paste them behind `vllm serve
MODEL`. With --model, it has the whole command. Standard error has what was found: vLLM, shared
memory, host memory, limits, and each tier's directory. Nothing is made or changed by that. Run it
in vLLM's environment, as the engine's user, and in its container.

Tiers are looked up in the order in which they are given. Behind the last colon of PATH:SIZE stands
the size, such as 200GiB; for a path with a colon in it and no size, end with a colon.

Exit code 0: the flag is printed, and an engine can start with it as far as can be seen, warnings or
not; 1: the flag is printed, and a problem was found; 2: wrong input, and nothing is printed, or the
flag could not be written; 141: whoever was reading it has gone.
docs/vllm-config.md says more.
"""

_PATH = "PATH:SIZE"


def vllm_config(
    context: typer.Context,
    cpu: Annotated[
        str,
        typer.Option(
            metavar="SIZE",
            help="Of the host-memory tier, all ranks together, such as 8GiB.",
            show_default=False,
        ),
    ],
    disk: Annotated[  # noqa: ARG001 - read from the context, which knows the order
        list[str] | None,
        typer.Option(metavar=_PATH, help="A tier in a slab file on a local disk."),
    ] = None,
    fs: Annotated[  # noqa: ARG001
        list[str] | None,
        typer.Option(metavar=_PATH, help="A tier in a directory that engines share."),
    ] = None,
    tier: Annotated[  # noqa: ARG001
        list[str] | None,
        typer.Option(
            metavar="JSON", help="Any tier, as an entry of secondary_tiers with all its keys."
        ),
    ] = None,
    model: Annotated[
        str | None,
        typer.Option(
            "--model",
            metavar="NAME",
            help="Print the command that serves this model, not the flags alone.",
        ),
    ] = None,
    namespace: Annotated[
        str | None,
        typer.Option(metavar="TEXT", help="Your own word for these weights: cache_namespace."),
    ] = None,
    policy: Annotated[
        str | None,
        typer.Option(metavar="NAME", help="Which blocks leave host memory first: lru, arc."),
    ] = None,
    blocks_per_chunk: Annotated[
        int | None,
        typer.Option(metavar="N", help="Device blocks of one offloaded block."),
    ] = None,
    settings: Annotated[
        list[str] | None,
        typer.Option(
            "--set",
            metavar="KEY=VALUE",
            help="Any other key of docs/configuration.md; the value is JSON, or a text.",
        ),
    ] = None,
    plain: Annotated[
        bool,
        typer.Option(
            "--plain", help="Through vLLM's own OffloadingConnector, with fewer promises."
        ),
    ] = False,
    world_size: Annotated[
        int,
        typer.Option(metavar="N", min=1, help="Ranks of one engine: tensor x pipeline parallel."),
    ] = 1,
    no_check: Annotated[
        bool, typer.Option("--no-check", help="Print the flag, and look at nothing.")
    ] = False,
    json: Annotated[
        bool, typer.Option("--json", help="Print one JSON document and nothing else.")
    ] = False,
) -> None:
    # Here, since they load numpy, which `kvtier --help` does not need.
    from kvtier.cli.vllm_config.command import run_vllm_config
    from kvtier.cli.vllm_config.wishes import TierWish, Wishes

    names = ("disk", "fs", "tier")
    tiers = [TierWish(f"--{name}", text) for name, text in context.meta[ORDER] if name in names]
    wishes = Wishes(
        cpu=cpu,
        tiers=tiers,
        namespace=namespace,
        policy=policy,
        blocks_per_chunk=blocks_per_chunk,
        settings=settings or (),
    )
    raise typer.Exit(
        run_vllm_config(
            wishes,
            model=model,
            is_plain=plain,
            world_size=world_size,
            is_checked=not no_check,
            as_json=json,
        )
    )
