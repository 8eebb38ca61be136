"""The subcommands, options and exit codes of `kvtier store`."""

from __future__ import annotations

import math
import re
import signal
from collections.abc import Callable
from typing import Annotated

import typer

__all__ = ["DurationError", "parse_duration", "store_app"]

_DURATION_UNITS = {"s": 1, "m": 60, "h": 3_600, "d": 86_400, "w": 604_800}
_DURATION = re.compile(r"(\d{1,9}) ?([a-z])", re.ASCII)

_HELP = """
Work on what a tier keeps on disk: list, count, verify, clear or tidy it, or set up its directory.

PATH is the slab file of a disk tier (with data-parallel replicas: one of their files, such as
kv-dp0.slab), the root_dir of an fs tier, the url of a valkey or obj tier, mooncake://HOST:PORT with
the master of a mooncake tier, or what a tier of another package accepts. A server's user and
password come from VALKEY_USERNAME and VALKEY_PASSWORD; a bucket's credentials from where S3 tools
look (AWS_ACCESS_KEY_ID, AWS_ENDPOINT_URL, ...).
All commands work while engines run.

\b
    kvtier store stat /mnt/nvme/kv.slab
    kvtier store ls /mnt/shared/kv --limit 20
    kvtier store verify /mnt/nvme/kv.slab --max-rate 200MB
    kvtier store clear /mnt/shared/kv --namespace a8758fdc
    kvtier store stat valkey://cache.example:6379
    kvtier store stat mooncake://cache.example:50051?admin=cache.example:9003
    kvtier store ls s3://kv-cache/llama
    kvtier store gc /mnt/shared/kv --older-than 30d
    kvtier store init /mnt/shared/kv
    kvtier store serve /mnt/shared/kv --port 8099

Exit code 0: done; 1: damage was found, or clear or gc was not confirmed, or an engine did not
respond in time; 2: wrong input, no such store, no permission, or the result could
not be written; 130: ended by Ctrl-C; 141: the reader of standard output has gone.
docs/store.md says more.
"""

_LS_HELP = """
List the blocks that an engine would find.

Rank 1 is the block that was used last. Ages count from when a block was stored and, in an fs tier,
from when it was last used.
"""

_STAT_HELP = """
Show what a store is, how full it is, and which engines use it.

For an fs tier: the size of its directory and of its ledger, its namespaces and its engines. For a
server: its namespaces and its memory; it does not know who uses it.
"""

_VERIFY_HELP = """
Read every block and check its seal, payload included.

Bypasses the page cache where the file system allows it. A block that an engine overwrites at the
same time is read again and does not count as damaged. Nothing is repaired: an engine that loads a
damaged block notices, drops it and computes it again.

Exit code 0: no damage; 1: damage was found; 2: no damage was found, but this user may not read some
blocks; 130: ended by Ctrl-C, and the findings until then are printed.
"""

_CLEAR_HELP = """
Clear a store: afterwards no engine finds any of its blocks.

Disk tier: if an engine has the file open, the command asks it to clear, which takes about a second;
otherwise the command clears the file itself. The bytes stay in the file until they are overwritten:
to delete them, end the engine and remove the file.

Fs tier: the command removes the files, also while engines run. It does not remove what a live
engine has stored since a reset of its cache: no other engine can find those blocks.

Server: the command removes the keys or objects, also while engines run. An engine takes a block
that it has looked up within the last half minute for present; its load then fails, and the block is
computed.

Exit code 0: cleared; 1: not confirmed, or an engine did not respond in time; 2: neither --yes nor a
terminal to ask on; 130: ended by Ctrl-C; what was removed until then stays removed.
"""

_GC_HELP = """
Tidy up the directory of an fs tier.

Reclaims what dead engines left, counts all blocks again, and removes namespaces that no live engine
uses and that were not used for an hour. It shows these namespaces and asks before it removes them.
Engines may run meanwhile, but store nothing while the command counts.

\b
    kvtier store gc /mnt/shared/kv --dry-run           look only
    kvtier store gc /mnt/shared/kv --older-than 30d    remove what was not used for 30 days
    kvtier store gc /mnt/shared/kv --older-than 30d --yes     for cron

Exit code 0: done; 1: not confirmed, or the ledger stayed locked for too long; 2: wrong input, no
such directory, or neither --yes nor a terminal to ask on, and then nothing is done; 130: ended by
Ctrl-C.
"""

_INIT_HELP = """
Make a directory the root of an fs tier, or make an emptied one a root again.

Engines create a missing directory when they start. A directory that is emptied or removed while
they run may be a missing mount, so they do not recreate it. Run this command to confirm that the
directory is the right one: engines then use it again within seconds.

Existing blocks stay. A directory that holds other things is refused. Root acts as the user who owns
the directory.

Exit code 0: the directory is a root now; 1: an engine kept the ledger locked for too long; 2: the
directory cannot become a root, or no permission.
"""

_SERVE_HELP = """
Tell routers which blocks a shared tier has, over HTTP. Reads only.

One process answers for all engines that share the tier, so that none of them has to announce its
blocks. It lists the tier every few seconds.

\b
    kvtier store serve /mnt/shared/kv --port 8099
    curl localhost:8099/check_blocks -d '{"block_hashes": [17, 4711]}'

POST /check_blocks takes hashes as in events, numbers of 64 bits, or as hexadecimal digits, and
answers with the positions of those that exist, as half-open ranges. Everyone who can reach the
port can ask, but learns no tokens. docs/events.md says more.

Exit code 2: no such store, or the port is in use; 130: ended by Ctrl-C.
"""

