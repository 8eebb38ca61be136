"""What is shown of the engines that a command follows, as plain data: `kvtier top --json` prints
it, and the page draws it. Several engines are summed."""

from __future__ import annotations

import re
import time
from bisect import bisect_left
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import cache, partial
from typing import Any, TypeAlias

from kvtier.cli.watch.engines import Followed, FollowedEngines, Sample, labels_of
from kvtier.observe.client import FOREIGN
from kvtier.observe.history import EVERY_S, records
from kvtier.observe.rollout import HOST

__all__ = [
    "BREAKER",
    "COMPUTED",
    "HALVES",
    "SWITCHED_OFF",
    "EngineLine",
    "Hour",
    "Overview",
    "RequestLine",
    "TierLine",
    "hour_of",
    "look",
    "look_back",
    "overview_of",
]

_IDLE_AFTER_S = 5.0
"""An engine that works ends a step more often than this."""
_MOST_REQUESTS = 12
_PART = re.compile("_(count|sum)$")
_HOUR_SLOTS = 360
_LONGEST_GAP = 3.0
"""Between two samples, in units of `EVERY_S`: after a longer one, nothing is drawn."""
BREAKER = ("in use", "being tried", "cut off")
"""By the values of the metric."""
SWITCHED_OFF = "switched off"
"""By the operator, in at least one engine."""
HALVES = ("with", "without")
"""Requests that kvtier serves, and those that it does not."""

_UNKNOWN_FORM = (KeyError, TypeError, ValueError, AttributeError, IndexError)
_TOKENS, _SAVED = "kvtier_prompt_tokens", "kvtier_saved_prefill_seconds"
_FIRST_TOKENS = "kvtier_first_token_seconds"
_WAITS, _DURATIONS = "kvtier_tiering_wait_seconds", "kvtier_tier_seconds"
COMPUTED = "computed"
"""The source of the tokens that were found nowhere."""
_ORDER = {"device": 0, HOST: 1, COMPUTED: 3}
"""Of sources; tiers are in between."""
_HOST_MOVED = {"load": "kvtier_cpu_loaded_blocks", "store": "kvtier_cpu_stored_blocks"}
_TROUBLES = {
    "kvtier_tier_failed_blocks": ("direction", "failed {}s"),
    "kvtier_tier_late_jobs": ("kind", "late {}s"),
    "kvtier_tier_seal_failures": ("reason", "bad seals ({})"),
    "kvtier_tier_faults": ("kind", "faults ({})"),
}
"""Counters that say that something is wrong: their label, and how their values are named."""


@dataclass(slots=True)
class EngineLine:
    """One engine."""

    pid: int
    engine_id: str
    model: str
    dtype: str
    started_s: float
    idle_s: float
    """Seconds since its last step."""
    state: str
    """`working`, `idle`, `silent` (it has not answered) or `gone`."""
    problem: str | None


@dataclass(slots=True)
class TierLine:
    """Host memory, or a tier below it. Blocks and bytes are counted since the start; None: the tier
    does not tell."""

    tier: str
    type: str
    medium: str
    write: str | None
    used_bytes: float | None = None
    capacity_bytes: float | None = None
    load_bytes_per_s: float = 0.0
    store_bytes_per_s: float = 0.0
    hit_blocks_per_s: float | None = None
    loaded_blocks: float = 0.0
    stored_blocks: float = 0.0
    hit_blocks: float | None = None
    evicted_blocks: float | None = None
    stored_bytes: float | None = None
    read_back_bytes: float | None = None
    """Bytes of the stored blocks that were loaded since, each counted once."""
    mean_load_s: float | None = None
    """Of the loads that ended in the time of the rates."""
    mean_store_s: float | None = None
    loads: str | None = None
    stores: str | None = None
    """One of `BREAKER`, or `SWITCHED_OFF`."""
    queued_blocks: float | None = None
    """Blocks that wait to be stored."""
    loading_blocks: float | None = None
    declined: dict[str, float] = field(default_factory=dict)
    """Blocks that were computed, by the reason."""
    not_stored: dict[str, float] = field(default_factory=dict)
    troubles: dict[str, float] = field(default_factory=dict)
    """What has gone wrong, and how often."""
    is_in_trouble: bool = False
    """True if something went wrong in the time of the rates, or the tier is not in use."""

    @property
    def used_share(self) -> float | None:
        """From 0 to 1."""
        if self.used_bytes is None or not self.capacity_bytes:
            return None
        return min(1.0, self.used_bytes / self.capacity_bytes)


