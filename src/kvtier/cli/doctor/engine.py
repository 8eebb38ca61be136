"""Runs `kvtier doctor --engine`: asks a running engine, and says what keeps it from using a tier.

Nothing is measured that would compete with the engine, and only a few blocks are sent through tiers
that a second process may open.
"""

from __future__ import annotations

import json
import os
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from kvtier.cli.checks.finding import Finding, Status, as_lines, has_problem, verdict_of
from kvtier.cli.checks.host import Machine
from kvtier.cli.checks.options import CheckedTier, checked
from kvtier.cli.checks.vllm import check_hash_seed
from kvtier.cli.doctor.canary import send_few
from kvtier.cli.doctor.contents import check_contents
from kvtier.cli.doctor.source import WrongSource
from kvtier.cli.output import finish, write
from kvtier.cli.store.terminal import shown_steps
from kvtier.config import ConfigError, NamespaceDescription
from kvtier.config.errors import HIDDEN, printable
from kvtier.observe.client import (
    EngineNotFound,
    EngineSocket,
    NoAnswer,
    ask,
    find_engine,
    process_of,
)
from kvtier.seal import SealFailure
from kvtier.tiering.disk.options import DiskOptions
from kvtier.tiering.inspection import as_age
from kvtier.tiering.metrics import tier_label, tier_series

__all__ = ["run_on_engine"]

_NEEDS = ("engine", "config", "now_s", "collected_s")
_CUT_OFF, _TRIED = 2, 1
_NOT_STORED = {
    "dropped": "they left host memory while they waited for the tier, which is too slow for them",
    "shed": "the tier is cut off",
    "unwritten": "they left host memory before they could be written",
    "left_out": "the write policy decided so",
    "switched_off": "stores are switched off",
    "over_budget": "the write budget is used up",
    "kept_out": "requests asked for it (write, or skip)",
    "held_back": "the rate of repeated stores is bounded",
}
"""Why blocks are not stored in a tier, by the names of counters."""
_STORE_REMEDIES = {
    "shed": "See the breaker of the tier",
    "switched_off": "Switch them on again: kvtier switch --stores on",
    "left_out": 'Set write to "through" to store every block',
    "over_budget": "Raise write_budget, or wait: it grows again over the day",
    "kept_out": "Look at the hints that clients send in kv_transfer_params",
}
_NOT_IN_HOST = {
    "filtered": ("store_threshold keeps out prompts that were seen too seldom", "Lower it to 1"),
    "declined": (
        "the eviction policy would rather keep others",
        'Set eviction_policy to "lru" to store everything, or give more cpu_bytes_to_use',
    ),
    "refused": ("too few slots could be freed", "Give more cpu_bytes_to_use"),
    "truncated": (
        "the prompts are larger than host memory",
        "Give more cpu_bytes_to_use: a prompt has to fit",
    ),
    "stale": ("they may be from before a reset of the cache", "Reset the cache less often"),
}


_FEW_DECLINED, _MOST_DECLINED = 0.2, 0.8
"""Shares of the blocks found in a tier: fewer that the guard declines are normal; with more, the
tier is useless."""
_NOT_IN_HOST_ON_PURPOSE = ("filtered", "declined", "stale")
_NOT_STORED_ON_PURPOSE = ("left_out", "switched_off", "kept_out", "held_back")
"""Reasons that the configuration or a request has given. Prompts that repeat are stored."""


def run_on_engine(name: str | None, *, as_json: bool) -> int:
    """Examine the engine with this process id or socket; None: the only one. Prints what was found
    and returns the exit code. Raises `WrongSource` if there is no such engine."""
    try:
        engine = find_engine(name)
    except EngineNotFound as reason:
        raise WrongSource(str(reason)) from None
    with shown_steps() as steps:
        steps.begin(f"the engine at {engine.path}")
        try:
            status = ask(engine, "status", needs=_NEEDS)
        except NoAnswer as reason:
            found = [
                Finding(
                    "engine",
                    Status.PROBLEM,
                    str(reason),
                    "See whether the process is stopped or hangs; its log says what it did last",
                )
            ]
            about: Mapping[str, Any] = {}
        else:
            about = status.get("engine", {})
            examination = _Examination(status, _remarks_of(engine), process_of(engine))
            found = list(examination.findings())
    verdict = verdict_of(found)
    is_ok = not has_problem(found)
    if as_json:
        document = {
            "engine": {**about, "socket": str(engine.path)},
            "ok": is_ok,
            "verdict": verdict,
            "checks": [finding.as_json() for finding in found],
        }
        write(json.dumps(document, indent=2) + "\n")
    else:
        lines = [f"kvtier doctor: {engine.path}", *as_lines(found), "", verdict]
        write("".join(f"{printable(line)}\n" for line in lines))
    finish()
    return int(not is_ok)


