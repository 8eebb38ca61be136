"""What `kvtier store` understands: its subcommands, options and exit codes."""

from __future__ import annotations

import math
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Annotated

import typer

__all__ = ["store_app"]

_HELP = """
What a tier keeps on disk: list it, count it, verify it, clear it, tidy it up, make it anew.

PATH is the slab file of a disk tier (with data-parallel replicas: one of their files, such as
kv-dp0.slab), or the directory of an fs tier, its root_dir. Everything works while engines have it
open.

\b
    kvtier store stat /mnt/nvme/kv.slab
    kvtier store ls /mnt/shared/kv --limit 20
    kvtier store verify /mnt/nvme/kv.slab --max-rate 200MB
    kvtier store clear /mnt/shared/kv --namespace a8758fdc
    kvtier store gc /mnt/shared/kv --older-than 30d
    kvtier store init /mnt/shared/kv

Exit code 0: done, and all is well; 1: damage was found, or clear or gc was not confirmed, or an
engine did not make way in time; 2: wrong input, no such store, no permission, or the result could
not be written; 130: ended by Ctrl-C; 141: whoever was reading the result has gone.
docs/store.md says more.
"""

_LS_HELP = """
List the blocks that an engine would find.

The rank says which was used last (1). Ages are since a block was stored and, of an fs tier, since
it was used last.
"""

_STAT_HELP = """
Show what a store is, how full it is, and who has it open.

Of an fs tier: what its directory takes, what its ledger says, its namespaces and its engines.
"""

_VERIFY_HELP = """
Read every block and check its seal, payload included.

The page cache is bypassed where that can be done. While an engine runs, blocks come and go; one
that is overwritten just then is looked at again, and is no damage. Nothing is mended: an engine
that loads a damaged block notices, drops it and computes it again.

Exit code 0: all is well; 1: damage was found; 2: none was, but some blocks may not be read by this
user; 130: ended by Ctrl-C, and what was found until then is printed.
"""

_CLEAR_HELP = """
Forget every block, now and for every later engine.

Of a disk tier: with an engine running, it is asked to, and does so within about a second; without
one it is done here. The bytes stay in the file until they are overwritten: to be rid of them, end
the engine and remove the file.

Of an fs tier: the files are removed here, whatever engines do meanwhile. Blocks that only one live
engine finds, after a reset of its cache, are left alone.

Exit code 0: cleared; 1: not confirmed, or an engine did not obey or make way in time; 2: neither
--yes nor a terminal to ask on; 130: ended by Ctrl-C, and what is removed is counted out.
"""

_GC_HELP = """
Tidy up the directory of an fs tier: what dead engines have left, the count, what nobody uses.

Takes back what dead engines have left, counts all blocks again, and removes namespaces that no
live engine uses, and none has used for an hour, after it has shown them and asked. Engines may run;
while it counts, they store nothing.

\b
    kvtier store gc /mnt/shared/kv --dry-run           look only
    kvtier store gc /mnt/shared/kv --older-than 30d    what was not used for so long
    kvtier store gc /mnt/shared/kv --older-than 30d --yes     for cron

Exit code 0: done; 1: not confirmed, or another has had the ledger locked for too long; 2: wrong
input, no such directory, or neither --yes nor a terminal to ask on, and then nothing is done; 130:
ended by Ctrl-C.
"""

_INIT_HELP = """
Make a directory the root of an fs tier, or make an emptied one a root again.

Engines make a directory that is not there when they start. One that is emptied or removed while
they run could as well be a mount that is missing, so they leave it alone until someone says with
this that it is meant to be there; they take it again within seconds.

What is there stays. A directory that holds other things is refused. Root acts as the user whom the
directory belongs to.

Exit code 0: it is a root now; 1: an engine has had the ledger locked for too long; 2: it cannot be
one, or no permission.
"""

store_app = typer.Typer(
    name="store", help=_HELP, no_args_is_help=True, rich_markup_mode=None, add_completion=False
)

_Path = Annotated[
    Path,
    typer.Argument(
        metavar="PATH",
        help="The slab file of a disk tier, or the directory of an fs tier.",
        show_default=False,
        readable=False,  # not checked here: we say whose it is, and typer does not
    ),
]
_Json = Annotated[bool, typer.Option("--json", help="Print one JSON document on standard output.")]
_Namespace = Annotated[
    str | None,
    typer.Option(
        "--namespace",
        metavar="HEX",
        help="Only blocks of this model and layout: a fingerprint, or its first digits.",
    ),
]


@store_app.command("ls", help=_LS_HELP)
def _ls(
    path: _Path,
    limit: Annotated[int, typer.Option(metavar="N", help="At most so many; 0: all.", min=0)] = 100,
    namespace: _Namespace = None,
    sort: Annotated[
        str, typer.Option(metavar="ORDER", help="recent, oldest (by last use), or place.")
    ] = "recent",
    json: _Json = False,
) -> None:
    def work() -> int:
        from kvtier.cli.store.commands import list_blocks
        from kvtier.cli.store.store import Order

        if sort not in list(Order):
            raise typer.BadParameter(f"{sort}: give one of {', '.join(Order)}", param_hint="--sort")
        wanted = _checked_namespace(namespace)
        return list_blocks(path, wanted, Order(sort), limit or None, as_json=json)

    _end_with(path, work)