@dataclass(slots=True)
class RequestLine:
    """One request."""

    id: str
    pid: int
    """Process of its engine."""
    state: str
    tokens: int | None
    """Of its prompt, if the engine knows."""
    found_share: float | None
    """Of these, the tokens that the device had and those that were loaded."""
    loaded: dict[str, int]
    """Loaded tokens, by the place that they came from."""
    arrived_s: float
    waited_s: float | None
    """From its arrival to its start."""


@dataclass(slots=True)
class Overview:
    """All that is shown but the charts."""

    now_s: float
    state: str
    """`working`, `idle`, `empty` (nothing was stored or loaded since the start), `silent`, `gone`,
    or `none` (there is no engine)."""
    problem: str | None
    rates_over_s: float | None = None
    engines: list[EngineLine] = field(default_factory=list)
    tiers: list[TierLine] = field(default_factory=list)
    loaded_share: float | None = None
    """Of the blocks that were loaded or newly stored in the time of the rates, those that were
    loaded. None: there were none."""
    loaded_share_of_all: float | None = None
    """The same since the start."""
    tokens: dict[str, float] = field(default_factory=dict)
    """Shares of the prompt tokens of requests that started in the time of the rates, by where they
    came from. Empty: there were none, or the engine does not tell."""
    tokens_of_all: dict[str, float] = field(default_factory=dict)
    """The same since the start."""
    prompt_tokens_per_s: float = 0.0
    saved_s: float | None = None
    """Estimated seconds of computing that loading has saved since the start. None: not known."""
    saved_s_per_s: float | None = None
    requests_per_s: float = 0.0
    """Requests that have produced their first token."""
    first_token_s: dict[str, float] = field(default_factory=dict)
    """Mean time from arrival to first token in the time of the rates, by `HALVES`."""
    served_percent: float = 100.0
    """Of the requests, those that kvtier serves, by `kvtier switch --share`."""
    mean_wait_s: float | None = None
    """Of the waits for tiers that ended in the time of the rates. None: there were none."""
    block_bytes: int | None = None
    requests: list[RequestLine] | None = None
    """The last requests, newest first. None: the engine does not tell."""


@dataclass(slots=True)
class Hour:
    """The last hour, for charts: one value for every `every_s`, by place. None: not known."""

    end_s: float
    every_s: float
    charts: dict[str, dict[str, list[float | None]]]


def look(engines: FollowedEngines) -> Overview:
    """Ask the engines, and return what they answer. Never raises for what they answer."""
    engines.ask()
    try:
        return overview_of(engines)
    except _UNKNOWN_FORM:
        return Overview(time.time(), "silent", FOREIGN)


def overview_of(engines: FollowedEngines) -> Overview:
    """What the engines have answered last."""
    known = engines.answering
    if not known:
        problems = [its.problem for its in engines.engines if its.problem]
        state = "silent" if engines.engines else "none"
        return Overview(time.time(), state, engines.problem or "; ".join(problems) or None)
    lines = [_line_of(its) for its in known]
    changes = [_Change(its) for its in known]
    total = _Values.sum_of(change.now for change in changes)
    rates = _Values.sum_of(change.rates for change in changes)
    tiers = [
        _tier_line(entry, known, total, rates)
        for entry in {tier["tier"]: tier for its in known for tier in its.status["tiers"]}.values()
    ]
    overview = Overview(
        now_s=max(its.now.when_s for its in known),
        state=_state_of(lines, tiers),
        problem="; ".join(line.problem for line in lines if line.problem) or None,
        rates_over_s=min(change.seconds for change in changes),
        engines=lines,
        tiers=tiers,
        block_bytes=known[0].status["block_bytes"],
    )
    overview.loaded_share, overview.loaded_share_of_all = (
        _loaded_share(values) for values in (rates, total)
    )
    overview.tokens, overview.tokens_of_all = (_token_shares(values) for values in (rates, total))
    overview.prompt_tokens_per_s = sum(rates.by(_TOKENS, "source").values())
    overview.saved_s, overview.saved_s_per_s = total.sum(_SAVED), rates.sum(_SAVED)
    overview.requests_per_s = rates.sum("kvtier_requests") or 0.0
    overview.first_token_s = {
        half: mean
        for half in HALVES
        if (mean := _mean_s(rates, _FIRST_TOKENS, half=half)) is not None
    }
    overview.served_percent = min(_switches(its)["share"] for its in known)
    overview.mean_wait_s = _mean_s(rates, _WAITS)
    if any(its.requests is not None for its in known):
        with suppress(*_UNKNOWN_FORM):
            overview.requests = _last_requests(known)
    return overview


