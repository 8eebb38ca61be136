"""`kvtier mooncake`: starts a pool on this machine for a trial, and lends memory to a pool."""

from __future__ import annotations

import json as json_text
import os
import re
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from ipaddress import IPv4Address
from pathlib import Path
from typing import IO, TYPE_CHECKING, Annotated, Any

import typer

if TYPE_CHECKING:
    from kvtier.tiering.mooncake.admin import PoolUse

__all__ = ["mooncake_app"]

_HELP = """
Start a Mooncake pool for a trial, or lend this machine's memory to a pool.

\b
    kvtier mooncake up --segment 4GiB         a pool on this machine, until Ctrl-C
    kvtier mooncake lend 64GiB --master 10.0.0.1:50051

Exit code 0: ended by SIGTERM; 1: a process of the pool has ended by itself; 2: wrong input, or
nothing can be started; 130: ended by Ctrl-C. docs/mooncake.md says how a pool for production is set
up.
"""

_UP_HELP = """
Start a pool on this machine for a trial: a master, and with --segment a process that lends memory.

\b
    kvtier mooncake up --segment 4GiB         what engines on this machine need
    kvtier mooncake up                        engines lend the memory themselves
    kvtier mooncake up --host 10.0.0.1        for engines on other machines, too
    kvtier mooncake up --json | jq .secondary_tiers

It prints the process ids, the ports, and the entry of secondary_tiers for engines; then how full
the pool is, whenever that has changed. Nothing is kept: with the pool, its blocks are gone.

A pool asks nobody for a password. The master listens on --host; what lends memory, and the
metadata server (--metadata-port), listen on all addresses of the machine, whatever they are told.
If one of the addresses is public, --allow-public is needed.

Exit code 0: ended by SIGTERM; 1: a process of the pool has ended by itself; 2: wrong input, a port
that is in use, no room, or Mooncake is not installed; 130: ended by Ctrl-C.
"""

_LEND_HELP = """
Lend memory of this machine to a pool, until SIGTERM or Ctrl-C. Needs no GPU and no engine.

\b
    kvtier mooncake lend 64GiB --master 10.0.0.1:50051
    kvtier mooncake lend 64GiB --master 10.0.0.1:50051 --protocol rdma --devices mlx5_0

At the end it takes its leave, so that engines do not look for its blocks. If the master is
restarted, it joins again by itself. It listens on all addresses of the machine, and asks nobody for
a password: with a public address, --allow-public is needed.

Exit code 0: ended by SIGTERM; 2: wrong input, no such memory, no such master, or Mooncake is not
installed; 130: ended by Ctrl-C.
"""

_START_PATIENCE_S = 30.0
_END_PATIENCE_S = 5.0
_LOOK_EVERY_S = 2.0
_END_WITH_PARENT = """
import ctypes, os, signal, sys
PR_SET_PDEATHSIG = 1
ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
os.execv(sys.argv[1], sys.argv[1:])
"""
"""Makes a process of the command after it, which the kernel kills when its parent ends."""

mooncake_app = typer.Typer(name="mooncake", help=_HELP, no_args_is_help=True, rich_markup_mode=None)

_Public = Annotated[
    bool, typer.Option("--allow-public", help="Allow addresses that the internet can reach.")
]
_Json = Annotated[bool, typer.Option("--json", help="Print one JSON document when it runs.")]