@store_app.command("stat", help=_STAT_HELP)
def _stat(path: _Path, json: _Json = False) -> None:
    def work() -> int:
        from kvtier.cli.store.commands import show_figures

        return show_figures(path, as_json=json)

    _end_with(path, work)


@store_app.command("verify", help=_VERIFY_HELP)
def _verify(
    path: _Path,
    max_rate: Annotated[
        str | None,
        typer.Option(metavar="SIZE", help="Read at most so much per second, such as 200MB."),
    ] = None,
    namespace: _Namespace = None,
    json: _Json = False,
) -> None:
    def work() -> int:
        from kvtier.cli.store.commands import verify

        rate = _checked_rate(max_rate)
        return verify(path, _checked_namespace(namespace), rate, as_json=json)

    _end_with(path, work)


@store_app.command("clear", help=_CLEAR_HELP)
def _clear(
    path: _Path,
    yes: Annotated[bool, typer.Option("--yes", help="Do not ask.")] = False,
    timeout: Annotated[
        float, typer.Option(metavar="SECONDS", help="How long to wait for engines.", min=0.1)
    ] = 30.0,
    namespace: _Namespace = None,
    json: _Json = False,
) -> None:
    def work() -> int:
        from kvtier.cli.store.commands import clear

        wanted = _checked_namespace(namespace)
        return clear(path, wanted, _checked_timeout(timeout), is_sure=yes, as_json=json)

    _end_with(path, work)


@store_app.command("gc", help=_GC_HELP)
def _gc(
    path: Annotated[
        Path,
        typer.Argument(
            metavar="PATH",
            help="The directory of an fs tier, its root_dir.",
            show_default=False,
            readable=False,
        ),
    ],
    older_than: Annotated[
        str | None,
        typer.Option(
            metavar="TIME",
            help="Remove only what was not used for so long: 90m, 12h, 30d, 4w. Default: 1h, but "
            "0s if --namespace is given.",
        ),
    ] = None,
    namespace: Annotated[
        list[str] | None,
        typer.Option(
            "--namespace",
            metavar="HEX",
            help="Remove only this one: a fingerprint, or its first digits. May be given several "
            "times.",
        ),
    ] = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Only show what there is.")] = False,
    yes: Annotated[bool, typer.Option("--yes", help="Do not ask.")] = False,
    json: _Json = False,
) -> None:
    def work() -> int:
        from kvtier.cli.store.gc import collect_garbage

        wanted = [start for start in map(_checked_namespace, namespace or ()) if start is not None]
        age = _checked_age(older_than or ("0s" if wanted else "1h"))
        return collect_garbage(path, wanted, age, is_dry=dry_run, is_sure=yes, as_json=json)

    _end_with(path, work)


@store_app.command("init", help=_INIT_HELP)
def _init(
    path: Annotated[
        Path,
        typer.Argument(
            metavar="PATH",
            help="The directory of an fs tier, its root_dir. The directory it is in has to exist.",
            show_default=False,
            readable=False,
        ),
    ],
    json: _Json = False,
) -> None:
    def work() -> int:
        from kvtier.cli.store.init import init_root

        return init_root(path, as_json=json)

    _end_with(path, work)


# --- what was given ----------------------------------------------------------------------------


def _checked_namespace(given: str | None) -> str | None:
    if given is None:
        return None
    if not given or any(digit not in "0123456789abcdefABCDEF" for digit in given):
        raise typer.BadParameter(
            f'"{given}": give hexadecimal digits, as `kvtier store stat` shows them',
            param_hint="--namespace",
        )
    return given


def _checked_rate(given: str | None) -> int | None:
    if given is None:
        return None
    from kvtier.config.sizes import SizeError, parse_size

    try:
        return parse_size(given.removesuffix("/s"))
    except SizeError as error:
        raise typer.BadParameter(f'"{given}": {error}', param_hint="--max-rate") from None


def _checked_age(given: str) -> int:
    from kvtier.cli.store.durations import DurationError, parse_duration

    try:
        return parse_duration(given)
    except DurationError as error:
        raise typer.BadParameter(f'"{given}": {error}', param_hint="--older-than") from None


def _checked_timeout(given: float) -> float:
    if not math.isfinite(given):
        raise typer.BadParameter(f"{given}: give a number of seconds", param_hint="--timeout")
    return given


# --- how it ends -------------------------------------------------------------------------------


def _end_with(path: Path, work: Callable[[], int]) -> None:
    """Run the command, and end with its exit code. Whatever can go wrong is said in a sentence."""
    try:
        code = _exit_code(path, work)
    except KeyboardInterrupt:
        code = 128 + signal.SIGINT
    raise typer.Exit(code)


def _exit_code(path: Path, work: Callable[[], int]) -> int:
    # Here, and in `work`, since they load what `kvtier --help` does not need.
    from kvtier.cli.output import CannotWrite, NobodyReads
    from kvtier.cli.store.refusal import NotDone, StoreRefused, explain_os_error
    from kvtier.cli.store.warnings import warnings_as_notes

    try:
        with warnings_as_notes():
            return work()
    except NobodyReads:
        return 128 + signal.SIGPIPE
    except NotDone as problem:
        return _said(str(problem), 1)
    except (StoreRefused, CannotWrite) as problem:
        return _said(str(problem), 2)
    except OSError as error:
        return _said(explain_os_error(path, error), 2)


def _said(sentence: str, code: int) -> int:
    from kvtier.cli.output import note

    note(f"kvtier store: {sentence}")
    return code