def _last_requests(engines: Sequence[Followed]) -> list[RequestLine]:
    requests = [_request_line(each, its) for its in engines for each in its.requests or ()]
    return sorted(requests, key=lambda request: -request.arrived_s)[:_MOST_REQUESTS]


def _request_line(request: Mapping[str, Any], its: Followed) -> RequestLine:
    tokens, started_s = request["tokens"], request["started_s"]
    total, found = tokens["prompt"], (tokens["device"] or 0) + sum(tokens["loaded"].values())
    return RequestLine(
        id=request["id"],
        pid=its.status["engine"]["pid"],
        state=request["state"],
        tokens=total,
        found_share=found / total if total and started_s is not None else None,
        loaded=dict(tokens["loaded"]),
        arrived_s=request["arrived_s"],
        waited_s=None if started_s is None else max(0.0, started_s - request["arrived_s"]),
    )


def _line_of(its: Followed) -> EngineLine:
    engine, status = its.status["engine"], its.status
    idle_s = max(0.0, status["now_s"] - status["collected_s"])
    state = "idle" if idle_s > _IDLE_AFTER_S else "working"
    if its.problem is not None:
        state = "gone" if its.is_gone else "silent"
        idle_s = max(0.0, time.time() - status["collected_s"])
    return EngineLine(
        pid=engine["pid"],
        engine_id=engine["engine_id"],
        model=engine["model"],
        dtype=engine["dtype"],
        started_s=engine["started_s"],
        idle_s=idle_s,
        state=state,
        problem=its.problem,
    )


def _state_of(lines: Sequence[EngineLine], tiers: Sequence[TierLine]) -> str:
    states = [line.state for line in lines]
    for state in ("silent", "gone"):
        if all(its == state for its in states):
            return state
    if not any(tier.stored_blocks or tier.loaded_blocks or tier.used_bytes for tier in tiers):
        return "empty"
    return "working" if "working" in states else "idle"


# --- values of series ----------------------------------------------------------------------------


_labels_of = cache(labels_of)


class _Values:
    """Values by series, to be read by metric and labels."""

    def __init__(self, values: Mapping[str, float]) -> None:
        self._of_metric: dict[str, list[tuple[Mapping[str, str], float]]] = defaultdict(list)
        for series, value in values.items():
            name, labels = _labels_of(series)
            self._of_metric[name].append((labels, value))

    @classmethod
    def sum_of(cls, many: Iterable[Mapping[str, float]]) -> _Values:
        total: dict[str, float] = defaultdict(float)
        for values in many:
            for series, value in values.items():
                name = series.partition("{")[0]
                if name == "kvtier_tier_breaker_state":
                    total[series] = max(total[series], value)
                else:
                    total[series] += value
        return cls(total)

    def get(self, name: str, **labels: str) -> float | None:
        """The value of the series with these labels. None: there is none."""
        for has, value in self._of_metric.get(name, ()):
            if labels.items() <= has.items():
                return value
        return None

    def sum(self, name: str) -> float | None:
        """The sum of a metric's series. None: there are none."""
        found = self._of_metric.get(name)
        return sum(value for _, value in found) if found else None

    def by(self, name: str, label: str, **labels: str) -> dict[str, float]:
        """The values that are not 0 of the series with these labels, by another one."""
        return {
            has[label]: value
            for has, value in self._of_metric.get(name, ())
            if labels.items() <= has.items() and label in has and value
        }

    def own(self, end: str, tier: str) -> float | None:
        """The value of a tier's own metric, whose name ends so. None: it has none."""
        prefix = f"kvtier_{tier.partition(':')[2]}_"
        found = self.get(prefix + end, tier=tier)
        if found is not None:
            return found
        for name in self._of_metric:  # a tier of another package
            if name.endswith("_" + end) and not name.startswith(("kvtier_tier_", "kvtier_cpu_")):
                found = self.get(name, tier=tier)
                if found is not None:
                    return found
        return None


