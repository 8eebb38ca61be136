"""The options and exit codes of `kvtier vllm-config`."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from typing import Annotated, Any

import typer
from typer.core import TyperCommand

__all__ = ["HELP", "InGivenOrder", "vllm_config"]

HELP = """
Print the flag that makes vLLM use kvtier, and check it against this machine.

\b
    kvtier vllm-config --cpu 8GiB
    kvtier vllm-config --cpu 8GiB --disk /mnt/nvme/kv.slab:200GiB
    kvtier vllm-config --cpu 8GiB --fs /mnt/shared/kv:2TiB --namespace llama3-8b-v2
    kvtier vllm-config --cpu 8GiB --valkey valkeys://cache.example:6379
    kvtier vllm-config --cpu 8GiB --obj s3://kv-cache/llama:10TiB
    kvtier vllm-config --cpu 8GiB --mooncake cache.example:50051:64GiB
    kvtier vllm-config --cpu 8GiB --set store_threshold=2 --json | jq .ok
    kvtier vllm-config --cpu 8GiB --disk /mnt/nvme/kv.slab:200GiB --model MODEL > serve.sh

Standard output gets only the flags, quoted for a shell: paste them after `vllm serve MODEL`. With
--model, it gets the whole command. Standard error gets the findings: vLLM, shared memory, host
memory, limits, and each tier's directory or server. The checks change nothing. Run it in vLLM's
environment, as the engine's user, and in its container.

Lookups ask the tiers in the order given. In PATH:SIZE, the size, such as 200GiB, follows the last
colon. If a path contains a colon and you give no size, add a colon at the end of the path.

Servers are asked with the credentials in the environment (VALKEY_PASSWORD, AWS_ACCESS_KEY_ID, ...).
With --tier, other keys of a server can be given, such as endpoint or ca_bundle.

Exit code 0: the flag is printed, and no check found a problem; 1: the flag is printed, and a check
found a problem; 2: the input is wrong (then no flag is printed), or the flag could not be written;
141: the reader of standard output has gone.
docs/vllm-config.md says more.
"""

_PATH = "PATH:SIZE"
_ORDER = "kvtier.cli.vllm_config.order"
"""Key of the context's `meta`: a list of (parameter name, value), in the order given."""


class InGivenOrder(TyperCommand):
    """A command that keeps the order of repeated options.

    Only the parser knows the order, because the command's function gets one list for each option.
    """

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Called once, before the command's function."""
        values, _, order = self.make_parser(ctx).parse_args(args=list(args))
        ctx.meta[_ORDER] = list(_pairs(values, [str(param.name) for param in order]))
        return super().parse_args(ctx, args)


def _pairs(values: dict[str, Any], names: list[str]) -> Iterator[tuple[str, str]]:
    num_seen: defaultdict[str, int] = defaultdict(int)
    for name in names:
        given = values.get(name)
        if isinstance(given, list):
            yield name, given[num_seen[name]]
            num_seen[name] += 1


def vllm_config(
    context: typer.Context,
    cpu: Annotated[
        str,
        typer.Option(
            metavar="SIZE",
            help="Size of the host-memory tier for all ranks together, such as 8GiB.",
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
    obj: Annotated[  # noqa: ARG001
        list[str] | None,
        typer.Option(metavar="URL:SIZE", help="A tier in a bucket, such as s3://BUCKET/PREFIX."),
    ] = None,
    valkey: Annotated[  # noqa: ARG001
        list[str] | None,
        typer.Option(metavar="URL", help="A tier in a Valkey or Redis server: valkey://HOST:PORT."),
    ] = None,
    mooncake: Annotated[  # noqa: ARG001
        list[str] | None,
        typer.Option(
            metavar="HOST:PORT:SIZE",
            help="A tier in a Mooncake pool: its master, and the memory that this engine lends.",
        ),
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
        typer.Option(metavar="TEXT", help="Your own name for these weights: cache_namespace."),
    ] = None,
    policy: Annotated[
        str | None,
        typer.Option(
            metavar="NAME", help="Which blocks leave host memory first: lru, arc, density."
        ),
    ] = None,
    blocks_per_chunk: Annotated[
        int | None,
        typer.Option(metavar="N", help="Number of device blocks in one offloaded block."),
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
            "--plain", help="Use vLLM's own OffloadingConnector; docs/vllm.md says what it lacks."
        ),
    ] = False,
    world_size: Annotated[
        int,
        typer.Option(metavar="N", min=1, help="Ranks of one engine: tensor x pipeline parallel."),
    ] = 1,
    no_check: Annotated[
        bool, typer.Option("--no-check", help="Print the flag without checking this machine.")
    ] = False,
    json: Annotated[
        bool, typer.Option("--json", help="Print one JSON document and nothing else.")
    ] = False,
) -> None:
    # Imported here because they load numpy, which `kvtier --help` does not need.
    from kvtier.cli.vllm_config.command import run_vllm_config
    from kvtier.cli.vllm_config.flag import RequestedConfig, TierOption

    names = ("disk", "fs", "obj", "valkey", "mooncake", "tier")
    tiers = [TierOption(f"--{name}", text) for name, text in context.meta[_ORDER] if name in names]
    requested = RequestedConfig(
        cpu=cpu,
        tiers=tiers,
        namespace=namespace,
        policy=policy,
        blocks_per_chunk=blocks_per_chunk,
        settings=settings or (),
    )
    raise typer.Exit(
        run_vllm_config(
            requested,
            model=model,
            is_plain=plain,
            world_size=world_size,
            is_checked=not no_check,
            as_json=json,
        )
    )
