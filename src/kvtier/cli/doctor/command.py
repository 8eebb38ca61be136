"""Runs `kvtier doctor` on a configuration: checks, canaries, speeds, and the verdict."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from kvtier.cli.checks.finding import Finding, Status, as_lines, has_problem, verdict_of
from kvtier.cli.checks.gpu import check_gpu
from kvtier.cli.checks.host import Machine, check_huge_pages, check_numa
from kvtier.cli.checks.options import (
    CheckedOptions,
    CheckedTier,
    checked,
    findings,
    warnings_of_kvtier,
)
from kvtier.cli.checks.tiers import check_answers, directory_of
from kvtier.cli.checks.vllm import check_hash_algorithm
from kvtier.cli.doctor.canary import TriedTier, as_rate, try_tier
from kvtier.cli.doctor.contents import check_contents
from kvtier.cli.doctor.payoff import LENGTHS, Payoff, TierPayoff, estimated_engine, slow_findings
from kvtier.cli.doctor.source import GivenConfig, read_source
from kvtier.cli.output import finish, write
from kvtier.cli.replay.command import as_duration, explain_os_error
from kvtier.cli.replay.options import engine_of, require, size_of
from kvtier.cli.store.terminal import Steps, shown_steps
from kvtier.config import ConfigError
from kvtier.config.errors import printable
from kvtier.replay.calibration import Calibration, NotMeasured, calibrate
from kvtier.replay.plan import NUMBER_BYTES, read_model
from kvtier.replay.settings import EngineSettings, SettingError

__all__ = ["DoctorWishes", "run_doctor"]

_BLOCK_BYTES = 1 << 20
_LARGEST_BLOCK = 64 << 20
_DISK_BYTES = 256 << 20
_DISK_S = 3.0
_ANSWERS_WITHIN_S = 10.0
_NAMESPACE = re.compile("[0-9a-f]{4,32}")


@dataclass(frozen=True, slots=True, kw_only=True)
class DoctorWishes:
    """The options, as the user has written them."""

    config: str
    model: str | None
    kv_dtype: str | None
    kv_bytes_per_token: str | None
    prefill: float | None
    prefill_times: str | None
    block_tokens: int
    namespace: str | None
    is_quick: bool


def run_doctor(wishes: DoctorWishes, *, as_json: bool) -> int:
    """Examine a configuration, and print what was found. Returns the exit code. Raises
    `SettingError`, `ModelError`, `WrongSource` and `ConfigError` for what the user can change."""
    require(wishes.block_tokens, "--block-tokens", "a whole number, 1 or more")
    if wishes.namespace is not None and not _NAMESPACE.fullmatch(wishes.namespace):
        allowed = "the first digits of a namespace, 4 to 32 of 0-9 and a-f"
        raise SettingError("--namespace", f'"{wishes.namespace}": give {allowed}')
    given = read_source(wishes.config)
    examination = Examination(given, _payoff_of(wishes, given), wishes.namespace)
    with shown_steps() as steps:
        examination.run(steps, is_quick=wishes.is_quick, block_tokens=wishes.block_tokens)
    write(examination.as_json() if as_json else examination.as_text())
    finish()
    return int(not examination.is_ok)


# --- the model ---------------------------------------------------------------------------------


def _payoff_of(wishes: DoctorWishes, given: GivenConfig) -> Payoff | None:
    """What loading and computing are compared with; None if the model's size is not known."""
    settings = EngineSettings()
    if wishes.prefill is not None or wishes.prefill_times is not None:
        engine: EngineSettings | None = engine_of(wishes.prefill, wishes.prefill_times, settings)
        speed_from = "given"
    else:
        engine, speed_from = _configured_speed(given, settings), "configured"
    if wishes.kv_dtype is not None and wishes.kv_dtype not in NUMBER_BYTES:
        allowed = ", ".join(NUMBER_BYTES)
        raise SettingError("--kv-dtype", f'"{wishes.kv_dtype}": give one of {allowed}')
    if wishes.kv_bytes_per_token is not None:
        if wishes.model is not None:
            raise SettingError("--kv-bytes-per-token", "give either this or --model")
        num_bytes = size_of(wishes.kv_bytes_per_token, "--kv-bytes-per-token")
        return Payoff(num_bytes, False, engine, speed_from)
    path = _config_of_model(wishes.model or given.model, is_required=wishes.model is not None)
    if path is None:
        if wishes.prefill is not None or wishes.prefill_times is not None:
            raise SettingError(
                "--prefill", "give the model, too: --model DIRECTORY, or --kv-bytes-per-token"
            )
        return None
    try:
        shape = read_model(path, wishes.kv_dtype)
    except OSError as error:
        explained = explain_os_error(path, error, "a model's config.json")
        raise SettingError("--model", explained) from None
    return Payoff(shape.bytes_per_token, shape.has_windows, engine, speed_from, shape)