class _Change:
    """The values of one engine now, and how fast they rise."""

    def __init__(self, its: Followed) -> None:
        before = its.earlier()
        self.now = its.now.values
        self.seconds = max(its.now.when_s - before.when_s, 1e-3)
        self.rates = {
            series: rate
            for series, rate in _rises(before, its.now).items()
            # A history says nothing of what it does not record.
            if before.is_whole or records(_PART.sub("", series.partition("{")[0]))
        }


def _rises(before: Sample, after: Sample) -> dict[str, float]:
    """Rises per second, for counters; what it says of gauges has no meaning."""
    seconds = max(after.when_s - before.when_s, 1e-3)
    return {
        series: max(0.0, value - before.values.get(series, 0)) / seconds
        for series, value in after.values.items()
    }


# --- tiers ---------------------------------------------------------------------------------------


def _tier_line(
    entry: Mapping[str, Any], engines: Sequence[Followed], total: _Values, rates: _Values
) -> TierLine:
    tier = entry["tier"]
    line = TierLine(tier, entry["type"], entry["medium"], entry.get("write"))
    line.used_bytes, line.capacity_bytes = _room_of(tier, engines)
    if tier == HOST:
        _fill_host(line, total, rates, engines[0].status["block_bytes"])
    else:
        _fill_tier(line, tier, total, rates)
    if any(tier in _switches(its)["loads_off"] for its in engines):
        line.loads = SWITCHED_OFF
    if any(tier in _switches(its)["stores_off"] for its in engines):
        line.stores = SWITCHED_OFF
    return line


def _switches(its: Followed) -> Mapping[str, Any]:
    switches: Mapping[str, Any] = its.status["switches"]
    return switches


def _fill_tier(line: TierLine, tier: str, total: _Values, rates: _Values) -> None:
    line.load_bytes_per_s = rates.get("kvtier_tier_bytes", tier=tier, direction="load") or 0.0
    line.store_bytes_per_s = rates.get("kvtier_tier_bytes", tier=tier, direction="store") or 0.0
    line.hit_blocks_per_s = rates.get("kvtier_tier_hit_blocks", tier=tier) or 0.0
    line.loaded_blocks = total.get("kvtier_tier_blocks", tier=tier, direction="load") or 0.0
    line.stored_blocks = total.get("kvtier_tier_blocks", tier=tier, direction="store") or 0.0
    line.hit_blocks = total.get("kvtier_tier_hit_blocks", tier=tier) or 0.0
    line.evicted_blocks = total.own("evicted_blocks", tier)
    line.mean_load_s = _mean_s(rates, _DURATIONS, tier=tier, direction="load")
    line.mean_store_s = _mean_s(rates, _DURATIONS, tier=tier, direction="store")
    line.read_back_bytes = total.get("kvtier_tier_read_back_bytes", tier=tier)
    line.stored_bytes = total.get("kvtier_tier_bytes", tier=tier, direction="store")
    line.loads = _breaker(total, tier, "load")
    line.stores = _breaker(total, tier, "store")
    line.queued_blocks = _queued_blocks(total, tier)
    line.loading_blocks = total.get("kvtier_tier_loading_blocks", tier=tier)
    line.declined = total.by("kvtier_tier_declined_blocks", "reason", tier=tier)
    line.not_stored = total.by("kvtier_tier_not_stored_blocks", "reason", tier=tier)
    line.troubles = _troubles(total, tier)
    line.is_in_trouble = bool(_troubles(rates, tier)) or BREAKER[2] in (line.loads, line.stores)


def _fill_host(line: TierLine, total: _Values, rates: _Values, block_bytes: int) -> None:
    loaded, stored = _HOST_MOVED["load"], _HOST_MOVED["store"]
    line.loaded_blocks = total.get(loaded) or 0.0
    line.stored_blocks = total.get(stored) or 0.0
    line.evicted_blocks = total.get("kvtier_cpu_evicted_blocks") or 0.0
    line.loads = line.stores = BREAKER[0]
    line.load_bytes_per_s = block_bytes * (rates.get(loaded) or 0.0)
    line.store_bytes_per_s = block_bytes * (rates.get(stored) or 0.0)
    troubles = {"failed stores": "failed_stores", "misuse": "misuse"}
    line.troubles = {
        text: count for text, name in troubles.items() if (count := total.get(f"kvtier_cpu_{name}"))
    }
    line.is_in_trouble = any(rates.get(f"kvtier_cpu_{name}") for name in troubles.values())