@dataclass(frozen=True)
class _Wanted:
    """The options of `up`."""

    host: str
    port: int
    admin_port: int
    metadata_port: int | None
    segment_bytes: int
    allow_public: bool
    as_json: bool

    @property
    def master(self) -> str:
        return f"{self.host}:{self.port}"

    @property
    def metrics_url(self) -> str:
        return f"http://{self.host}:{self.admin_port}/metrics"

    def use(self) -> PoolUse:
        """How full the pool is. Raises `ServerFailure` if the master does not serve."""
        from kvtier.tiering.mooncake.admin import MasterAdmin

        return MasterAdmin((self.host, self.admin_port), _LOOK_EVERY_S).use()

    @property
    def metadata_url(self) -> str | None:
        if self.metadata_port is None:
            return None
        return f"http://{self.host}:{self.metadata_port}/metadata"

    def ports(self) -> dict[str, int]:
        """Those that the master listens on, by option."""
        ports = {"--port": self.port, "--admin-port": self.admin_port}
        if self.metadata_port is not None:
            ports["--metadata-port"] = self.metadata_port
        return ports

    def entry(self) -> dict[str, Any]:
        """For the engines' `secondary_tiers`."""
        from kvtier.tiering.mooncake.admin import DEFAULT_PORT

        entry: dict[str, Any] = {"type": "mooncake", "master": self.master}
        if self.admin_port != DEFAULT_PORT:
            entry["admin"] = f"{self.host}:{self.admin_port}"
        if self.metadata_url is not None:
            entry["metadata"] = self.metadata_url
        if not self.segment_bytes:
            entry["segment_bytes"] = "4GiB"
        if self.allow_public:
            entry["allow_public"] = True
        return entry


class _Problem(Exception):
    """Nothing can be started. The message has the remedy."""


class _HasEnded(Exception):
    """A process has ended by itself. The message has its last lines."""


class _Told(Exception):
    """SIGTERM has come."""


@mooncake_app.command("up", help=_UP_HELP)
def _up(
    host: Annotated[
        str, typer.Option(metavar="ADDRESS", help="The master's IPv4 address.")
    ] = "127.0.0.1",
    port: Annotated[int, typer.Option(metavar="N", help="The master's port.")] = 50051,
    admin_port: Annotated[int, typer.Option(metavar="N", help="The port of its metrics.")] = 9003,
    metadata_port: Annotated[
        int | None,
        typer.Option(
            metavar="N",
            help="Also start a metadata server. Engines of kvtier need none.",
            show_default=False,
        ),
    ] = None,
    segment: Annotated[
        str, typer.Option(metavar="SIZE", help="Memory that a process of its own lends.")
    ] = "0",
    allow_public: _Public = False,
    json: _Json = False,
) -> None:
    from kvtier.config.sizes import SizeError, parse_size

    try:
        num_bytes = parse_size(segment, may_be_zero=True)
    except SizeError as error:
        raise typer.BadParameter(f"{segment}: {error}", param_hint="--segment") from None
    for option, number in (("--port", port), ("--admin-port", admin_port)):
        _require_port(option, number)
    if metadata_port is not None:
        _require_port("--metadata-port", metadata_port)
    wanted = _Wanted(host, port, admin_port, metadata_port, num_bytes, allow_public, json)
    if len(set(wanted.ports().values())) < len(wanted.ports()):
        raise typer.BadParameter("give each of the ports another number")
    _end_with("up", lambda: _run_up(wanted))


def _require_port(option: str, number: int) -> None:
    if not 0 < number < 65_536:
        raise typer.BadParameter(f"{number} is not a port: 1 to 65535", param_hint=option)


@mooncake_app.command("lend", help=_LEND_HELP)
def _lend(
    size: Annotated[str, typer.Argument(metavar="SIZE", help="Such as 64GiB.")],
    master: Annotated[
        str, typer.Option(metavar="HOST:PORT", help="The master, or etcd://HOST:PORT;HOST:PORT.")
    ],
    hostname: Annotated[
        str | None,
        typer.Option(
            metavar="NAME", help="How other hosts reach this machine.", show_default=False
        ),
    ] = None,
    metadata: Annotated[
        str | None,
        typer.Option(metavar="URL", help="The pool's metadata server.", show_default=False),
    ] = None,
    protocol: Annotated[
        str | None, typer.Option(metavar="NAME", help="tcp or rdma.", show_default=False)
    ] = None,
    devices: Annotated[
        str | None, typer.Option(metavar="NAMES", help="RDMA devices.", show_default=False)
    ] = None,
    allow_public: _Public = False,
    json: _Json = False,
) -> None:
    keys: dict[str, Any] = {"master": master, "segment_bytes": size, "allow_public": allow_public}
    keys |= {"hostname": hostname, "metadata": metadata, "protocol": protocol, "devices": devices}
    _end_with("lend", lambda: _run_lend(keys, as_json=json))


