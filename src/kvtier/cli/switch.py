"""`kvtier switch`: stops and resumes stores and loads of a running engine."""

from __future__ import annotations

import json as json_text
from enum import StrEnum
from typing import Annotated, Any

import typer

__all__ = ["HELP", "switch"]

HELP = """
Stop or resume stores and loads of a running engine, or let kvtier serve only a share of its
requests.

\b
    kvtier switch                                  what is switched off now
    kvtier switch --loads off --tier 1:fs          no new request loads from this tier
    kvtier switch --stores off --loads off         kvtier does nothing for new requests
    kvtier switch --stores on --loads on           as before
    kvtier switch --share 10                       kvtier serves 10 % of new requests

ENGINE is the process id of the engine, or the path of its socket; without it, the only engine that
runs here. --tier can be repeated; without it, all tiers and host memory are meant. Requests that
have arrived before go on as they are. The engine logs every change, and forgets them when it ends.

With a share, the metrics kvtier_requests, kvtier_request_prompt_tokens and
kvtier_first_token_seconds have the label half ("with", "without"): they show what kvtier gives
before all requests depend on it.

Exit code 0: done; 2: wrong input, no such engine, no answer, or the result could not be written.
docs/operate.md says more.
"""


_NEEDS = ("loads_off", "stores_off", "share")


class OnOff(StrEnum):
    """A position of a switch."""

    ON = "on"
    OFF = "off"


def switch(
    engine: Annotated[
        str | None,
        typer.Argument(metavar="ENGINE", help="Process id or socket.", show_default=False),
    ] = None,
    tier: Annotated[
        list[str] | None,
        typer.Option(metavar="LABEL", help='A tier, such as "0:disk", or "host".'),
    ] = None,
    loads: Annotated[
        OnOff | None, typer.Option(help="Whether new requests load.", show_default=False)
    ] = None,
    stores: Annotated[
        OnOff | None, typer.Option(help="Whether blocks are stored.", show_default=False)
    ] = None,
    share: Annotated[
        float | None,
        typer.Option(
            min=0, max=100, metavar="PERCENT", help="Of new requests.", show_default=False
        ),
    ] = None,
    json: Annotated[
        bool, typer.Option("--json", help="Print one JSON document on standard output.")
    ] = False,
) -> None:
    from kvtier.cli.output import finish, run_to_exit_code, write
    from kvtier.observe.client import EngineNotFound, NoAnswer, ask, find_engine

    if tier and loads is None and stores is None:
        raise typer.BadParameter("give --loads or --stores with it", param_hint="--tier")
    wanted: dict[str, Any] = {}
    if tier:
        wanted["tiers"] = tier
    if loads is not None:
        wanted["loads"] = loads is OnOff.ON
    if stores is not None:
        wanted["stores"] = stores is OnOff.ON
    if share is not None:
        wanted["share"] = share

    def work() -> int:
        state = ask(find_engine(engine), "switch", needs=_NEEDS, **wanted)
        write(json_text.dumps(state, indent=2) + "\n" if json else _as_text(state))
        finish()
        return 0

    raise typer.Exit(run_to_exit_code("switch", work, (EngineNotFound, NoAnswer)))


def _as_text(state: dict[str, Any]) -> str:
    from kvtier.config.errors import printable

    lines = []
    for name in ("loads", "stores"):
        off = printable(", ".join(state[f"{name}_off"]))
        lines.append(f"{name}: {f'off for {off}' if off else 'on'}")
    lines.append(f"share: {state['share']:g} % of new requests")
    return "\n".join(lines) + "\n"
