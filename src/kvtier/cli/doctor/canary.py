"""Sends blocks through one tier with the tier's own code, and measures how fast it is."""

from __future__ import annotations

import mmap
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from statistics import median
from typing import Any

from kvtier.cli.checks.finding import Finding, Status
from kvtier.cli.checks.options import CheckedTier, warnings_of_kvtier
from kvtier.config import ConfigError
from kvtier.config.sizes import as_size
from kvtier.tiering.factory import TierStartError
from kvtier.tiering.trial import TierTrial, TrialBlocks, TrialProblem

__all__ = ["TierSpeed", "TriedTier", "as_rate", "send_few", "try_tier"]

_TOTAL_BYTES = 64 << 20
_FEWEST_BLOCKS, _MOST_BLOCKS = 4, 256
_LOADED_FOR_S = 0.7
_NUM_LATENCIES = 5
_SAY_NOTHING = (".room", ".blocks")
"""Findings after which a trial still says more."""
_FIX_THAT = "Fix that, or remove the tier"


@dataclass(frozen=True, slots=True)
class TierSpeed:
    """What a tier did with a few blocks."""

    store_bytes_per_s: float
    load_bytes_per_s: float
    latency_s: float
    """Time to load one block, less the time for its bytes."""


@dataclass(slots=True)
class TriedTier:
    """One tier, and what was found."""

    at: str
    """The position of its entry, such as `secondary_tiers[0]`."""
    type: str
    is_full: bool = False
    speed: TierSpeed | None = None
    """None if no block came back."""
    findings: list[Finding] = field(default_factory=list)

    def as_json(self) -> dict[str, Any]:
        speed = None if self.speed is None else asdict(self.speed)
        return {"tier": self.at, "type": self.type, "full": self.is_full, "speed": speed}