def _end_with(command: str, work: Callable[[], int]) -> None:
    # Imported here because `kvtier --help` needs none of it.
    from kvtier.cli.output import note, run_to_exit_code
    from kvtier.config import ConfigError
    from kvtier.tiering.base import TierRefused
    from kvtier.tiering.remote.errors import ServerFailure

    def until_told() -> int:
        def told(_number: int, _frame: object) -> None:
            raise _Told

        former = signal.signal(signal.SIGTERM, told)
        try:
            return work()
        except _Told:
            return 0
        except _HasEnded as ended:
            note(f"kvtier mooncake {command}: {ended}")
            return 1
        finally:
            signal.signal(signal.SIGTERM, former)

    problems = (_Problem, ConfigError, TierRefused, ServerFailure)
    raise typer.Exit(run_to_exit_code(f"mooncake {command}", until_told, problems))


# --- lend -----------------------------------------------------------------------------------------


def _run_lend(keys: dict[str, Any], *, as_json: bool) -> int:
    from kvtier.cli.output import finish, write_line
    from kvtier.config.sizes import as_size
    from kvtier.tiering.mooncake.options import MooncakeOptions
    from kvtier.tiering.mooncake.pool import (
        Pool,
        load_library,
        require_memory,
        require_private_network,
    )

    options = MooncakeOptions.parse(keys)
    options.require_fitting()
    if not options.segment_bytes:
        raise _Problem("SIZE is 0: give the memory to lend, such as 64GiB")
    library = load_library()
    require_private_network(options)
    require_memory(options.segment_bytes)
    pool = Pool(options, library, memoryview(bytearray(1)))
    try:
        pool.start()
        with pool.use() as membership:
            name = membership.hostname
        if as_json:
            document = {"pid": os.getpid(), "name": name, "bytes": options.segment_bytes}
            write_line(json_text.dumps(document))
        else:
            write_line(f"{name} lends {as_size(options.segment_bytes)} to {options.where}")
        finish()
        while True:
            signal.pause()
    finally:
        with _undisturbed():
            pool.interrupt()
            pool.close()


@contextmanager
def _undisturbed() -> Iterator[None]:
    """Ignore further signals to end, so that what was begun comes to its end."""
    former = {number: signal.signal(number, signal.SIG_IGN) for number in _ENDS}
    try:
        yield
    finally:
        for number, handler in former.items():
            signal.signal(number, handler)


_ENDS = (signal.SIGINT, signal.SIGTERM)


# --- up -------------------------------------------------------------------------------------------


class _Process:
    """A running process of the pool."""

    def __init__(self, name: str, process: subprocess.Popen[bytes], log: IO[bytes]) -> None:
        self.name = name
        self.pid = process.pid
        self._process, self._log = process, log

    def require_running(self) -> None:
        """Raise `_HasEnded` with the reason, as far as it is known."""
        code = self._process.poll()
        if code is None:
            return
        self._log.seek(max(0, self._log.seek(0, os.SEEK_END) - 20_000))
        lines = self._log.read().decode(errors="replace").splitlines()
        # The library marks lines that are no errors with a letter before date and time.
        errors = [line for line in lines if not re.match(r"[IW]\d{4} |WARNING: ", line)]
        how = f"killed by signal {-code}" if code < 0 else f"exit code {code}"
        said = f": {' / '.join(errors[-3:])}" if errors and code > 0 else ""
        raise _HasEnded(f"the {self.name} has ended ({how}){said}. The pool is ended")

    def kill(self) -> None:
        self._process.kill()
        self._process.wait()

    def end(self) -> None:
        """Let it end in an orderly way, if it does so within some seconds. Idempotent."""
        self._process.terminate()
        try:
            self._process.wait(_END_PATIENCE_S)
        except subprocess.TimeoutExpired:  # it stands still
            self.kill()


