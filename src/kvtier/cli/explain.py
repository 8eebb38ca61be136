"""`kvtier explain`: why a running engine has computed tokens, and what became of a block."""

from __future__ import annotations

import os
import shutil
import sys
import textwrap
import time
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Annotated, Any

import typer

if TYPE_CHECKING:
    from kvtier.observe.client import EngineSocket

__all__ = ["HELP", "explain"]

HELP = """
Say which tokens of a request were on the device, which were loaded from where, and why the others
were computed. Asks a running engine of this user; nothing is changed.

REQUEST is the id of a request, as the client or the engine knows it, or the beginning of one id.
For vLLM, it is the id in the API's answer, such as chatcmpl-3f2a.

\b
    kvtier explain                         the last request
    kvtier explain chatcmpl-3f2a91c0       this request
    kvtier explain --last 20               the last 20 requests
    kvtier explain --key 9f3c...           what became of a block: its hash or key
    kvtier explain --engine 4711 --json    one of several engines; for programs

An engine remembers the last thousand requests and about half a million events of blocks.

Exit code 0: found; 1: no engine that was asked knows this request or block; 2: wrong input, no such
engine, no answer, or the result could not be written; 130: ended by Ctrl-C; 141: the reader of
standard output has gone. docs/explain.md has an example for each reason.
"""

_MOST_WIDE, _LEAST_WIDE = 100, 30
_MANY_EVENTS = 12


def explain(
    request: Annotated[
        str | None,
        typer.Argument(metavar="[REQUEST]", help="The id of a request.", show_default=False),
    ] = None,
    key: Annotated[
        str | None,
        typer.Option(metavar="HEX", help="Explain a block: its hash, or its key."),
    ] = None,
    last: Annotated[
        int | None,
        typer.Option(metavar="N", help="Explain the last N requests, 1 to 100.", min=1, max=100),
    ] = None,
    engine: Annotated[
        str | None,
        typer.Option(
            metavar="PID|PATH",
            help="Ask the engine with this process id or status socket. Not needed if only one "
            "runs.",
        ),
    ] = None,
    ask_all: Annotated[bool, typer.Option("--all", help="Ask all engines of this user.")] = False,
    json: Annotated[
        bool, typer.Option("--json", help="Print one JSON document on standard output.")
    ] = False,
) -> None:
    if sum(given is not None for given in (request, key, last)) > 1:
        raise typer.BadParameter("give only one of REQUEST, --key and --last")
    if ask_all and engine is not None:
        raise typer.BadParameter("give --engine or --all, not both")
    question: dict[str, Any] = {"last": last or 1}
    if request is not None:
        question = {"request": request}
    elif key is not None:
        question = {"key": key}
    raise typer.Exit(_run(question, engine, ask_all, json))


_NEEDS = ("now_s", "reaches_back_to_s", "requests", "blocks")


def _run(question: Mapping[str, Any], engine: str | None, ask_all: bool, as_json: bool) -> int:
    # Imported here, because `kvtier --help` does not need numpy.
    from kvtier.cli.output import finish, run_to_exit_code
    from kvtier.observe.client import EngineNotFound, NoAnswer, ask, find_engine, find_engines

    def work() -> int:
        engines = find_engines() if ask_all else [find_engine(engine)]
        if not engines:
            find_engine()  # says why there is none
        answers = [(its, ask(its, "explain", needs=_NEEDS, **question)) for its in engines]
        is_found = any(answer["requests"] or answer["blocks"] for _, answer in answers)
        _print(question, answers, as_json)
        finish()
        return 0 if is_found else 1

    return run_to_exit_code("explain", work, (EngineNotFound, NoAnswer))


def _print(
    question: Mapping[str, Any],
    answers: Sequence[tuple[EngineSocket, Mapping[str, Any]]],
    as_json: bool,
) -> None:
    import json

    from kvtier.cli.output import write, write_line

    if as_json:
        engines = [{"pid": its.pid, "socket": str(its.path), **answer} for its, answer in answers]
        write(json.dumps({"question": question, "engines": engines}, indent=2) + "\n")
        return
    width = max(_LEAST_WIDE, min(_MOST_WIDE, shutil.get_terminal_size().columns))
    for its, answer in answers:
        if len(answers) > 1:
            write_line(f"engine {its.pid}, {its.path}")
        lines = [line for request in answer["requests"] for line in _of_request(request, width)]
        lines += [line for block in answer["blocks"] for line in _of_block(block, width)]
        for line in lines or textwrap.wrap(_nothing(question, answer), width):
            write_line(line) if not line.startswith(_BOLD) else _write_title(line)


