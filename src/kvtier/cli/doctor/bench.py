"""Runs `kvtier bench`: times tiers, and prints their speeds beside a physical limit."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median
from typing import Any

from kvtier.cli.checks.options import CheckedTier, checked
from kvtier.cli.checks.tiers import directory_of
from kvtier.cli.doctor.canary import as_rate
from kvtier.cli.doctor.source import WrongSource, read_source
from kvtier.cli.output import finish, note, write
from kvtier.cli.replay.options import require, size_of
from kvtier.cli.store.terminal import shown_share, warnings_as_notes
from kvtier.config import ConfigError
from kvtier.config.errors import printable
from kvtier.config.sizes import as_size
from kvtier.replay.calibration import NotMeasured, calibrate, copy_rate
from kvtier.replay.settings import SettingError
from kvtier.tiering.factory import TierStartError
from kvtier.tiering.trial import TierTrial, TrialBlocks, TrialProblem

__all__ = ["BenchWishes", "run_bench"]

_NUM_ROUNDS = 3
_NUM_LOOKUPS = 1024
_NUM_LATENCIES = 9
_LIMIT_BYTES = 512 << 20
_LIMIT_S = 6.0
_PATIENCE_S = 120.0
_MOST_BYTES = 16 << 30
_PLACE_KEYS = {
    "disk": "path",
    "fs": "root_dir",
    "valkey": "url",
    "obj": "url",
    "mooncake": "master",
}
_THREAD_KEYS = {
    "disk": ("io_threads",),
    "fs": ("n_read_threads", "n_write_threads"),
    "valkey": ("connections",),
    "obj": ("concurrency",),
    "mooncake": ("connections",),
}
_ON_SERVERS = ("url", "master")
"""Keys that --url gives."""


@dataclass(frozen=True, slots=True, kw_only=True)
class BenchWishes:
    """The options, as the user has written them."""

    tiers: Sequence[str]
    config: str | None
    path: str | None
    url: str | None
    block: str
    size: str
    threads: int | None
    job_blocks: int


@dataclass(frozen=True, slots=True)
class Limit:
    """What this machine can do at best."""

    of: str
    """What was measured."""
    read_bytes_per_s: float
    write_bytes_per_s: float


@dataclass(frozen=True, slots=True)
class Timed:
    """One tier. Rates are medians of three rounds."""

    tier: str
    type: str
    block_bytes: int
    stores: float
    """Bytes per second."""
    loads: float
    """Bytes per second."""
    lookups: float
    """Answers per second about blocks that are not there, which the storage has to be asked for."""
    one_block_s: float
    """Median seconds to load one block."""
    limit: Limit

    def as_json(self) -> dict[str, Any]:
        return {
            **asdict(self),
            "stores_of_limit": self.stores / self.limit.write_bytes_per_s,
            "loads_of_limit": self.loads / self.limit.read_bytes_per_s,
        }

    def lines(self) -> Iterator[str]:
        limit = self.limit
        yield f"{self.tier} ({self.type}), blocks of {as_size(self.block_bytes)}"
        for name, rate, most in (
            ("stores", self.stores, limit.write_bytes_per_s),
            ("loads", self.loads, limit.read_bytes_per_s),
        ):
            share = f"{rate / most:5.2f} of {as_rate(most)}, {limit.of}"
            yield f"  {name:10}{as_rate(rate):>12}   {share}"
        yield f"  {'lookups':10}{self.lookups:>10,.0f}/s   of blocks that are not there"
        yield f"  {'one block':10}{self.one_block_s * 1e3:>9.2f} ms"


def run_bench(wishes: BenchWishes, *, as_json: bool) -> int:
    """Time the tiers, and print the result. Returns the exit code. Raises `SettingError`,
    `WrongSource` and `ConfigError` for what the user can change."""
    block_bytes, num_blocks = _blocks_of(wishes)
    extra_config = _extra_config_of(wishes, num_blocks * block_bytes)
    chosen = _chosen(wishes, extra_config)
    timed: list[Timed] = []
    failed: list[dict[str, str]] = []
    limits: dict[Path | None, Limit] = {}
    for tier in chosen:
        blocks = TrialBlocks(num_blocks, block_bytes)
        directory = directory_of(tier.options)
        name = tier.config.at
        try:
            if directory not in limits:
                limits[directory] = _limit_of(directory)
            with warnings_as_notes("kvtier bench"):
                timed.append(_time(tier, blocks, extra_config, limits[directory], wishes))
        except TrialProblem as problem:
            failed.append({"tier": name, "found": str(problem), "remedy": problem.remedy})
        except (ConfigError, TierStartError) as refused:
            found = str(refused).removeprefix(f"{name}: ")
            failed.append({"tier": name, "found": found, "remedy": ""})
    if as_json:
        document = {"tiers": [each.as_json() for each in timed], "failed": failed}
        write(json.dumps(document, indent=2) + "\n")
    else:
        write("".join(f"{printable(line)}\n" for each in timed for line in each.lines()))
    for failure in failed:
        note("kvtier bench: {tier}: {found}".format(**failure))
        if failure["remedy"]:
            note(f"  -> {failure['remedy']}")
    finish()
    return int(bool(failed))


# --- options -----------------------------------------------------------------------------------


def _blocks_of(wishes: BenchWishes) -> tuple[int, int]:
    """The bytes of one block, and how many there are."""
    page = os.sysconf("SC_PAGE_SIZE")
    block_bytes = size_of(wishes.block, "--block")
    size = size_of(wishes.size, "--size")
    if block_bytes < page or block_bytes % page:
        raise SettingError("--block", f'"{wishes.block}": give a multiple of {page} bytes')
    least = block_bytes * _NUM_ROUNDS
    if not least <= size <= _MOST_BYTES:
        raise SettingError(
            "--size",
            f'"{wishes.size}": give from {as_size(least)}, three blocks, to {as_size(_MOST_BYTES)}',
        )
    require(wishes.job_blocks, "--job-blocks", "a whole number, 1 or more")
    if wishes.threads is not None:
        require(wishes.threads, "--threads", "a whole number, 1 or more")
    return block_bytes, size // block_bytes


def _extra_config_of(wishes: BenchWishes, size: int) -> dict[str, Any]:
    """The user's keys, or those of one tier with defaults."""
    if wishes.config is not None:
        for option, value in (("--path", wishes.path), ("--url", wishes.url)):
            if value is not None:
                raise SettingError(option, "give either this or --config")
        extra_config = dict(read_source(wishes.config).extra_config)
    else:
        extra_config = {"cpu_bytes_to_use": size, "secondary_tiers": [_entry_of(wishes, size)]}
    entries = extra_config.get("secondary_tiers")
    if wishes.threads is not None and isinstance(entries, list):
        extra_config["secondary_tiers"] = [
            entry | dict.fromkeys(_THREAD_KEYS.get(str(entry.get("type")), ()), wishes.threads)
            if isinstance(entry, dict)
            else entry
            for entry in entries
        ]
    return extra_config


