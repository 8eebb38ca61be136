"""Checks of valkey, obj and mooncake tiers: whether the server answers, and lets this user in.

Nothing is written to the server."""

from __future__ import annotations

from collections.abc import Iterator

from kvtier.cli.checks.finding import Finding, Status
from kvtier.config import ConfigError
from kvtier.config.sizes import as_size
from kvtier.tiering.base import TierRefused
from kvtier.tiering.mooncake.admin import MasterAdmin
from kvtier.tiering.mooncake.options import MooncakeOptions
from kvtier.tiering.mooncake.pool import (
    load_library,
    require_master,
    require_memory,
    require_private_network,
)
from kvtier.tiering.obj import manager as obj_tier
from kvtier.tiering.obj.objects import BLOCKS, Objects, open_objects
from kvtier.tiering.obj.options import ObjOptions
from kvtier.tiering.remote.errors import NotAllowed, ServerFailure
from kvtier.tiering.valkey import manager as valkey_tier
from kvtier.tiering.valkey.options import ValkeyOptions
from kvtier.tiering.valkey.servers import connect_to

__all__ = ["check_mooncake_tier", "check_obj_tier", "check_valkey_tier"]


def check_valkey_tier(at: str, options: ValkeyOptions) -> Iterator[Finding]:
    """Check one tier. `at`: the position of its entry, such as `secondary_tiers[0]`."""
    name, where = f"{at}.url", options.shown_url
    if options.has_secret:
        yield _secret_in_flag(f"{at}.password", "VALKEY_PASSWORD")
    try:
        servers = connect_to(options)
    except ImportError:
        yield _without_client(name, "valkey", valkey_tier.INSTALL)
        return
    except ConfigError as refused:
        yield Finding(name, Status.PROBLEM, str(refused), "Correct the URL")
        return
    try:
        complaints = valkey_tier.log_in(servers, options)
    except ServerFailure as failure:
        yield _of_failure(name, where, failure)
    else:
        yield Finding(name, Status.OK, f"{where} lets this user in")
        for complaint in complaints:
            found, _, remedy = complaint.rpartition(". ")
            yield Finding(f"{at}.maxmemory", Status.WARNING, f"{where}: {found}", remedy)


def check_obj_tier(at: str, options: ObjOptions) -> Iterator[Finding]:
    """Check one tier. `at`: the position of its entry, such as `secondary_tiers[0]`."""
    name, where = f"{at}.url", options.shown_url
    if options.secret_access_key is not None:
        yield _secret_in_flag(f"{at}.secret_access_key", "AWS_SECRET_ACCESS_KEY")
    directory = options.directory
    if directory is not None and directory.exists() and not directory.is_dir():
        found = f"{directory} is not a directory"
        yield Finding(name, Status.PROBLEM, found, options.what_to_check)
        return
    try:
        objects = open_objects(options, makes_directory=False)
    except ConfigError as refused:
        (problem,) = refused.problems
        found = f"{where}: got {problem.given}; allowed: {problem.allowed}"
        yield Finding(f"{at}.{problem.key}", Status.PROBLEM, found, problem.remedy)
        return
    except ImportError:
        yield _without_client(name, "obstore", obj_tier.INSTALL)
        return
    except Exception:  # the library's own errors, which may quote a secret
        if directory is None or directory.exists():
            found = f"{where} cannot be opened"
            yield Finding(name, Status.PROBLEM, found, options.what_to_check)
            return
        found = f"there is no directory {directory} yet: the engine makes it when it starts"
        yield Finding(name, Status.OK, found)
        yield from _without_size(at, options)
        return
    try:
        _list_some(objects)
    except ServerFailure as failure:
        yield _of_failure(name, where, failure)
    else:
        found = f"{where} can be listed; an engine tries at its start whether it may write"
        yield Finding(name, Status.OK, found)
    finally:
        objects.close()
    yield from _without_size(at, options)


def check_mooncake_tier(at: str, options: MooncakeOptions) -> Iterator[Finding]:
    """Check one tier. `at`: the position of its entry, such as `secondary_tiers[0]`."""
    name, where = f"{at}.master", options.where
    try:
        load_library()
        require_private_network(options)
        require_memory(options.segment_bytes)
    except TierRefused as refused:
        found, _, remedy = str(refused).rpartition(". ")
        yield Finding(at, Status.PROBLEM, found, remedy)
        return
    try:
        require_master(options)
    except ServerFailure as failure:
        found = f"{where}: {failure}; an engine would start without this tier, and try again"
        remedy = "Check the address, and that this machine reaches it"
        yield Finding(name, Status.WARNING, found, remedy)
        return
    yield from _room_of_pool(name, options)


def _room_of_pool(name: str, options: MooncakeOptions) -> Iterator[Finding]:
    admin = MasterAdmin.of(options)
    try:
        use = None if admin is None else admin.use()
    except ServerFailure:
        use = None
    if use is None:
        found = f"{options.where} answers; how large the pool is could not be asked"
        yield Finding(name, Status.OK, found)
        return
    lent = use.capacity_bytes + options.segment_bytes
    if not lent:
        yield Finding(
            name,
            Status.PROBLEM,
            f"{options.where} answers, but no host lends memory, so no block can be stored",
            "Let this engine lend some (segment_bytes), or start another host",
        )
        return
    found = (
        f"{options.where} answers: {use.num_segments} lend {as_size(use.capacity_bytes)}, of which "
        f"{as_size(use.used_bytes)} are used; this engine adds {as_size(options.segment_bytes)}"
    )
    yield Finding(name, Status.OK, found)


def _without_size(at: str, options: ObjOptions) -> Iterator[Finding]:
    if options.max_bytes is None:
        found = f"{options.shown_url} has no size: kvtier removes nothing there"
        remedy = "Give one, or add a lifecycle rule to the bucket"
        if options.directory is not None:
            remedy = "Give one"
        yield Finding(f"{at}.room", Status.WARNING, found, remedy)


def _secret_in_flag(name: str, variable: str) -> Finding:
    return Finding(
        name,
        Status.WARNING,
        "vLLM logs its flags when it starts, and with them this secret",
        f"Leave it out, and set {variable} in the engine's environment",
    )


def _list_some(objects: Objects) -> None:
    for _ in objects.below(f"{BLOCKS}/engines"):
        return


def _without_client(name: str, package: str, install: str) -> Finding:
    found = f"the Python package {package} is not installed, and the engine refuses to start"
    return Finding(name, Status.PROBLEM, found, f"Install it: {install}")


def _of_failure(name: str, where: str, failure: ServerFailure) -> Finding:
    if isinstance(failure, NotAllowed):
        return Finding(name, Status.PROBLEM, f"{where}: {failure}", failure.remedy)
    found = f"{where}: {failure}; an engine would start without this tier, and try again"
    return Finding(name, Status.WARNING, found, "Check the URL, and that this machine reaches it")