store_app = typer.Typer(
    name="store", help=_HELP, no_args_is_help=True, rich_markup_mode=None, add_completion=False
)

_Path = Annotated[
    str,
    typer.Argument(
        metavar="PATH",
        help="The slab file of a disk tier, or the directory of an fs tier.",
        show_default=False,
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
    limit: Annotated[
        int, typer.Option(metavar="N", help="List at most N blocks; 0: all.", min=0)
    ] = 100,
    namespace: _Namespace = None,
    sort: Annotated[
        str, typer.Option(metavar="ORDER", help="recent, oldest (by last use), or place.")
    ] = "recent",
    json: _Json = False,
) -> None:
    def work() -> int:
        from kvtier.cli.store.commands import list_blocks
        from kvtier.tiering.inspection import Order

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
        typer.Option(metavar="SIZE", help="Read at most this much per second, such as 200MB."),
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
    yes: Annotated[bool, typer.Option("--yes", help="Do not ask for confirmation.")] = False,
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
        str,
        typer.Argument(
            metavar="PATH",
            help="The directory of an fs tier, its root_dir.",
            show_default=False,
        ),
    ],
    older_than: Annotated[
        str | None,
        typer.Option(
            metavar="TIME",
            help="Remove only what was not used for this long: 90m, 12h, 30d, 4w. Default: 1h, "
            "or 0s if --namespace is given.",
        ),
    ] = None,
    namespace: Annotated[
        list[str] | None,
        typer.Option(
            "--namespace",
            metavar="HEX",
            help="Remove only this namespace: a fingerprint, or its first digits. May be given "
            "several times.",
        ),
    ] = None,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Change nothing; show what would be removed.")
    ] = False,
    yes: Annotated[bool, typer.Option("--yes", help="Do not ask for confirmation.")] = False,
    json: _Json = False,
) -> None:
    def work() -> int:
        from kvtier.cli.store.commands import collect_garbage

        wanted = [start for start in map(_checked_namespace, namespace or ()) if start is not None]
        age = _checked_age(older_than or ("0s" if wanted else "1h"))
        return collect_garbage(path, wanted, age, is_dry=dry_run, is_sure=yes, as_json=json)

    _end_with(path, work)


@store_app.command("init", help=_INIT_HELP)
def _init(
    path: Annotated[
        str,
        typer.Argument(
            metavar="PATH",
            help="The directory of an fs tier, its root_dir. Its parent directory must exist.",
            show_default=False,
        ),
    ],
    json: _Json = False,
) -> None:
    def work() -> int:
        from kvtier.cli.store.commands import init

        return init(path, as_json=json)

    _end_with(path, work)


@store_app.command("serve", help=_SERVE_HELP)
def _serve(
    path: _Path,
    port: Annotated[
        int, typer.Option("--port", metavar="N", help="0: any free one.", min=0, max=65_535)
    ] = 8099,
    host: Annotated[
        str, typer.Option(metavar="ADDRESS", help="Address to listen on.")
    ] = "127.0.0.1",
    refresh: Annotated[
        float, typer.Option(metavar="SECONDS", help="Pause between two lists.", min=0.1)
    ] = 5.0,
    namespace: _Namespace = None,
) -> None:
    def work() -> int:
        from kvtier.cli.store.serving import serve

        serve(path, _checked_namespace(namespace), host, port, refresh)
        return 0

    _end_with(path, work)


# --- values of options -------------------------------------------------------------------------


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
    try:
        return parse_duration(given)
    except DurationError as error:
        raise typer.BadParameter(f'"{given}": {error}', param_hint="--older-than") from None


class DurationError(ValueError):
    """The text is not a length of time. The message says what to write instead."""


def parse_duration(text: str) -> int:
    """Return the seconds of a length of time such as `90m`, `12h` or `7d`."""
    match = _DURATION.fullmatch(text.strip().lower())
    if match is None or match[2] not in _DURATION_UNITS:
        raise DurationError(
            f"Write a whole number and one of {', '.join(_DURATION_UNITS)}, such as 90m, 12h or 7d"
        )
    return int(match[1]) * _DURATION_UNITS[match[2]]


def _checked_timeout(given: float) -> float:
    if not math.isfinite(given):
        raise typer.BadParameter(f"{given}: give a number of seconds", param_hint="--timeout")
    return given


# --- exit codes --------------------------------------------------------------------------------


def _end_with(path: str, work: Callable[[], int]) -> None:
    """Run the command and exit with its code. Prints one sentence for an error."""
    try:
        code = _exit_code(path, work)
    except KeyboardInterrupt:
        code = 128 + signal.SIGINT
    raise typer.Exit(code)


def _exit_code(path: str, work: Callable[[], int]) -> int:
    # Imported here and in `work`, because `kvtier --help` does not need numpy.
    from kvtier.cli.output import CannotServe, CannotWrite, NobodyReads, note
    from kvtier.cli.store.terminal import explain_os_error, warnings_as_notes
    from kvtier.config.errors import without_user_info
    from kvtier.tiering.inspection import InspectionRefused, InspectionTimedOut

    code = 2
    try:
        with warnings_as_notes():
            return work()
    except NobodyReads:
        return 128 + signal.SIGPIPE
    except InspectionTimedOut as problem:
        sentence, code = str(problem), 1
    except (InspectionRefused, CannotServe, CannotWrite) as problem:
        sentence = str(problem)
    except OSError as error:
        sentence = explain_os_error(path, error)
    note(f"kvtier store: {without_user_info(sentence)}")
    return code