def _nothing(question: Mapping[str, Any], answer: Mapping[str, Any]) -> str:
    since = _clock(answer["reaches_back_to_s"])
    what = "request" if "request" in question else "block" if "key" in question else "request yet"
    return (
        f"The engine knows no such {what}. It remembers the last thousand requests, and what "
        f"happened to blocks since {since}."
        if "last" not in question
        else "The engine has had no request yet."
    )


# --- a request ---------------------------------------------------------------------------------


def _of_request(request: Mapping[str, Any], width: int) -> Iterator[str]:
    yield _BOLD + f"request {request['id']}, {request['state']}"
    times = f"arrived {_clock(request['arrived_s'])}"
    if request["started_s"] is not None:
        times += f", started {_span(request['started_s'] - request['arrived_s'])} later"
    if request["ended_s"] is not None:
        times += f", ended {_span(request['ended_s'] - request['arrived_s'])} after it arrived"
    yield from _row("times", times, width)
    if request.get("tenant", "default") != "default":
        private = ", private" if request["is_private"] else ""
        yield from _row("tenant", f"{request['tenant']}{private}", width)
    yield from _row("tokens", _tokens(request["tokens"]), width)
    for load in request["loads"]:
        what = f"{load['tier']}: {load['loaded_blocks']} of {load['blocks']} blocks"
        outcome = "late after" if load["late"] else "in"
        yield from _row("load", f"{what} {outcome} {_span(load['seconds'])}", width)
    block = request["decisive_block"]
    if block is not None and request["tokens"]["computed"]:
        where = f"the first that was computed, at token {block['first_token']:,}: {block['key']}"
        yield from _row("block", where, width)
    for lookup in request["lookups"]:
        took = "" if lookup["seconds"] is None else f" ({_span(lookup['seconds'])})"
        yield from _row("asked", f"{lookup['tier']}: {lookup['answer']}{took}", width)
    for reason in request["why"]:
        yield from _reason("why", reason, width)
    yield ""


def _tokens(tokens: Mapping[str, Any]) -> str:
    if tokens["computed"] is None:
        known = tokens["prompt"]
        return "not known yet" if known is None else f"{known:,} in the prompt"
    parts = [f"{tokens['device']:,} on the device"]
    parts += [f"{count:,} loaded from {tier}" for tier, count in tokens["loaded"].items()]
    parts.append(f"{tokens['computed']:,} computed")
    return f"{tokens['prompt']:,}: " + ", ".join(parts)


# --- a block -----------------------------------------------------------------------------------


def _of_block(block: Mapping[str, Any], width: int) -> Iterator[str]:
    yield _BOLD + f"block {block['key']}"
    for reason in block["places"]:
        yield from _reason(reason["tier"], reason, width)
    events = [
        (event["when_s"], f"{event['what'].replace('_', ' ')}, {event['tier']}", event["request"])
        for event in block["events"]
    ]
    events += [(lookup["when_s"], "looked up", lookup["request"]) for lookup in block["lookups"]]
    for when, what, request in sorted(events, key=lambda event: event[0])[-_MANY_EVENTS:]:
        by = "" if request is None else f" (request {request})"
        yield from _row(_clock(when), f"{what}{by}", width)
    yield ""


# --- lines -------------------------------------------------------------------------------------

_BOLD = "\0"
"""Begins a title."""
_LABEL = 8


def _write_title(line: str) -> None:
    from kvtier.cli.output import write, write_line

    has_color = (
        sys.stdout is not None
        and sys.stdout.isatty()
        and not os.environ.get("NO_COLOR")
        and os.environ.get("TERM") != "dumb"
    )
    if has_color:
        write("\033[1m")
    write_line(line.removeprefix(_BOLD))
    if has_color:
        write("\033[0m")


def _row(label: str, text: str, width: int) -> list[str]:
    first = f"  {label:<{_LABEL}} "
    return textwrap.wrap(
        text, width, initial_indent=first, subsequent_indent=" " * (_LABEL + 3)
    ) or [first]


def _reason(label: str, reason: Mapping[str, Any], width: int) -> Iterator[str]:
    yield from _row(label, reason["text"], width)
    if reason["remedy"]:
        yield from _row("", f"-> {reason['remedy']}", width)


def _clock(when_s: float) -> str:
    return time.strftime("%H:%M:%S", time.localtime(when_s))


def _span(span_s: float) -> str:
    from kvtier.observe.reasons import seconds

    return seconds(span_s)