def _entry_of(wishes: BenchWishes, size: int) -> dict[str, Any]:
    if len(wishes.tiers) != 1:
        raise WrongSource(
            "which tiers? Without --config, give exactly one, such as "
            "`kvtier bench disk --path /mnt/nvme`"
        )
    (kind,) = wishes.tiers
    key = _PLACE_KEYS.get(kind)
    if key is None:
        raise SettingError(
            "TIER", f'"{kind}" needs --config; without it, give one of {", ".join(_PLACE_KEYS)}'
        )
    option, place = ("--url", wishes.url) if key in _ON_SERVERS else ("--path", wishes.path)
    if place is None:
        raise SettingError(option, f"the tier {kind} needs it")
    other, unused = ("--path", wishes.path) if key in _ON_SERVERS else ("--url", wishes.url)
    if unused is not None:
        raise SettingError(other, f"the tier {kind} has none: give {option} alone")
    if key in _ON_SERVERS:
        return {"type": kind, key: place}
    path = Path(place).absolute()
    if kind == "disk":
        if not path.is_dir():
            raise SettingError(option, f'"{place}" is not a directory: give one that exists')
        path /= "kvtier-bench.slab"
    return {"type": kind, key: str(path), "max_bytes": 4 * size + (256 << 20)}


def _chosen(wishes: BenchWishes, extra_config: Mapping[str, Any]) -> list[CheckedTier]:
    tiers = checked(extra_config).tiers
    for tier in tiers:
        if tier.refusal is not None:
            raise ConfigError(tier.refusal)
    if wishes.config is None or not wishes.tiers:
        found = tiers
    else:
        known = [{tier.config.type, str(tier.config.position)} for tier in tiers]
        for name in wishes.tiers:
            if not any(name in names for names in known):
                given = ", ".join(tier.config.type for tier in tiers) or "none"
                raise SettingError("TIER", f'"{name}": the tiers of --config are {given}')
        found = [
            tier
            for tier, names in zip(tiers, known, strict=True)
            if names.intersection(wishes.tiers)
        ]
    if not found:
        raise WrongSource("the configuration has no tier below host memory: add secondary_tiers")
    return found


# --- measuring ---------------------------------------------------------------------------------


def _limit_of(directory: Path | None) -> Limit:
    """What the disk does, or host memory if there is none."""
    if directory is None:
        rate = copy_rate()
        return Limit("one thread's copy in host memory", rate, rate)
    with shown_share() as show:
        try:
            disk = calibrate(str(directory), show, _LIMIT_BYTES, _LIMIT_S)
        except NotMeasured as reason:
            found, _, remedy = str(reason).rpartition(": ")
            raise TrialProblem(f"the disk could not be measured: {found}", remedy) from None
    how = "the disk with direct I/O" if disk.is_direct else "the disk with the page cache"
    return Limit(how, disk.read_bytes_per_s, disk.write_bytes_per_s)


def _time(
    tier: CheckedTier,
    blocks: TrialBlocks,
    extra_config: Mapping[str, Any],
    limit: Limit,
    wishes: BenchWishes,
) -> Timed:
    shares = [range(first, blocks.count, _NUM_ROUNDS) for first in range(_NUM_ROUNDS)]
    with shown_share() as show:
        num_done = 0

        def rate(move: Callable[[Sequence[int], int], float], share: Sequence[int]) -> float:
            nonlocal num_done
            seconds = move(share, wishes.job_blocks)
            num_done += 1
            show(num_done, 2 * _NUM_ROUNDS + 1)
            return len(share) * blocks.payload_bytes / seconds

        show(0, 2 * _NUM_ROUNDS + 1)
        with TierTrial(tier.planned, blocks, extra_config, _PATIENCE_S) as trial:
            stores = [rate(trial.store, share) for share in shares]
            loads = [rate(trial.load, share) for share in shares]
            singles = [trial.load([0]) for _ in range(_NUM_LATENCIES)]
            absent = range(blocks.count, blocks.count + _NUM_LOOKUPS)
            _, lookup_s = trial.look_up(absent)
    return Timed(
        tier.config.at,
        tier.config.type,
        blocks.payload_bytes,
        median(stores),
        median(loads),
        _NUM_LOOKUPS / lookup_s,
        median(singles),
        limit,
    )
