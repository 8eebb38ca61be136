"""The options and exit codes of `kvtier top` and `kvtier page`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Annotated

import typer

__all__ = ["PAGE_HELP", "TOP_HELP", "page", "top"]

TOP_HELP = """
Watch a running engine: how full its tiers are, what they load and store, what goes wrong.

ENGINE is the process id of an engine of this user, or the path of its status socket. It is not
needed if only one runs.

\b
    kvtier top                     the engine that runs here; q ends
    kvtier top --all               all engines of this user, summed
    kvtier top 4711 --interval 1   one of several, every second
    kvtier top --once              print once, as it also does without a terminal
    kvtier top --json | jq .tiers  for programs

Rates are those of the last 5 to 15 seconds. If the engine ends, the view keeps its last figures,
says so, and goes on with the engine that starts next; with a process id, it ends.

Exit code 0: done; 1: the engine with this process id has ended; 2: wrong input, no such engine, no
answer, or the result could not be written; 130: ended by Ctrl-C; 141: the reader of standard output
has gone. docs/operate.md explains each figure.
"""

PAGE_HELP = """
Serve a status page of a running engine, with charts of the last hour.

ENGINE is as in kvtier top. The page is served by this process, and only to this machine; the engine
opens no port. Nothing can be changed with it.

\b
    kvtier page                    then open the address that it prints
    kvtier page --all --port 9000  all engines of this user, summed
    ssh -L 8642:localhost:8642 HOST    the page of another machine

Everyone who can reach the address can read the page: it shows the model's name, the tiers, and the
ids of requests. An address that other machines can reach is refused without --public.

Ends with Ctrl-C. Exit code 0: ended by SIGTERM; 2: wrong input, several engines to choose from, or
the address is in use; 130: ended by Ctrl-C. docs/operate.md says more.
"""

_Engine = Annotated[
    str | None,
    typer.Argument(
        metavar="[ENGINE]", help="A process id, or the path of a status socket.", show_default=False
    ),
]
_All = Annotated[bool, typer.Option("--all", help="All engines of this user, summed.")]


def top(
    engine: _Engine = None,
    all_engines: _All = False,
    once: Annotated[bool, typer.Option("--once", help="Print once, and end.")] = False,
    interval: Annotated[
        float, typer.Option(metavar="S", help="Seconds between two pictures.", min=0.5, max=60)
    ] = 2.0,
    json: Annotated[
        bool, typer.Option("--json", help="Print one JSON document on standard output.")
    ] = False,
) -> None:
    def work() -> int:
        from kvtier.cli.watch.engines import FollowedEngines
        from kvtier.cli.watch.top import run_top

        engines = FollowedEngines(engine, all_engines)
        return run_top(engines, interval, once=once, as_json=json)

    _end_with("top", engine, all_engines, work)


def page(
    engine: _Engine = None,
    all_engines: _All = False,
    host: Annotated[
        str, typer.Option(metavar="ADDRESS", help="The address to listen on.")
    ] = "127.0.0.1",
    port: Annotated[
        int, typer.Option(metavar="N", help="The port; 0: any free one.", min=0, max=65535)
    ] = 8642,
    public: Annotated[
        bool,
        typer.Option("--public", help="Allow an address that other machines can reach."),
    ] = False,
) -> None:
    def work() -> int:
        from kvtier.cli.watch.engines import FollowedEngines
        from kvtier.cli.watch.page import run_page

        return run_page(FollowedEngines(engine, all_engines), host, port, is_public=public)

    _end_with("page", engine, all_engines, work)


def _end_with(command: str, engine: str | None, all_engines: bool, work: Callable[[], int]) -> None:
    if all_engines and engine is not None:
        raise typer.BadParameter("give ENGINE or --all, not both")
    # Imported here and in `work`, because `kvtier --help` needs none of it.
    from kvtier.cli.output import CannotServe, run_to_exit_code
    from kvtier.observe.client import EngineNotFound, NoAnswer

    code = run_to_exit_code(command, work, (EngineNotFound, NoAnswer, CannotServe))
    raise typer.Exit(code)
