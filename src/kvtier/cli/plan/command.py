"""Runs `kvtier plan` with the options as given, prints the result, and returns the exit code."""

from __future__ import annotations

import json
import logging
import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from importlib.util import find_spec
from pathlib import Path

from kvtier.cli.output import CannotWrite, finish, write
from kvtier.cli.plan.chart import as_png, as_svg
from kvtier.cli.plan.report import (
    Plan,
    Study,
    as_text,
    engine_as_text,
    panels,
    point_document,
)
from kvtier.cli.replay.command import explain_os_error
from kvtier.cli.replay.options import (
    by_name,
    engine_of,
    price_of,
    require,
    seconds_of,
    size_of,
    tiers_of,
)
from kvtier.cli.store.terminal import shown_share
from kvtier.config.errors import printable
from kvtier.cpu.policies.factory import CachePolicyFactory
from kvtier.observe.client import EngineNotFound, NoAnswer, ask, find_engine, find_engines
from kvtier.replay.plan import (
    NUMBER_BYTES,
    Point,
    Sizes,
    Sweep,
    Target,
    TierPlan,
    most_hits,
    read_model,
)
from kvtier.replay.settings import EngineSettings, ReplaySettings, SettingError, TierSettings
from kvtier.replay.trace import TraceError, open_trace

__all__ = ["PlanWishes", "run_engines", "run_plan"]