def try_tier(
    tier: CheckedTier,
    extra_config: Mapping[str, Any],
    block_bytes: int,
    findings: Iterable[Finding],
) -> TriedTier:
    """Store blocks, find them, load them and compare them. `findings`: those of the checks before,
    which may make a trial pointless. Ctrl-C ends it, and still removes what was stored."""
    config = tier.config
    tried = TriedTier(config.at, config.type)
    name = f"{config.at}.canary"
    if tier.refusal is not None or _is_hopeless(config.at, findings):
        found = "no block was sent: see above"
        tried.findings.append(Finding(name, Status.PROBLEM, found, "Repair that first"))
        return tried
    count = min(max(_TOTAL_BYTES // block_bytes, _FEWEST_BLOCKS), _MOST_BLOCKS)
    with warnings_of_kvtier(f"{config.at}.warning") as said:
        problem = _attempt(tried, tier, TrialBlocks(count, block_bytes), extra_config)
        if tried.is_full and count > _FEWEST_BLOCKS:
            few = TrialBlocks(_FEWEST_BLOCKS, block_bytes)
            problem = _attempt(tried, tier, few, extra_config)
    if problem is not None:  # otherwise nothing that matters was said, or a check has said it, too
        tried.findings += [problem, *said]
    return tried


def _attempt(
    tried: TriedTier,
    tier: CheckedTier,
    blocks: TrialBlocks,
    extra_config: Mapping[str, Any],
    *,
    is_measured: bool = True,
) -> Finding | None:
    """Send the blocks, and note what was found. Returns the problem, if there is one."""
    name = f"{tried.at}.canary"
    tried.is_full = False
    try:
        with TierTrial(tier.planned, blocks, extra_config) as trial:
            came_back = _send_one(name, trial)
            if is_measured:
                tried.speed = _measure(trial)
    except TrialProblem as problem:
        tried.is_full = problem.is_full
        if problem.is_untried:
            return Finding(name, Status.WARNING, f"not tried: {problem}", problem.remedy)
        return Finding(name, Status.PROBLEM, str(problem), problem.remedy)
    except (ConfigError, TierStartError) as refused:
        return _refused_start(name, str(refused))
    tried.findings.append(came_back)
    return None


def send_few(tier: CheckedTier, extra_config: Mapping[str, Any], *, has_own: bool) -> Finding:
    """Send as few blocks as possible through the tier of a running engine, and do not measure.
    `has_own`: the engine has blocks there, and can evict them if the tier is full."""
    config = tier.config
    tried = TriedTier(config.at, config.type)
    blocks = TrialBlocks(_FEWEST_BLOCKS, mmap.PAGESIZE)
    with warnings_of_kvtier(f"{config.at}.warning"):  # the problem says as much
        problem = _attempt(tried, tier, blocks, extra_config, is_measured=False)
    if tried.is_full and has_own:
        found = "not stored: the tier is full, and the engine makes room with blocks of its own"
        return Finding(f"{config.at}.canary", Status.OK, found)
    return problem or tried.findings[0]


def _refused_start(name: str, sentence: str) -> Finding:
    if sentence.endswith(_FIX_THAT):  # the tier raised some error, whose text has any form
        found = sentence.removesuffix(_FIX_THAT).rstrip(". ")
        return Finding(name, Status.PROBLEM, found, _FIX_THAT)
    return Finding.of_refusal(name, sentence)


def _is_hopeless(at: str, findings: Iterable[Finding]) -> bool:
    """True if a check before has found that no block can be stored."""
    return any(
        finding.status is Status.PROBLEM
        or (finding.status is Status.WARNING and finding.name == f"{at}.url")  # does not answer
        for finding in findings
        if finding.name.startswith(f"{at}.") and not finding.name.endswith(_SAY_NOTHING)
    )


def _send_one(name: str, trial: TierTrial) -> Finding:
    num_before, _ = trial.look_up([0])
    if num_before:
        raise TrialProblem(
            "a block that was never stored was found",
            "Do not use this tier: its lookups are wrong. Report it to its author",
        )
    stored_s = trial.store([0])
    num_found, _ = trial.look_up([0])
    if not num_found:
        raise TrialProblem(
            "a block that was just stored is not found",
            "Check that its storage keeps what is written to it",
        )
    loaded_s = trial.load([0])
    size = as_size(trial.blocks.payload_bytes)
    return Finding(
        name,
        Status.OK,
        f"a block of {size} was stored ({_ms(stored_s)}), found, loaded ({_ms(loaded_s)}) and "
        "compared through its seal, and removed",
    )


def _measure(trial: TierTrial) -> TierSpeed:
    """Store the remaining blocks, and load them again and again for a while."""
    block_bytes = trial.blocks.payload_bytes
    numbers = range(1, trial.blocks.count)
    stored_s = trial.store(numbers)
    all_s = median(_repeatedly(lambda: trial.load(numbers)))
    one_s = median(trial.load([0]) for _ in range(_NUM_LATENCIES))
    rate = len(numbers) * block_bytes / all_s
    latency_s = 0.0
    if all_s > one_s:  # what all blocks take longer than one is the time for their bytes
        rate = (len(numbers) - 1) * block_bytes / (all_s - one_s)
        latency_s = max(one_s - block_bytes / rate, 0.0)
    return TierSpeed(len(numbers) * block_bytes / stored_s, rate, latency_s)


def _repeatedly(act: Callable[[], float]) -> Sequence[float]:
    seconds: list[float] = []
    until = time.monotonic() + _LOADED_FOR_S
    while not seconds or time.monotonic() < until:
        seconds.append(act())
    return seconds


def _ms(seconds: float) -> str:
    return f"{seconds * 1e3:.1f} ms"


def as_rate(bytes_per_s: float) -> str:
    """A speed for people."""
    return (
        f"{bytes_per_s / 1e9:.2f} GB/s" if bytes_per_s >= 1e8 else f"{bytes_per_s / 1e6:.1f} MB/s"
    )