def _environment_of(pid: int) -> Mapping[str, str] | None:
    """The variables with which a process was started. None if they cannot be read: a process that
    has changed its title may have written over them."""
    try:
        content = Path(f"/proc/{pid}/environ").read_bytes()
    except OSError:
        return None
    pairs = (entry.partition(b"=") for entry in content.split(b"\0") if entry)
    variables = {os.fsdecode(name): os.fsdecode(value) for name, _, value in pairs}
    return variables if "PATH" in variables else None


def _vllm_release_of(engine: Mapping[str, Any]) -> str | None:
    """The release of vLLM of which the namespace of this engine is made; None: another engine."""
    release = ((engine.get("namespace") or {}).get("made_of") or {}).get("vllm")
    return None if release is None else str(release)


def _remarks_of(engine: EngineSocket) -> Mapping[str, str]:
    """By the label of a tier, why it has nothing for this engine, if it is not empty."""
    try:
        return dict(ask(engine, "start")["remarks"])
    except (NoAnswer, KeyError):  # an engine of another version
        return {}


@dataclass(slots=True)
class _Examination:
    """What one engine says of itself."""

    status: Mapping[str, Any]
    remarks: Mapping[str, str]
    """See `_remarks_of`."""
    pid: int | None
    """Of the engine, as this process sees it; None if it does not."""
    _counters: Mapping[str, float] = field(init=False)
    _gauges: Mapping[str, float] = field(init=False)

    def __post_init__(self) -> None:
        self._counters = self.status.get("counters", {})
        self._gauges = self.status.get("gauges", {})

    def findings(self) -> Iterator[Finding]:
        engine = self.status["engine"]
        now = float(self.status["now_s"])
        yield Finding(
            "engine",
            Status.OK,
            f"{engine['engine_id']} (process {engine['pid']}) serves {engine['model']}, for "
            f"{as_age(now - engine['started_s'])}; figures of {_ago(now, self.status)}",
        )
        extra_config = _without_hidden(self.status["config"])
        try:
            config = checked(extra_config)
        except ConfigError as refused:  # of another version, or of a package that is not here
            yield Finding.of_refusal("configuration", str(refused))
            return
        yield from self._switches()
        yield from self._of_host()
        lasting = [tier.config.type for tier in config.lasting_tiers]
        release = _vllm_release_of(engine)
        environment = None if self.pid is None else _environment_of(self.pid)
        if lasting and release is not None and environment is not None:
            yield check_hash_seed(release, lasting, Machine(environment=environment))
        for tier in config.tiers:
            label = tier_label(tier.config.position, tier.config.type)
            yield from self._of_tier(label)
            contents = list(self._contents(label, tier))
            has_own = self._has_own(label) or (
                not self.remarks.get(label) and all(its.status is Status.OK for its in contents)
            )
            for found in (*contents, _canary(tier, extra_config, has_own=has_own)):
                yield replace(found, name=found.name.replace(tier.config.at, label, 1))

    def _switches(self) -> Iterator[Finding]:
        """What the engine's owner has switched off since it runs."""
        switches = self.status.get("switches", {})
        for what in ("stores", "loads"):
            if labels := switches.get(f"{what}_off"):
                found = f"{what} are switched off: {', '.join(labels)}"
                remedy = f"Switch them on again: kvtier switch --{what} on"
                yield Finding(f"switch.{what}", Status.PROBLEM, found, remedy)
        share = float(switches.get("share", 100))
        if share < 100:
            found = f"kvtier serves {share:g} % of the requests"
            yield Finding(
                "switch.share", Status.WARNING, found, "Serve all: kvtier switch --share 100"
            )

    # --- host memory ---------------------------------------------------------------------------

    def _of_host(self) -> Iterator[Finding]:
        stored = self._host("stored_blocks")
        loaded = self._host("loaded_blocks")
        slots = self._gauges.get("kvtier_cpu_slots", 0)
        kept_out = {what: self._host(f"{what}_blocks") for what in _NOT_IN_HOST}
        found = f"{stored:,.0f} blocks stored, {loaded:,.0f} loaded, {slots:,.0f} slots"
        if stored or not any(kept_out.values()):
            if not stored and not loaded:
                found += ": no prompt of a whole block was served yet"
            yield Finding("host.use", Status.OK, found)
            return
        what = max(kept_out, key=lambda each: kept_out[each])
        reason, remedy = _NOT_IN_HOST[what]
        count = kept_out[what]
        found = f"nothing is stored: {count:,.0f} blocks were left out because {reason}"
        is_wanted = what in _NOT_IN_HOST_ON_PURPOSE
        yield Finding("host.stores", Status.WARNING if is_wanted else Status.PROBLEM, found, remedy)

    def _host(self, name: str) -> float:
        return self._counters.get(f"kvtier_cpu_{name}", 0)

    # --- tiers ---------------------------------------------------------------------------------

    def _of_tier(self, label: str) -> Iterator[Finding]:
        found = [
            *self._start(label),
            *self._room(label),
            *self._breaker(label),
            *self._seals(label),
            *self._errors(label),
            *self._guard(label),
            *self._stores(label),
        ]
        yield from found
        yield self._use(label, has_reason=bool(found))

    def _count(self, label: str, name: str) -> float:
        return self._counters.get(tier_series(label, name), 0)

    def _own(self, label: str, *ends: str) -> Counter[str]:
        """The tier's own counters whose names have one of these ends, without prefix."""
        found: Counter[str] = Counter()
        for series, count in self._counters.items():
            name, _, labels = series.partition("{")
            if f'tier="{label}"' in labels and any(end in name for end in ends) and count:
                found[name.removeprefix(f"kvtier_{label.partition(':')[2]}_")] += int(count)
        return found

    def _start(self, label: str) -> Iterator[Finding]:
        """What the tier has found out at the start, unless requests have found blocks since. Loads
        do not tell: at the start, an engine loads some blocks to measure the tier."""
        remark = self.remarks.get(label, "")
        if not remark or self._count(label, "hit_blocks"):
            return
        name = f"{label}.start"
        found, _, remedy = remark.partition(": start all engines")
        if remedy:
            remedy = f"Start all engines{remedy}"
            yield Finding(name, Status.PROBLEM, f"wrong hash seed: {found}", remedy)
            return
        is_other_model = " and this engine runs " in remark
        yield Finding(
            name,
            Status.WARNING if is_other_model else Status.PROBLEM,
            f"wrong fingerprint: {remark}",
            "Nothing is wrong if several models share the storage"
            if is_other_model
            else "Start the engine with what the blocks were made with. If that has changed for "
            "good, it fills the tier anew",
        )

    def _failed_stores(self, label: str) -> float:
        """Those that have another reason than that the tier is full."""
        refused = self._own(label, "_refused_blocks").total()
        return max(self._count(label, "failed_stores") - refused, 0)

    def _is_only_full(self, label: str) -> bool:
        """True if stores have failed, and all because the tier had no room."""
        others = self._failed_stores(label) or self._count(label, "late_stores")
        return bool(self._count(label, "failed_stores") and not others)

    def _breaker(self, label: str) -> Iterator[Finding]:
        for name, what in (("breaker_state", "loads"), ("store_breaker_state", "stores")):
            state = self._gauges.get(tier_series(label, name), 0)
            if what == "stores" and self._is_only_full(label):
                continue
            if state == _CUT_OFF:
                failed = self._count(label, f"failed_{what}") + self._count(label, f"late_{what}")
                yield Finding(
                    f"{label}.breaker",
                    Status.PROBLEM,
                    f"the breaker is open: the tier is cut off for {what}, after {failed:,.0f} "
                    "that failed or were late. The engine computes instead, and tries again",
                    "The engine's log names the reason. Repair the storage; nothing has to be "
                    "restarted",
                )
            elif state == _TRIED:
                found = f"the breaker was open, and {what} are being tried again"
                yield Finding(f"{label}.breaker", Status.WARNING, found, "Look again in a minute")

    def _seals(self, label: str) -> Iterator[Finding]:
        counts = {reason: self._count(label, f"seal_{reason}") for reason in SealFailure}
        reasons = ", ".join(f"{reason} {count:,.0f}" for reason, count in counts.items() if count)
        if reasons:
            yield Finding(
                f"{label}.seals",
                Status.WARNING,
                f"blocks were refused by their seals, and computed: {reasons}",
                "Run kvtier store verify on the storage; look for a failing disk, or for another "
                "program that writes there",
            )

    def _errors(self, label: str) -> Iterator[Finding]:
        names = ("failed_stores", "failed_loads", "late_stores", "late_loads", "late_lookups")
        counts = {name: self._count(label, name) for name in names}
        counts["failed_stores"] = self._failed_stores(label)
        shown = [f"{name.replace('_', ' ')} {n:,.0f}" for name, n in counts.items() if n]
        own = self._own(label, "_errors", "_failures")
        shown += [f"{name.replace('_', ' ')} {count:,}" for name, count in own.items()]
        if not shown:
            return
        is_useless = not self._count(label, "stored_blocks") and counts["failed_stores"]
        yield Finding(
            f"{label}.errors",
            Status.PROBLEM if is_useless else Status.WARNING,
            f"the storage has failed: {', '.join(shown)}",
            "The engine's log names the first error of each kind, with the remedy",
        )

    def _room(self, label: str) -> Iterator[Finding]:
        refused = self._own(label, "_refused_blocks").total()
        if not refused:
            return
        stored = self._count(label, "stored_blocks")
        yield Finding(
            f"{label}.full",
            Status.PROBLEM if refused > stored else Status.WARNING,
            f"there was no room for {refused:,} blocks, and room for {stored:,.0f}",
            "See whose blocks are there (kvtier store stat), remove those of models that are no "
            "longer served (kvtier store gc), or give more room (max_bytes; a server's maxmemory)",
        )

    def _guard(self, label: str) -> Iterator[Finding]:
        reasons = ("slower", "late", "unmeasured")
        declined = {reason: self._count(label, f"declined_{reason}_blocks") for reason in reasons}
        total = sum(declined.values())
        loaded = self._count(label, "loaded_blocks")
        if total < _FEW_DECLINED * (total + loaded) or not total:
            return
        shown = ", ".join(f"{reason} {count:,.0f}" for reason, count in declined.items() if count)
        found = (
            f"the guard declined {total:,.0f} blocks that the tier has, and {loaded:,.0f} were "
            f"loaded: loading would take longer than computing ({shown})"
        )
        speed = self._gauges.get("kvtier_tiering_prefill_tokens_per_s", 0)
        if speed:
            found += f". The engine computes {speed:,.0f} prompt tokens per second"
        yield Finding(
            f"{label}.guard",
            Status.PROBLEM if total > _MOST_DECLINED * (total + loaded) else Status.WARNING,
            found,
            "Compare with kvtier bench; use faster storage, or leave the tier out",
        )

    def _stores(self, label: str) -> Iterator[Finding]:
        reasons = {what: self._count(label, f"{what}_blocks") for what in _NOT_STORED}
        if self._count(label, "stored_blocks") or not any(reasons.values()):
            return
        what = max(reasons, key=lambda each: reasons[each])
        if what == "shed" and self._is_only_full(label):
            return
        yield Finding(
            f"{label}.stores",
            Status.WARNING if what in _NOT_STORED_ON_PURPOSE else Status.PROBLEM,
            f"nothing is stored: {reasons[what]:,.0f} blocks were not, because {_NOT_STORED[what]}",
            _STORE_REMEDIES.get(what, "Use faster storage, or give more cpu_bytes_to_use"),
        )

    def _use(self, label: str, *, has_reason: bool) -> Finding:
        stored, loaded = self._count(label, "stored_blocks"), self._count(label, "loaded_blocks")
        hits = self._count(label, "hit_blocks")
        name = f"{label}.use"
        found = f"{stored:,.0f} blocks stored, {hits:,.0f} found by requests, {loaded:,.0f} loaded"
        if stored and not hits and not has_reason:
            return Finding(
                name,
                Status.WARNING,
                f"stores without loads: {found}",
                "Nothing wrong if prompts do not repeat, or stay in host memory. After a restart "
                "it means that blocks are not found: compare namespace and hash seed",
            )
        return Finding(name, Status.OK, found)

    def _has_own(self, label: str) -> bool:
        """True if this engine has stored blocks in the tier, or requests have found some."""
        return bool(self._count(label, "stored_blocks") or self._count(label, "hit_blocks"))

    def _contents(self, label: str, tier: CheckedTier) -> Iterator[Finding]:
        """Whether the tier has blocks of this engine. What it has stored itself may not be listed
        yet."""
        if self._has_own(label) or self.remarks.get(label):
            yield from check_contents(tier, None, is_judged=False)
            return
        described = json.dumps(self.status["engine"].get("namespace"))
        own = NamespaceDescription.decode(described.encode())
        yield from check_contents(tier, None if own is None else own.namespace, own)


def _ago(now: float, status: Mapping[str, Any]) -> str:
    age = max(now - float(status["collected_s"]), 0.0)
    return "now" if age < 1 else f"{as_age(age)} ago, when it last worked"


def _canary(tier: CheckedTier, extra_config: Mapping[str, Any], *, has_own: bool) -> Finding:
    """A few blocks through a tier that another process may open."""
    name = f"{tier.config.at}.canary"
    if isinstance(tier.options, DiskOptions):
        found = "not sent: only the engine may open its slab; its own figures are above"
        return Finding(name, Status.OK, found)
    if not tier.is_lasting:
        return Finding(name, Status.OK, "not sent: the tier is in the engine's memory")
    return send_few(tier, extra_config, has_own=has_own)


def _without_hidden(value: Any) -> Any:
    """The configuration without the values that the engine does not tell. Then credentials come
    from this environment."""
    if isinstance(value, dict):
        return {key: _without_hidden(each) for key, each in value.items() if each != HIDDEN}
    return [_without_hidden(each) for each in value] if isinstance(value, list) else value
