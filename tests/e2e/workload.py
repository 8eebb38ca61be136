"""The workload of one life, drawn from its seed: an engine, its tiers, and its requests.

Plain data, drawn before the life begins.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from enum import StrEnum
from random import Random
from typing import Any

from kvtier.engine import EngineConfig, ModelConfig

__all__ = [
    "Abort",
    "Action",
    "Arrive",
    "Await",
    "Reset",
    "Setup",
    "Simple",
    "TierSetup",
    "WorkerSetup",
    "Workload",
    "draw",
]

MAX_PROMPT = 84
MAX_ANSWER = 8
MAX_TOTAL = MAX_PROMPT + MAX_ANSWER
VOCABULARY = 64
NUM_REQUESTS = 11

_FULL = ModelConfig(
    num_layers=2,
    hidden=32,
    num_heads=4,
    num_kv_heads=2,
    head_dim=8,
    mlp_hidden=48,
    vocab=VOCABULARY,
    max_tokens=128,
)
_HYBRID = replace(_FULL, windowed_layers=(0,), window=11)
_WIDER_WINDOW = replace(_FULL, num_layers=3, num_heads=2, windowed_layers=(0, 2), window=26)
_WINDOW_ONLY = replace(_FULL, windowed_layers=(0, 1), window=14)
_MODELS: tuple[tuple[ModelConfig, tuple[tuple[int, ...], ...]], ...] = (
    (_FULL, ((4,), (8,))),
    (_HYBRID, ((8, 4), (4, 8), (4, 4), (4, 6))),
    (_WIDER_WINDOW, ((8, 4), (4, 4), (6, 4))),
    (_WINDOW_ONLY, ((4,),)),
)
_MODEL_WEIGHTS = (3, 4, 2, 1)

_FAULT_RATES: dict[str, dict[str, float]] = {
    "calm": {},
    "slow": {"delay": 0.4, "reorder": 0.3},
    "lossy": {"fail": 0.1, "partial": 0.1, "corrupt": 0.5},
    "forgetful": {"drop": 0.08, "late_write": 0.2, "duplicate": 0.08},
    "wild": {
        "delay": 0.1,
        "reorder": 0.1,
        "drop": 0.03,
        "duplicate": 0.04,
        "fail": 0.05,
        "partial": 0.05,
        "late_write": 0.05,
        "hang": 0.03,
        "raise": 0.02,
        "raise_after": 0.03,
        "unknown_job": 0.02,
        "garbage": 0.02,
        "corrupt": 0.05,
        # The end of a life is not an event of it.
        "drain_jobs.hang": 0.0,
        "shutdown.hang": 0.0,
        "shutdown.raise": 0.0,
    },
}


@dataclass(frozen=True, slots=True)
class WorkerSetup:
    """How copies between device and host memory behave."""

    is_stepwise: bool
    """True: each copy is made at a poll drawn from the seed. False: threads make it at any time."""
    max_delay: int
    """Most polls before a copy is made."""
    refused: float
    """Share of jobs that are refused."""
    failed: float
    """Share of jobs that are accepted and fail."""


@dataclass(frozen=True, slots=True)
class TierSetup:
    """One tier below host memory."""

    weather: str
    entry: dict[str, Any]
    """Its entry in `secondary_tiers`."""


@dataclass(frozen=True, slots=True)
class Setup:
    """The engine and its tiers."""

    model: ModelConfig
    engine: EngineConfig
    cpu_blocks: int
    has_tiering: bool
    tiers: tuple[TierSetup, ...]
    worker: WorkerSetup
    step_s: float | None
    """Seconds of a step by the tiers' clock. None: the real clock."""
    options: dict[str, Any]
    """Further configuration keys."""


@dataclass(frozen=True, slots=True)
class Arrive:
    """A request arrives."""

    base: int
    """Prompts with the same base begin alike."""
    length: int
    ending: list[int]
    follows: int | None
    """Number of an earlier request whose prompt and answer begin this prompt, instead of a base."""
    max_tokens: int
    params: dict[str, Any] | None
    takes_used_id: bool
    """True: it gets the id of an earlier request, if that one has ended."""


@dataclass(frozen=True, slots=True)
class Abort:
    """A request is aborted, if it has not ended."""

    number: int | None
    """Number of the request; None: the first that loads within the next few steps."""


class Await(StrEnum):
    """What should be under way when a reset comes, if it occurs within a few steps."""

    NOTHING = "nothing"
    STORE = "a store"
    LOAD = "a load"


@dataclass(frozen=True, slots=True)
class Reset:
    """The cache is reset: nothing computed so far is valid any more."""

    brings_weights: bool
    """True if the weights change."""
    during: Await


class Simple(StrEnum):
    """Events without further data."""

    DROP_DEVICE_CACHE = "drop the device cache"
    GO_DARK = "tiers become black holes"
    RECOVER = "tiers recover"


_IN_THE_MIDST = (
    Abort(None),
    *(Reset(brings, during) for brings in (False, True) for during in (Await.STORE, Await.LOAD)),
)

Action = Arrive | Abort | Reset | Simple


@dataclass(frozen=True, slots=True)
class Workload:
    """One life."""

    seed: int
    setup: Setup
    actions: list[tuple[Action, int]] = field(repr=False)
    """Each event, with the number of steps that the engine takes after it."""


def draw(seed: int) -> Workload:
    """The workload of this seed. The same in every process."""
    chance = Random(f"life {seed}")
    setup = _draw_setup(chance)
    return Workload(seed, setup, list(_draw_actions(chance, setup)))


