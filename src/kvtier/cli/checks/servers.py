"""Checks of valkey and obj tiers: whether the server answers, and lets this user in.

Nothing is written to the server."""

from __future__ import annotations

from collections.abc import Iterator

from kvtier.cli.checks.finding import Finding, Status
from kvtier.config import ConfigError
from kvtier.tiering.obj import manager as obj_tier
from kvtier.tiering.obj.objects import BLOCKS, Objects, open_objects
from kvtier.tiering.obj.options import ObjOptions
from kvtier.tiering.remote.errors import NotAllowed, ServerFailure
from kvtier.tiering.valkey import manager as valkey_tier
from kvtier.tiering.valkey.options import ValkeyOptions
from kvtier.tiering.valkey.servers import connect_to

__all__ = ["check_obj_tier", "check_valkey_tier"]


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