def _configured_speed(given: GivenConfig, settings: EngineSettings) -> EngineSettings | None:
    speed = given.extra_config.get("prefill_tokens_per_s")
    if isinstance(speed, bool) or not isinstance(speed, int | float) or speed <= 0:
        return None
    return replace(settings, prefill_tokens_per_s=float(speed))


def _config_of_model(model: str | None, *, is_required: bool) -> str | None:
    """The path of the model's config.json. A script may name a model of the hub: then there is
    none."""
    if model is None:
        return None
    path = Path(model)
    if path.is_dir():
        return str(path / "config.json")
    return model if is_required or path.is_file() else None


# --- the examination ---------------------------------------------------------------------------


@dataclass(slots=True)
class Examination:
    """One configuration, and all that is found."""

    given: GivenConfig
    payoff: Payoff | None
    namespace: str | None = None
    """The first digits of that of the engine."""
    findings: list[Finding] = field(default_factory=list)
    tried: list[TriedTier] = field(default_factory=list)
    disks: dict[str, Calibration] = field(default_factory=dict)
    """By directory."""
    copy_bytes_per_s: float | None = None
    """Of copies within host memory."""
    gpu_bytes_per_s: float | None = None

    def run(self, steps: Steps, *, is_quick: bool, block_tokens: int) -> None:
        """Check everything, in the order in which it is shown."""
        machine = Machine(environment=os.environ | dict(self.given.environment))
        try:
            with warnings_of_kvtier() as said:
                config = checked(self.given.extra_config)
        except ConfigError as refused:
            self.findings += [
                Finding(
                    problem.key,
                    Status.PROBLEM,
                    f"got {problem.given}; allowed: {problem.allowed}",
                    problem.remedy,
                )
                for problem in refused.problems
            ]
            return
        self.findings += said
        config = self._without_hung_disks(config, steps)
        steps.total = steps.num_begun + 2 + (1 if is_quick else 2) * len(config.tiers)
        steps.begin("this machine")
        self._check_machine(config, machine)
        steps.begin("copies to the GPU")
        gpu = check_gpu(machine)
        self.findings.append(gpu.finding)
        self.gpu_bytes_per_s = gpu.load_bytes_per_s
        if gpu.peak_flops is not None:
            self._estimate_speed(gpu.peak_flops)
        block_bytes = self._block_bytes(block_tokens, config)
        for tier in config.tiers:
            self.findings += check_contents(tier, self.namespace)
            if not is_quick:
                steps.begin(f"the disk of {tier.config.at}")
                self._measure_disk(tier)
            steps.begin(f"a canary through {tier.config.at}")
            self._try(tier, block_bytes)

    def _estimate_speed(self, flops: float) -> None:
        """Estimate how fast the engine computes, unless that is known. `flops`: of one GPU."""
        payoff = self.payoff
        if payoff is None or payoff.engine is not None or payoff.shape is None:
            return
        engine = estimated_engine(payoff.shape, flops * self.given.world_size)
        if engine is not None:
            self.payoff = replace(payoff, engine=engine, speed_from="estimated")

    def _without_hung_disks(self, config: CheckedOptions, steps: Steps) -> CheckedOptions:
        """The configuration without tiers whose disks do not answer. Every other check of them
        would hang."""
        hung: dict[Path, bool] = {}
        answering = []
        for tier in config.tiers:
            directory = directory_of(tier.options)
            if directory is not None and directory not in hung:
                steps.begin(f"whether the disk of {tier.config.at} answers")
                found = check_answers(tier.config.at, directory, _ANSWERS_WITHIN_S)
                hung[directory] = found is not None
                self.findings += [] if found is None else [found]
            if directory is None or not hung[directory]:
                answering.append(tier)
        return replace(config, tiers=answering)

    def _check_machine(self, config: CheckedOptions, machine: Machine) -> None:
        cpu_bytes = config.options.cpu_bytes_to_use
        found = findings(
            config,
            self.given.world_size,
            machine,
            is_plain=self.given.is_plain,
            sets_variables=False,
        )
        # How the command vllm fails does not matter to a script that does without it.
        ignored = () if self.given.uses_vllm_command else ("vllm_serve",)
        self.findings += [each for each in found if each.name not in ignored]
        algorithm = self.given.options.get("--prefix-caching-hash-algo")
        if config.lasting_tiers and algorithm is not None:
            self.findings.append(check_hash_algorithm(algorithm, machine))
        self.findings.append(check_huge_pages(machine))
        self.findings.append(check_numa(cpu_bytes, machine))

    def _block_bytes(self, block_tokens: int, config: CheckedOptions) -> int:
        """Bytes of one block: of the model, if it is known, in whole pages."""
        if self.payoff is None:
            return _BLOCK_BYTES
        per_chunk = config.options.blocks_per_chunk or 1
        wanted = self.payoff.bytes_per_token * block_tokens * per_chunk
        page = os.sysconf("SC_PAGE_SIZE")
        return min(-(-wanted // page) * page, _LARGEST_BLOCK)

    def _measure_disk(self, tier: CheckedTier) -> None:
        """Measure the disk below a tier, each directory once."""
        directory = directory_of(tier.options)
        if directory is None or str(directory) in self.disks:
            return
        name = f"{tier.config.at}.disk"
        try:
            measured = calibrate(str(directory), lambda _done, _all: None, _DISK_BYTES, _DISK_S)
        except NotMeasured as reason:
            found, _, remedy = str(reason).rpartition(": ")
            self.findings.append(Finding(name, Status.WARNING, f"not measured: {found}", remedy))
            return
        self.disks[str(directory)] = measured
        self.copy_bytes_per_s = measured.copy_bytes_per_s
        how = (
            "O_DIRECT" if measured.is_direct else "through the page cache, so this is not the disk"
        )
        self.findings.append(
            Finding(
                name,
                Status.OK,
                f"{directory} reads {as_rate(measured.read_bytes_per_s)}, writes "
                f"{as_rate(measured.write_bytes_per_s)}, {measured.latency_s * 1e3:.2f} ms for one "
                f"page ({how})",
            )
        )

    def _try(self, tier: CheckedTier, block_bytes: int) -> None:
        tried = try_tier(tier, self.given.extra_config, block_bytes, self.findings)
        self.tried.append(tried)
        tried.findings += slow_findings(tried)
        if self.payoff is not None and (pays := self.payoff.finding(tried)) is not None:
            tried.findings.append(pays)
        self.findings += tried.findings

    # --- the result ----------------------------------------------------------------------------

    @property
    def is_ok(self) -> bool:
        return not has_problem(self.findings)

    @property
    def verdict(self) -> str:
        return verdict_of(self.findings)

    def payoffs(self) -> list[TierPayoff]:
        """Loading from each place that was measured."""
        if self.payoff is None:
            return []
        rows = []
        bus = self.gpu_bytes_per_s or self.copy_bytes_per_s
        if bus is not None:
            rows.append(self.payoff.of("host memory", bus, 0.0))
        for tried in self.tried:
            if tried.speed is not None:
                name = f"{tried.at} ({tried.type})"
                speed = tried.speed
                rows.append(self.payoff.of(name, speed.load_bytes_per_s, speed.latency_s))
        return rows

    def as_json(self) -> str:
        payoff = self.payoff
        document: dict[str, Any] = {
            "config": self.given.name,
            "ok": self.is_ok,
            "verdict": self.verdict,
            "checks": [finding.as_json() for finding in self.findings],
            "disks": {path: disk._asdict() for path, disk in self.disks.items()},
            "gpu_bytes_per_s": self.gpu_bytes_per_s,
            "tiers": [tried.as_json() for tried in self.tried],
            "model": None
            if payoff is None
            else {
                "kv_bytes_per_token": payoff.bytes_per_token,
                "is_upper_bound": payoff.is_upper_bound,
                "prompt_tokens": list(LENGTHS),
                "computed_s": payoff.computed_s,
                "speed_from": payoff.speed_from if payoff.engine is not None else None,
                "tiers": [row.as_json() for row in self.payoffs()],
            },
        }
        return json.dumps(document, indent=2) + "\n"

    def as_text(self) -> str:
        lines = [f"kvtier doctor: {self.given.name}", *as_lines(self.findings)]
        lines += ["", *self._payoff_lines()] if self.payoff is not None else []
        return "".join(f"{printable(line)}\n" for line in [*lines, "", self.verdict])

    def _payoff_lines(self) -> Iterator[str]:
        payoff = self.payoff
        assert payoff is not None
        rows = self.payoffs()
        width = max((len(row.name) for row in rows), default=0) + 2
        width = max(width, len("a prompt of this many tokens") + 2)
        yield f"{'a prompt of this many tokens':{width}}" + "".join(f"{n:>11,}" for n in LENGTHS)
        if payoff.computed_s is not None:
            yield f"{'computed in':{width}}" + _times(payoff.computed_s)
        for row in rows:
            yield f"{row.name:{width}}" + _times(row.load_s, row.pays)
        if payoff.computed_s is not None:
            yield f"* faster than computing, at the speed {_OF_SPEED[payoff.speed_from]}"
        else:
            for row in rows:
                yield (
                    f"{row.name}: pays if the engine computes fewer than "
                    f"{row.break_even_tokens_per_s:,.0f} prompt tokens per second"
                )
            yield "--prefill N, tokens per second, compares"


_OF_SPEED = {
    "given": "given with --prefill or --prefill-times",
    "configured": "that the configuration states (prefill_tokens_per_s)",
    "estimated": "estimated from the GPU and the model; --prefill is more exact",
}


def _times(seconds: Sequence[float], marks: Sequence[bool] | None = None) -> str:
    marked = marks or [False] * len(seconds)
    return "".join(
        f"{as_duration(each) + ('*' if mark else ''):>11}"
        for each, mark in zip(seconds, marked, strict=True)
    )
