"""The `kvtier` command: its subcommands, options and exit codes."""

from __future__ import annotations

import signal
from collections.abc import Sequence
from typing import Annotated, Any

import typer
import typer.core

from kvtier import __version__
from kvtier.cli.doctor.app import BENCH_HELP, DOCTOR_HELP, bench, doctor
from kvtier.cli.explain import HELP as EXPLAIN_HELP
from kvtier.cli.explain import explain
from kvtier.cli.mooncake import mooncake_app
from kvtier.cli.plan.app import HELP as PLAN_HELP
from kvtier.cli.plan.app import plan
from kvtier.cli.replay.app import HELP as REPLAY_HELP
from kvtier.cli.replay.app import replay
from kvtier.cli.store.app import store_app
from kvtier.cli.switch import HELP as SWITCH_HELP
from kvtier.cli.switch import switch
from kvtier.cli.vllm_config.app import HELP as VLLM_CONFIG_HELP
from kvtier.cli.vllm_config.app import InGivenOrder, vllm_config
from kvtier.cli.watch.app import PAGE_HELP, TOP_HELP, page, top

__all__ = ["app", "run"]

_HELP = """\
Usage: kvtier COMMAND [OPTIONS] [ARGS]

kvtier keeps the KV cache of an LLM engine in host memory and in tiers below it.

Begin:
  demo          serve a small model from every tier: half a minute, no GPU
  vllm-config   write the command that serves a model, checked on this machine
  doctor        find what is wrong here, and which tiers will pay
  bench         time one tier alone
  mooncake      start a pool of memory for a trial, or lend memory to one
Look at a running engine:
  top           its tiers, in this terminal
  page          the same in a browser, with charts of the last hour
  explain       why a request was computed, or where a block has gone
  switch        stop and resume stores and loads
Look at what tiers keep:
  store         list, count, verify and remove blocks
Plan:
  replay        serve a request trace from tiers of any size
  plan          choose sizes for a model, by a trace or by targets

Options: --version, --install-completion, --show-completion, --help
Each command has --help, with examples and exit codes. --json is for programs.
"""

_DEMO_HELP = """
Show that offloading makes the first token come sooner and changes no token.

A small real transformer serves prompts on this machine: cold, then from the device cache, from host
memory, from disk, from disk in a restarted process, as a hybrid model with sliding-window layers,
and while one of two tiers is killed. Every token and every logit is compared with a run without
offloading.

\b
    kvtier demo                             all of it, as tables
    kvtier demo --tokens 4096 --requests 2  longer prompts, fewer of them
    kvtier demo --json | jq .ok             for programs

It takes about half a minute of processor time.

Exit code 0: all tokens and logits are identical, and all blocks came from where they should; 1:
otherwise; 2: wrong input, not enough memory or disk space, or the result could not be written.
docs/demo.md says how each figure is measured.
"""


class _GroupedHelp(typer.core.TyperGroup):
    """The command with its subcommands. Its help lists them by what a user wants to do."""

    def format_help(self, ctx: Any, formatter: Any) -> None:
        formatter.write(_HELP)


app = typer.Typer(
    name="kvtier",
    cls=_GroupedHelp,
    no_args_is_help=True,
    rich_markup_mode=None,  # plain text: it can be searched, and piped
    pretty_exceptions_enable=False,
)
app.add_typer(store_app)
app.add_typer(mooncake_app)
app.command("vllm-config", help=VLLM_CONFIG_HELP, cls=InGivenOrder)(vllm_config)
app.command("doctor", help=DOCTOR_HELP)(doctor)
app.command("bench", help=BENCH_HELP)(bench)
app.command("explain", help=EXPLAIN_HELP)(explain)
app.command("replay", help=REPLAY_HELP)(replay)
app.command("plan", help=PLAN_HELP)(plan)
app.command("switch", help=SWITCH_HELP)(switch)
app.command("top", help=TOP_HELP)(top)
app.command("page", help=PAGE_HELP)(page)


def run(argv: Sequence[str] | None = None) -> int:
    """Run the command and return its exit code."""
    try:
        app(args=None if argv is None else list(argv), prog_name="kvtier")
    except SystemExit as end:
        return end.code if isinstance(end.code, int) else int(end.code is not None)
    except KeyboardInterrupt:  # before the command has started
        return 128 + signal.SIGINT
    except OSError as error:  # the help could not be written; commands handle this themselves
        from kvtier.cli.output import end_of_output, note

        note(f"kvtier: {end_of_output(error)}")
        return 2
    return 0


def _show_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"kvtier {__version__}")
        raise typer.Exit


@app.callback()
def _options_of_all(
    version: Annotated[
        bool,
        typer.Option(
            "--version", callback=_show_version, is_eager=True, help="Print the version and exit."
        ),
    ] = False,
) -> None:
    pass


@app.command("demo", help=_DEMO_HELP)
def _demo(
    tokens: Annotated[
        int, typer.Option(help="Tokens of each prompt, 32 to 8184.", metavar="N")
    ] = 1024,
    requests: Annotated[int, typer.Option(help="Number of prompts, 1 to 64.", metavar="N")] = 4,
    lengths: Annotated[
        str,
        typer.Option(
            help="Prompt lengths at which warm and cold are compared, 32 to 8184 tokens each.",
            metavar="N,N,...",
        ),
    ] = "256,512,1024,2048,4096",
    seed: Annotated[
        int,
        typer.Option(help="Seed of prompts and model weights, 0 to 4294967295.", metavar="N"),
    ] = 0,
    json: Annotated[
        bool, typer.Option("--json", help="Print one JSON document and nothing else.")
    ] = False,
) -> None:
    # Imported here because it loads numpy, which `kvtier --help` does not need.
    from kvtier.cli.demo.command import run_demo
    from kvtier.cli.demo.settings import DemoSettings, WrongSetting

    try:
        settings = DemoSettings.from_options(tokens, requests, lengths, seed)
    except WrongSetting as wrong:
        raise typer.BadParameter(str(wrong), param_hint=wrong.option) from None
    raise typer.Exit(run_demo(settings, as_json=json))