@contextmanager
def _process(name: str, command: list[str], environment: dict[str, str]) -> Iterator[_Process]:
    """A process that ends with the context, and with this process, however that ends."""
    with tempfile.TemporaryFile() as log:
        process = _Process(
            name,
            subprocess.Popen(
                [sys.executable, "-c", _END_WITH_PARENT, *command],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=log,
                env=environment,
                # Ctrl-C reaches this process alone, which then ends the others in their order.
                process_group=0,
            ),
            log,
        )
        try:
            yield process
        except _HasEnded:  # the pool is lost: nothing is worth waiting for
            process.kill()
            raise
        finally:
            with _undisturbed():
                process.end()


def _run_up(wanted: _Wanted) -> int:
    from kvtier.cli.output import finish, write_line
    from kvtier.tiering.mooncake.pool import load_library, require_memory

    own_environment = os.environ.copy()  # `load_library` adds to it
    program = Path(load_library().__file__).parent / "mooncake_master"
    _require_addresses(wanted)
    require_memory(wanted.segment_bytes)
    with ExitStack() as stack:
        master = _process("master", _master_command(program, wanted), own_environment)
        processes = [stack.enter_context(master)]
        _wait_until(lambda: wanted.use().num_segments >= 0, processes)
        if wanted.segment_bytes:
            lender = _process("process that lends", _lend_command(wanted), own_environment)
            processes.append(stack.enter_context(lender))
            _wait_until(lambda: wanted.use().num_segments > 0, processes)
        if wanted.as_json:
            write_line(json_text.dumps(_as_document(wanted, processes)))
        else:
            for line in _as_lines(wanted, processes):
                write_line(line)
        finish()
        _show_state(wanted, processes)
    return 0


def _master_command(program: Path, wanted: _Wanted) -> list[str]:
    flags = {
        "rpc_address": wanted.host,
        "rpc_port": wanted.port,
        "metrics_host": wanted.host,
        "metrics_port": wanted.admin_port,
        "enable_metric_reporting": "false",  # a line of log every ten seconds
    }
    if wanted.metadata_port is not None:
        flags |= {
            "enable_http_metadata_server": "true",
            "http_metadata_server_host": wanted.host,
            "http_metadata_server_port": wanted.metadata_port,
            "enable_metadata_cleanup_on_timeout": "true",
        }
    return [str(program), *(f"-{name}={value}" for name, value in flags.items())]


def _lend_command(wanted: _Wanted) -> list[str]:
    words = [sys.executable, "-m", "kvtier", "mooncake", "lend", str(wanted.segment_bytes)]
    words += ["--master", wanted.master, "--hostname", wanted.host]
    if wanted.metadata_url is not None:
        words += ["--metadata", wanted.metadata_url]
    return [*words, "--allow-public"] if wanted.allow_public else words


def _require_addresses(wanted: _Wanted) -> None:
    """Raise `_Problem` if an address is not this machine's, is public, or has a port in use."""
    from kvtier.cli.output import CannotServe
    from kvtier.tiering.mooncake.pool import public_addresses

    try:
        address = IPv4Address(wanted.host)
    except ValueError:
        address = None
    if address is None or address.is_unspecified:
        raise _Problem(
            f"--host {wanted.host}: give one IPv4 address of this machine, which engines can reach"
        )
    listens_everywhere = bool(wanted.segment_bytes) or wanted.metadata_port is not None
    public = public_addresses() if listens_everywhere else []
    public = sorted({*public, *([wanted.host] if address.is_global else [])})
    if public and not wanted.allow_public:
        raise _Problem(
            f"the pool would listen on {', '.join(public)}, which the internet can reach, and asks "
            "nobody for a password. What lends memory, and the metadata server, listen on all "
            "addresses. Leave out --segment, --metadata-port and --host, or block the ports from "
            "outside (docs/mooncake.md lists them) and add --allow-public"
        )
    for option, port in wanted.ports().items():
        host = "0.0.0.0" if option == "--metadata-port" else wanted.host
        with socket.socket() as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                probe.bind((host, port))
                probe.listen()
            except OSError as error:
                reason = str(CannotServe.at(host, port, error))
                raise _Problem(reason.replace("--port", option)) from None