_ALL = "all"
_SHARE_OF_MOST = 0.95
"""Without a target, the recommended sizes have this share of the hits of the largest ones."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanWishes:
    """The options, as the user has written them."""

    model: str | None
    host: str
    host_speed: str
    tiers: list[str]
    conversation: int
    kv_dtype: str | None
    kv_bytes_per_token: str | None
    prefill: float | None
    prefill_times: str | None
    trace: str | None
    block_tokens: int | None
    gpu: str | None
    speed_up: float | None
    policy: str
    limit: int | None
    target_hits: float | None
    target_ttft: str | None
    costs_per_gb: list[str]
    ssd_tbw: list[str]
    svg: str | None
    png: str | None


def run_plan(wishes: PlanWishes, *, as_json: bool) -> int:
    """Print the plan. Raises `SettingError`, `ModelError` and `TraceError` for what the user can
    change."""
    _check(wishes)
    plan, settings = _plan_of(wishes)
    study = None
    if wishes.trace is not None:
        study = _study_of(wishes, wishes.trace, settings)
        _draw(wishes, study)
    if as_json:
        write(json.dumps(_document(plan, study), indent=2) + "\n")
    else:
        write(as_text(plan, study))
    finish()
    return 0


def _document(plan: Plan, study: Study | None) -> dict[str, object]:
    document: dict[str, object] = {
        "kv_bytes_per_token": plan.bytes_per_token,
        "is_upper_bound": plan.is_upper_bound,
        "conversation_tokens": plan.conversation_tokens,
        "computed_s": plan.computed_s,
        "tiers": [asdict(tier) for tier in plan.tiers],
        "sweep": [],
        "target": None,
        "recommendation": None,
        "unlimited_hit_percent": None,
    }
    if study is not None:
        document["unlimited_hit_percent"] = round(study.most_hits, 4)
        document["sweep"] = [
            {"swept": study.names[place], **point_document(study, point)}
            for place, curves in enumerate(study.curves)
            for curve in curves.values()
            for point in curve
        ]
        if study.target is not None:
            document["target"] = asdict(study.target)
        if study.recommended is not None:
            document["recommendation"] = point_document(study, study.recommended)
    return document


# --- options -----------------------------------------------------------------------------------


def _check(wishes: PlanWishes) -> None:
    """Refuse options that make no sense before anything is replayed."""
    for value, option in (
        (wishes.conversation, "--conversation"),
        (wishes.block_tokens, "--block-tokens"),
        (wishes.limit, "--limit"),
        (wishes.speed_up, "--speed-up"),
    ):
        if value is not None:
            require(value, option, "a number above 0, up to 1e12")
    if wishes.target_hits is not None and not 0 < wishes.target_hits <= 100:
        raise SettingError(
            "--target-hits", f"{wishes.target_hits:g}: give a percentage above 0, up to 100"
        )
    if wishes.trace is None:
        for option, given in (
            ("--block-tokens", wishes.block_tokens),
            ("--limit", wishes.limit),
            ("--policy", wishes.policy if wishes.policy == _ALL else None),
            ("--gpu", wishes.gpu),
            ("--speed-up", wishes.speed_up),
            ("--target-hits", wishes.target_hits),
            ("--target-ttft", wishes.target_ttft),
            ("--cost-per-gb", wishes.costs_per_gb or None),
            ("--ssd-tbw", wishes.ssd_tbw or None),
            ("--svg", wishes.svg),
            ("--png", wishes.png),
        ):
            if given is not None:
                raise SettingError(option, "this needs a trace to replay: give --trace FILE, too")
    inputs = [("--trace", wishes.trace), ("MODEL", wishes.model)]
    for option, path in (("--svg", wishes.svg), ("--png", wishes.png)):
        if path is not None:
            _check_writable(option, path)
            _check_apart(option, path, inputs)
            inputs.append((option, path))
    if wishes.png is not None and find_spec("PIL") is None:
        raise SettingError(
            "--png", 'this needs Pillow: run pip install "kvtier[pictures]", or give --svg'
        )


def _check_writable(option: str, path: str) -> None:
    folder = os.path.dirname(path) or "."
    if not os.path.isdir(folder):
        raise SettingError(option, f"there is no directory {folder}: create it first")
    place = path if os.path.exists(path) else folder
    if os.path.isdir(path) or not os.access(place, os.W_OK):
        raise SettingError(option, f"{path} cannot be written: give the path of a file of yours")


def _check_apart(option: str, path: str, others: Sequence[tuple[str, str | None]]) -> None:
    """Refuse to write a picture over a file that another option names."""
    for other, its in others:
        if its is not None and os.path.realpath(path) == os.path.realpath(its):
            raise SettingError(option, f"{path} is also {other}: give the picture another name")


def _plan_of(wishes: PlanWishes) -> tuple[Plan, ReplaySettings]:
    bytes_per_token, has_windows = _bytes_per_token(wishes)
    speed = float(size_of(wishes.host_speed, "--host-speed", is_speed=True))
    host = TierSettings(
        name="host",
        num_bytes=size_of(wishes.host, "--host"),
        policy="lru" if wishes.policy == _ALL else wishes.policy,
        read_bytes_per_s=speed,
        write_bytes_per_s=speed,
    )
    tiers = tiers_of(wishes.tiers)
    if any(tier.sharing is not None for tier in tiers):
        raise SettingError(
            "--tier",
            "there is only one engine in a plan, and no link: give read_speed, the speed of the "
            "link, in place of shared; or use kvtier replay --engines N",
        )
    engine = engine_of(wishes.prefill, wishes.prefill_times, EngineSettings())
    has_speed = wishes.prefill is not None or wishes.prefill_times is not None
    plan = Plan(
        bytes_per_token=bytes_per_token,
        is_upper_bound=has_windows,
        conversation_tokens=wishes.conversation,
        computed_s=engine.prefill_s(0, wishes.conversation) if has_speed else None,
        tiers=[TierPlan.of(tier, bytes_per_token, wishes.conversation) for tier in (host, *tiers)],
    )
    settings = ReplaySettings(
        host=host,
        tiers=tiers,
        gpu_bytes=None if wishes.gpu is None else size_of(wishes.gpu, "--gpu"),
        kv_bytes_per_token=bytes_per_token,
        engine=engine,
        is_timed=wishes.target_ttft is not None,
        speed_up=wishes.speed_up or 1.0,
    )
    return plan, settings


def _bytes_per_token(wishes: PlanWishes) -> tuple[int, bool]:
    """The size, and whether long prompts need less."""
    if (wishes.model is None) == (wishes.kv_bytes_per_token is None):
        raise SettingError("MODEL", "give a model's config.json, or else --kv-bytes-per-token")
    if wishes.kv_dtype is not None and wishes.kv_dtype not in NUMBER_BYTES:
        allowed = ", ".join(NUMBER_BYTES)
        raise SettingError("--kv-dtype", f'"{wishes.kv_dtype}": give one of {allowed}')
    if wishes.model is None:
        return size_of(str(wishes.kv_bytes_per_token), "--kv-bytes-per-token"), False
    try:
        model = read_model(wishes.model, wishes.kv_dtype)
    except OSError as error:
        raise SettingError(
            "MODEL", explain_os_error(wishes.model, error, "a model's config.json")
        ) from None
    return model.bytes_per_token, model.has_windows


# --- the trace ---------------------------------------------------------------------------------


def _study_of(wishes: PlanWishes, path: str, settings: ReplaySettings) -> Study:
    """Replay the trace with the sizes to try."""
    names = [settings.host.name, *(tier.name for tier in settings.tiers)]
    prices = by_name(wishes.costs_per_gb, "--cost-per-gb", names, price_of, f"{names[-1]}=0.10")
    if prices and len(prices) < len(names):
        lacking = next(name for name in names if name not in prices)
        raise SettingError("--cost-per-gb", f"give a price for {lacking}, too: {lacking}=PRICE")
    endurances = by_name(
        wishes.ssd_tbw,
        "--ssd-tbw",
        names[1:],
        lambda text: size_of(text, "--ssd-tbw"),
        f"{names[-1] if settings.tiers else 'disk'}=600TB",
    )
    target = _target_of(wishes)
    try:
        with open_trace(path, wishes.block_tokens) as trace:
            block_tokens = trace.block_tokens
        settings.check(block_tokens)
        policies = CachePolicyFactory.known_names() if wishes.policy == _ALL else [wishes.policy]
        study = Study(path, names, policies, settings, prices, endurances)
        study.most_hits = most_hits(path, block_tokens, wishes.limit)
        sweep = Sweep(path, settings, block_tokens, wishes.limit)
        with _progress(sweep, len(policies)):
            study.curves = [
                {policy: sweep.curve(policy, place) for policy in policies}
                for place in range(len(names))
            ]
            if target is None and prices:
                target = Target(hit_percent=_SHARE_OF_MOST * study.largest_hits)
            study.target = target
            if target is not None:
                study.recommended = _cheapest(study, sweep, target)
    except OSError as error:
        raise TraceError(explain_os_error(path, error, "a trace")) from None
    return study


def _target_of(wishes: PlanWishes) -> Target | None:
    if wishes.target_hits is None and wishes.target_ttft is None:
        return None
    ttft_s = None
    if wishes.target_ttft is not None:
        ttft_s = seconds_of(wishes.target_ttft, "--target-ttft", may_be_zero=False)
    return Target(wishes.target_hits, ttft_s)


def _cheapest(study: Study, sweep: Sweep, target: Target) -> Point | None:
    def cost(sizes: Sizes) -> tuple[float, ...]:
        price = study.cost(sizes)
        return sizes if price is None else (price,)

    return sweep.cheapest(study.policies, target, cost)


@contextmanager
def _progress(sweep: Sweep, num_policies: int) -> Iterator[None]:
    """While this context is open, show how many replays have begun. A search for the cheapest sizes
    takes about as many as the curves."""
    num_curves = sum(len(sweep.sizes_of(place)) for place in range(len(sweep.sizes)))
    total, done = 2 * num_policies * num_curves, 0
    silence = logging.NullHandler()  # the figures tell what a tier was too slow for
    logging.getLogger("kvtier").addHandler(silence)
    try:
        with shown_share() as show:

            def note_replay() -> None:
                nonlocal done
                show(min(done, total), total)
                done += 1

            sweep.note_replay = note_replay
            yield
    finally:
        logging.getLogger("kvtier").removeHandler(silence)


def _draw(wishes: PlanWishes, study: Study) -> None:
    """Write the pictures."""
    title = printable(f"{os.path.basename(study.path)}, {', '.join(study.policies)}")
    rows = panels(study)
    if wishes.svg is not None:
        _save(wishes.svg, as_svg(title, rows).encode())
    if wishes.png is not None:
        _save(wishes.png, as_png(title, rows))


def _save(path: str, content: bytes) -> None:
    try:
        Path(path).write_bytes(content)
    except OSError as error:
        raise CannotWrite(f"{path} could not be written: {error.strerror or error}") from None


# --- running engines ----------------------------------------------------------------------------


_NEEDS = ("pid", "model", "engine_id", "num_blocks", "block_tokens", "sizes")


def run_engines(*, as_json: bool) -> int:
    """Print the hit curves of the engines that run here. Raises `SettingError` if there is none."""
    try:
        found = find_engines()
        if not found:
            find_engine()  # says why there is none
        engines = [ask(engine, "curve", needs=_NEEDS) for engine in found]
    except (EngineNotFound, NoAnswer) as problem:
        raise SettingError("--engine", str(problem)) from None
    if as_json:
        write(json.dumps({"engines": engines}, indent=2) + "\n")
    else:
        write("\n".join(map(engine_as_text, engines)))
    finish()
    return 0