def _draw_setup(chance: Random) -> Setup:
    [(model, block_sizes)] = chance.choices(_MODELS, _MODEL_WEIGHTS)
    block_tokens = chance.choice(block_sizes)
    token_budget = chance.choice((8, 16, 24, 40))
    num_blocks = []
    for group, tokens in zip(model.groups, block_tokens, strict=True):
        if group.window is None:
            least = -(-MAX_TOTAL // tokens)
        else:
            least = -(-(group.window + 2 * token_budget) // tokens) + 2
        num_blocks.append(least + chance.choice((0, 1, 4, least, 3 * least)))
    engine = EngineConfig(
        block_tokens=block_tokens,
        num_blocks=tuple(num_blocks),
        token_budget=token_budget,
        max_running=chance.randint(2, 5),
        world_size=chance.choice((1, 1, 2)),
    )
    is_real_time = chance.random() < 0.12
    has_tiering = chance.random() < 0.85
    num_tiers = chance.choice((0, 1, 1, 1, 2)) if has_tiering else 0
    tiers = tuple(_draw_tier(chance, place, is_real_time) for place in range(num_tiers))
    options: dict[str, Any] = {
        "blocks_per_chunk": chance.choice((1, 2, 3)),
        "offload_prompt_only": chance.random() < 0.5,
        "eviction_policy": chance.choice(("lru", "lru", "arc")),
        "store_threshold": chance.choice((1, 1, 1, 1, 2)),
        "self_describing_kv_events": chance.random() < 0.4,
        "name_tier_in_events": True,
        "reset_scope": chance.choice(("all", "all", "all", "primary")),
        "shutdown_timeout_ms": 5000,
    }
    if not is_real_time:
        # Measured rates depend on the speed of this machine.
        options["prefill_tokens_per_s"] = 0
    return Setup(
        model=model,
        engine=engine,
        cpu_blocks=chance.choice((8, 14, 20, 30) if tiers else (6, 14, 40, 80)),
        has_tiering=has_tiering,
        tiers=tiers,
        worker=WorkerSetup(
            is_stepwise=not is_real_time,
            max_delay=chance.choice((0, 2, 6, 20)),
            refused=chance.choice((0.0, 0.0, 0.08)),
            failed=chance.choice((0.0, 0.0, 0.1, 0.25)),
        ),
        step_s=None if is_real_time else chance.choice((0.005, 0.02, 0.05)),
        options=options,
    )


def _draw_tier(chance: Random, place: int, is_real_time: bool) -> TierSetup:
    [weather] = chance.choices(list(_FAULT_RATES), (4, 2, 2, 2, 2))
    entry: dict[str, Any] = {
        "type": "FaultyExampleTier",
        "module_path": "tests.e2e.parts",
        "enable_kv_events": True,
        # So that requests can choose one of two tiers.
        "locality": ("LOCAL", "REMOTE")[place],
        "max_blocks": chance.choice((12, 200, 200)),
        "lookup_timeout_ms": chance.choice((40, 250)),
        "load_timeout_ms": chance.choice((100, 600)),
        "store_timeout_ms": chance.choice((200, 1000)),
        "max_pinned_share": chance.choice((0.25, 0.5, 1.0)),
        "fault_seed": chance.getrandbits(32),
        "fault_rates": _FAULT_RATES[weather],
    }
    if is_real_time:
        entry |= {"simulate_async": True, "latency_ms": chance.choice((0, 1, 4))}
    return TierSetup(weather, entry)


def _draw_actions(chance: Random, setup: Setup) -> Iterator[tuple[Action, int]]:
    has_black_holes = bool(setup.tiers) and chance.random() < 0.3
    num_requests = 0
    while num_requests < NUM_REQUESTS:
        kind = chance.random()
        num_steps = chance.choice((0, 0, 0, 1, 2, 3, 5, 8, 12))
        if kind < 0.5 or not num_requests:
            yield _draw_request(chance, num_requests), num_steps
            num_requests += 1
        elif kind < 0.65:
            action = _draw_interruption(chance, setup, num_requests)
            if action in _IN_THE_MIDST:
                # So that there is something to interrupt.
                yield Simple.DROP_DEVICE_CACHE, 0
                yield _draw_request(chance, num_requests), 0
                num_requests += 1
            yield action, num_steps
        elif kind < 0.72 and has_black_holes:
            yield chance.choice((Simple.GO_DARK, Simple.RECOVER)), num_steps
        else:
            yield Simple.DROP_DEVICE_CACHE, 0


def _draw_interruption(chance: Random, setup: Setup, num_requests: int) -> Abort | Reset:
    if chance.random() < 0.4:
        earlier = chance.randrange(max(0, num_requests - 4), num_requests)
        return Abort(chance.choice((earlier, None)))
    # Tiers that a reset spares would serve blocks of the old weights.
    can_bring_weights = setup.options["reset_scope"] == "all"
    return Reset(can_bring_weights and chance.random() < 0.5, chance.choice(list(Await)))


def _draw_request(chance: Random, num_before: int) -> Arrive:
    params: dict[str, Any] = {}
    if chance.random() < 0.05:
        params["skip"] = True
    if chance.random() < 0.08:
        params["max_offload_tokens"] = chance.randint(0, MAX_PROMPT)
    if chance.random() < 0.1:
        params["kv_load_tiers"] = chance.choice(
            ([], [{"locality": "LOCAL"}], ["STORAGE"], ["CPU", {"locality": "REMOTE"}])
        )
    return Arrive(
        base=chance.choice((0, 0, 0, 1, 2)),
        length=chance.choice((10, 24, 33, 40, 48, 56, 64, 72, 80)),
        ending=[chance.randrange(VOCABULARY) for _ in range(chance.choice((0, 1, 3)))],
        follows=chance.randrange(num_before) if num_before and chance.random() < 0.35 else None,
        max_tokens=chance.choice((1, 2, 4, MAX_ANSWER)),
        params=params or None,
        takes_used_id=chance.random() < 0.15,
    )
