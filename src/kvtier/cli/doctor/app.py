"""The options and exit codes of `kvtier doctor` and `kvtier bench`."""

from __future__ import annotations

from typing import Annotated

import typer

from kvtier.cli.replay.app import end_with

__all__ = ["BENCH_HELP", "DOCTOR_HELP", "bench", "doctor"]

DOCTOR_HELP = """
Find out what is wrong with a configuration on this machine, and which of its tiers will pay.

\b
    kvtier doctor serve.sh
    kvtier doctor serve.sh --model /models/llama3-8b --prefill 26000
    kvtier doctor --engine                     one that runs; --engine PID if there are several
    kvtier doctor '{"cpu_bytes_to_use": "8GiB", "secondary_tiers": [...]}' --json | jq .verdict

CONFIG is what you start vLLM with: a script from `kvtier vllm-config`, or the JSON of
--kv-transfer-config or of kv_connector_extra_config, as a file or as a text.

It checks shared memory, limits, NUMA nodes, the hash seed, the copies to the GPU, and the disk or
server of each tier. It writes a block through each tier with the tier's own code, finds it, loads
it, compares it, and removes it. Engines may run meanwhile: no block of theirs is read, changed or
evicted. It measures how fast each tier is, and with --model and --prefill compares loading with
computing, by the length of the prompt.

With --engine, it asks a running engine instead, and says what keeps it from using a tier: breaker,
full quota, errors, seals, declined loads, stores that are off. It measures nothing that would
compete with the engine.

Run it in vLLM's environment, as the engine's user, and in its container.

Exit code 0: no problem was found (there may be warnings); 1: problems were found; 2: the input is
wrong, or the result could not be written; 130: Ctrl-C; 141: the reader of standard output has gone.
docs/doctor.md says more.
"""

BENCH_HELP = """
Time tiers alone: stores, loads and lookups, beside a physical limit taken in the same run.

\b
    kvtier bench disk --path /mnt/nvme
    kvtier bench valkey --url valkey://cache.example:6379 --block 256KiB
    kvtier bench --config serve.sh             all its tiers, one after the other
    kvtier bench disk --config serve.sh --json | jq .tiers[0].loads

The tier's own code moves the blocks; every byte of a loaded block is compared. Engines may use the
same storage: no block of theirs is read, changed or evicted, and nothing is left behind. They do
share its speed, so measure while they are idle.

The limit is what the disk does with direct I/O and large blocks, or, for a server, one thread's
copy within host memory.

Exit code 0: all tiers were timed; 1: a tier did not do what it should; 2: the input is wrong, or
the result could not be written; 130: Ctrl-C; 141: the reader of standard output has gone.
docs/doctor.md says more.
"""


def doctor(
    config: Annotated[
        str | None,
        typer.Argument(
            metavar="[CONFIG]",
            help="A script, a file with JSON, or JSON. With --engine: the process id or the socket "
            "of the engine, if several run.",
            show_default=False,
        ),
    ] = None,
    engine: Annotated[
        bool, typer.Option("--engine", help="Examine an engine that runs, not a configuration.")
    ] = False,
    model: Annotated[
        str | None,
        typer.Option(
            metavar="PATH", help="The model's directory or config.json. Default: that in CONFIG."
        ),
    ] = None,
    kv_dtype: Annotated[
        str | None,
        typer.Option(metavar="TYPE", help="Type of the KV cache, if not the model's: fp8, ..."),
    ] = None,
    kv_bytes_per_token: Annotated[
        str | None,
        typer.Option(metavar="SIZE", help="KV cache of one token, in place of --model."),
    ] = None,
    prefill: Annotated[
        float | None,
        typer.Option(metavar="N", help="Prompt tokens that the engine computes per second."),
    ] = None,
    prefill_times: Annotated[
        str | None,
        typer.Option(
            metavar="TOKENS:TIME,...",
            help="How long one or two prompts take on an idle engine: 8192:212ms,32768:1.22s.",
        ),
    ] = None,
    block_tokens: Annotated[
        int, typer.Option(metavar="N", help="Tokens of one block of the engine.")
    ] = 16,
    namespace: Annotated[
        str | None,
        typer.Option(
            metavar="HEX", help="The namespace in the engine's log: are there blocks of it?"
        ),
    ] = None,
    quick: Annotated[
        bool,
        typer.Option("--quick", help="Do not measure disks, which takes some 3 s for each."),
    ] = False,
    json: Annotated[
        bool, typer.Option("--json", help="Print one JSON document and nothing else.")
    ] = False,
) -> None:
    def work() -> int:
        from kvtier.cli.doctor.command import DoctorWishes, run_doctor
        from kvtier.cli.doctor.engine import run_on_engine

        if engine:
            for option, value in (
                ("--model", model),
                ("--kv-dtype", kv_dtype),
                ("--kv-bytes-per-token", kv_bytes_per_token),
                ("--prefill", prefill),
                ("--prefill-times", prefill_times),
                ("--namespace", namespace),
            ):
                if value is not None:
                    knows = "a running engine knows its model and its speed"
                    raise typer.BadParameter(f"not with --engine: {knows}", param_hint=option)
            return run_on_engine(config, as_json=json)
        if config is None:
            raise typer.BadParameter("give one, or --engine", param_hint="CONFIG")
        wishes = DoctorWishes(
            config=config,
            model=model,
            kv_dtype=kv_dtype,
            kv_bytes_per_token=kv_bytes_per_token,
            prefill=prefill,
            prefill_times=prefill_times,
            block_tokens=block_tokens,
            namespace=namespace,
            is_quick=quick,
        )
        return run_doctor(wishes, as_json=json)

    end_with("doctor", work)


def bench(
    tiers: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="[TIER]...",
            help="Types of tiers (disk, fs, valkey, ...), or their numbers in --config.",
            show_default=False,
        ),
    ] = None,
    config: Annotated[
        str | None,
        typer.Option(
            "--config",
            metavar="CONFIG",
            help="The tiers' keys: a script, a file with JSON, or JSON.",
        ),
    ] = None,
    path: Annotated[
        str | None,
        typer.Option(
            "--path", metavar="PATH", help="Without --config: the directory of a disk or fs tier."
        ),
    ] = None,
    url: Annotated[
        str | None,
        typer.Option(
            "--url",
            metavar="URL",
            help="Without --config: the server of a valkey or obj tier, or the master of a pool.",
        ),
    ] = None,
    block: Annotated[
        str, typer.Option("--block", metavar="SIZE", help="Size of one block.")
    ] = "1MiB",
    size: Annotated[
        str, typer.Option("--size", metavar="SIZE", help="Bytes that are stored and loaded.")
    ] = "512MiB",
    threads: Annotated[
        int | None,
        typer.Option(metavar="N", help="I/O threads or connections of the tier. Default: its own."),
    ] = None,
    job_blocks: Annotated[
        int, typer.Option(metavar="N", help="Blocks of one job; an engine moves a prompt at once.")
    ] = 32,
    json: Annotated[
        bool, typer.Option("--json", help="Print one JSON document and nothing else.")
    ] = False,
) -> None:
    def work() -> int:
        from kvtier.cli.doctor.bench import BenchWishes, run_bench

        wishes = BenchWishes(
            tiers=tiers or [],
            config=config,
            path=path,
            url=url,
            block=block,
            size=size,
            threads=threads,
            job_blocks=job_blocks,
        )
        return run_bench(wishes, as_json=json)

    end_with("bench", work)