def _wait_until(is_so: Callable[[], bool], processes: list[_Process]) -> None:
    from kvtier.tiering.remote.errors import ServerFailure

    deadline = time.monotonic() + _START_PATIENCE_S
    while True:
        for process in processes:
            process.require_running()
        with suppress(ServerFailure):
            if is_so():
                return
        if time.monotonic() > deadline:
            raise _HasEnded(f"the {processes[-1].name} did not get ready. The pool is ended")
        time.sleep(0.05)


def _show_state(wanted: _Wanted, processes: list[_Process]) -> None:
    """Print a line whenever the pool has changed, until a signal, or a process has ended."""
    from kvtier.cli.output import finish, write_line

    shown = ""
    while True:
        for process in processes:
            process.require_running()
        if not wanted.as_json:
            line = _state(wanted)
            if line != shown:
                write_line(line)
                finish()
            shown = line
        time.sleep(_LOOK_EVERY_S)


def _state(wanted: _Wanted) -> str:
    from kvtier.config.sizes import as_size
    from kvtier.tiering.remote.errors import ServerFailure

    try:
        use = wanted.use()
    except ServerFailure:
        return "pool      the master does not answer"
    lent = f"{as_size(use.used_bytes)} of {as_size(use.capacity_bytes)}"
    return f"pool      objects: {use.num_objects:,}; {lent}; segments: {use.num_segments}"


def _as_document(wanted: _Wanted, processes: list[_Process]) -> dict[str, Any]:
    document: dict[str, Any] = {
        "master": {
            "pid": processes[0].pid,
            "address": wanted.master,
            "metrics_url": wanted.metrics_url,
        },
        "metadata": None,
        "segment": None,
        "secondary_tiers": [wanted.entry()],
    }
    if wanted.metadata_url is not None:
        listens = f"0.0.0.0:{wanted.metadata_port}"
        document["metadata"] = {"url": wanted.metadata_url, "listens_on": listens}
    if wanted.segment_bytes:
        segment = {"pid": processes[1].pid, "bytes": wanted.segment_bytes}
        document["segment"] = {**segment, "listens_on": "all addresses"}
    return document


def _as_lines(wanted: _Wanted, processes: list[_Process]) -> Iterator[str]:
    from kvtier.config.sizes import as_size

    yield f"master    process {processes[0].pid}, {wanted.master}, metrics at {wanted.metrics_url}"
    if wanted.metadata_url is not None:
        yield f"metadata  in the same process, {wanted.metadata_url}, listens on all addresses"
    if wanted.segment_bytes:
        lent = as_size(wanted.segment_bytes)
        yield f"segment   process {processes[1].pid} lends {lent}, listens on all addresses"
    else:
        yield "segment   none: engines lend memory (segment_bytes), or start with --segment 4GiB"
    entry = wanted.entry()
    if entry.keys() <= {"type", "master", "segment_bytes"}:
        flag = ":".join([entry["master"], *filter(None, [entry.get("segment_bytes")])])
        yield f"engines   kvtier vllm-config --cpu SIZE --mooncake {flag}"
    yield f"engines   secondary_tiers: {json_text.dumps([entry])}"
    yield "end       with Ctrl-C; the blocks in the pool are lost"