def _room_of(tier: str, engines: Sequence[Followed]) -> tuple[float | None, float | None]:
    """Bytes in use, and bytes there are. What several engines share is counted once."""
    rooms: dict[object, tuple[float | None, float | None]] = {}
    for number, its in enumerate(engines):
        entry = next((each for each in its.status["tiers"] if each["tier"] == tier), None)
        if entry is not None:
            is_shared = entry["locality"] == "REMOTE"
            owner = repr(entry["options"]) if is_shared else number
            rooms[owner] = _room_in(entry, _Values(its.now.values), its.status["block_bytes"])
    used = [used for used, _ in rooms.values() if used is not None]
    capacity = [capacity for _, capacity in rooms.values() if capacity is not None]
    return sum(used) if used else None, sum(capacity) if capacity else None


def _room_in(
    entry: Mapping[str, Any], values: _Values, block_bytes: int
) -> tuple[float | None, float | None]:
    tier, blocks = entry["tier"], entry["capacity_blocks"]
    capacity = None if blocks is None else float(blocks * block_bytes)
    if tier == HOST:
        resident = values.get("kvtier_cpu_resident_blocks")
        return None if resident is None else resident * block_bytes, capacity
    told = values.get("kvtier_tier_capacity_bytes", tier=tier)
    return values.get("kvtier_tier_used_bytes", tier=tier), told or capacity


def _mean_s(rates: _Values, histogram: str, **labels: str) -> float | None:
    count = rates.get(f"{histogram}_count", **labels)
    seconds = rates.get(f"{histogram}_sum", **labels)
    return seconds / count if count and seconds is not None else None


def _token_shares(values: _Values) -> dict[str, float]:
    tokens = values.by(_TOKENS, "source")
    total = sum(tokens.values())
    # Tiers begin with their position, so the order is that of lookups.
    order = sorted(tokens, key=lambda source: (_ORDER.get(source, 2), source))
    return {source: tokens[source] / total for source in order}


def _queued_blocks(values: _Values, tier: str) -> float | None:
    waiting = values.get("kvtier_tier_waiting_blocks", tier=tier)
    queued = values.own("queued_blocks", tier)
    return None if waiting is None and queued is None else (waiting or 0.0) + (queued or 0.0)


def _breaker(total: _Values, tier: str, direction: str) -> str | None:
    state = total.get("kvtier_tier_breaker_state", tier=tier, direction=direction)
    return None if state is None else BREAKER[min(int(state), len(BREAKER) - 1)]


def _troubles(values: _Values, tier: str) -> dict[str, float]:
    return {
        text.format(value.replace("_", " ")): count
        for name, (label, text) in _TROUBLES.items()
        for value, count in values.by(name, label, tier=tier).items()
    }


def _loaded_share(*many: _Values) -> float | None:
    loaded = sum(values.get(_HOST_MOVED["load"]) or 0.0 for values in many)
    stored = sum(values.get(_HOST_MOVED["store"]) or 0.0 for values in many)
    return loaded / (loaded + stored) if loaded + stored else None


# --- the last hour -------------------------------------------------------------------------------


def look_back(engines: FollowedEngines) -> Hour:
    """The last hour, as the engines told it at the last `look`. Never raises for what they
    told."""
    try:
        return hour_of(engines)
    except _UNKNOWN_FORM:
        return Hour(time.time(), EVERY_S, {})


def hour_of(engines: FollowedEngines) -> Hour:
    """The last hour of the engines, for charts."""
    known = engines.answering
    end_s = max((its.hour[-1].when_s for its in known if its.hour), default=time.time())
    centres = [end_s - EVERY_S * (_HOUR_SLOTS - n - 0.5) for n in range(_HOUR_SLOTS)]
    slots = [
        [step for step in slot if step is not None]
        for slot in zip(*(_steps(its, centres) for its in known), strict=True)
    ]
    places = list({tier["tier"]: 0 for its in known for tier in its.status["tiers"]})
    has_tokens = any(_token_shares(_Values(its.now.values)) for its in known)
    tiers = [place for place in places if place != HOST]
    sources = [source for source in ("device", *places, COMPUTED) if has_tokens]
    charts = {
        "tokens": _chart(slots, _token_share_in, sources),
        "loaded_share": _chart(slots, _loaded_share_in, [] if has_tokens else ["loaded"]),
        "saved": _chart(slots, _saved_in, ["saved"] if has_tokens else []),
        "waits": _chart(slots, _mean_wait_in, ["wait"]),
        "first_tokens": _chart(slots, _first_token_in, HALVES),
        "loads": _chart(slots, partial(_bytes_moved_in, "load"), places),
        "stores": _chart(slots, partial(_bytes_moved_in, "store"), places),
        "used": _chart(slots, _used_share_in, places),
        "load_seconds": _chart(slots, _mean_load_in, tiers),
        "queued": _chart(slots, _queued_blocks_in, tiers),
    }
    return Hour(end_s, EVERY_S, charts)


@dataclass(frozen=True, slots=True)
class _Step:
    """From one sample of an engine to the next."""

    engine: Followed
    rates: _Values
    end: _Values

    @property
    def block_bytes(self) -> int:
        """Bytes of one block."""
        its: int = self.engine.status["block_bytes"]
        return its


def _steps(its: Followed, centres: Sequence[float]) -> list[_Step | None]:
    """For each time, the step that it is in. None: there is none, or it is too long."""
    samples = list(its.hour)
    times = [sample.when_s for sample in samples]
    made: dict[int, _Step | None] = {}
    found: list[_Step | None] = []
    for centre in centres:
        at = bisect_left(times, centre)
        if not 0 < at < len(times):
            found.append(None)
            continue
        if at not in made:
            before, after = samples[at - 1], samples[at]
            is_short = after.when_s - before.when_s <= _LONGEST_GAP * EVERY_S
            step = _Step(its, _Values(_rises(before, after)), _Values(after.values))
            made[at] = step if is_short else None
        found.append(made[at])
    return found


_Slot: TypeAlias = Sequence[_Step]
"""What the engines did in one piece of time."""


def _chart(
    slots: Sequence[_Slot],
    value: Callable[[str, _Slot], float | None],
    places: Iterable[str],
) -> dict[str, list[float | None]]:
    """A line for each place for which anything is known."""
    lines = {place: [value(place, slot) if slot else None for slot in slots] for place in places}
    return {place: line for place, line in lines.items() if any(v is not None for v in line)}


def _loaded_share_in(_: str, slot: _Slot) -> float | None:
    return _loaded_share(*(step.rates for step in slot))


def _bytes_moved_in(direction: str, place: str, slot: _Slot) -> float | None:
    if place == HOST:
        name = _HOST_MOVED[direction]
        return sum(step.block_bytes * (step.rates.get(name) or 0.0) for step in slot)
    labels = {"tier": place, "direction": direction}
    return sum(step.rates.get("kvtier_tier_bytes", **labels) or 0.0 for step in slot)


def _used_share_in(place: str, slot: _Slot) -> float | None:
    shares = [its for step in slot if (its := _used_share(place, step)) is not None]
    return sum(shares) / len(shares) if shares else None


def _mean_load_in(place: str, slot: _Slot) -> float | None:
    return _mean_in(slot, _DURATIONS, tier=place, direction="load")


def _mean_wait_in(_: str, slot: _Slot) -> float | None:
    return _mean_in(slot, _WAITS)


def _first_token_in(half: str, slot: _Slot) -> float | None:
    return _mean_in(slot, _FIRST_TOKENS, half=half)


def _mean_in(slot: _Slot, histogram: str, **labels: str) -> float | None:
    means = [its for s in slot if (its := _mean_s(s.rates, histogram, **labels)) is not None]
    return sum(means) / len(means) if means else None


def _token_share_in(source: str, slot: _Slot) -> float | None:
    counts = [step.rates.by(_TOKENS, "source") for step in slot]
    total = sum(sum(its.values()) for its in counts)
    return sum(its.get(source, 0.0) for its in counts) / total if total else None


def _saved_in(_: str, slot: _Slot) -> float | None:
    return sum(step.rates.sum(_SAVED) or 0.0 for step in slot)


def _queued_blocks_in(place: str, slot: _Slot) -> float | None:
    counts = [its for step in slot if (its := _queued_blocks(step.end, place)) is not None]
    return sum(counts) if counts else None


def _used_share(place: str, step: _Step) -> float | None:
    status = step.engine.status
    entry = next((each for each in status["tiers"] if each["tier"] == place), None)
    if entry is None:
        return None
    used, capacity = _room_in(entry, step.end, status["block_bytes"])
    return None if used is None or not capacity else min(1.0, used / capacity)
