"""The file format of recorded calls of vLLM's scheduler to a kvtier manager.

One JSON document per line. The first describes the recording; each of the others is one call, or a
run of lookups for one request. Requests and keys are small numbers, in order of appearance; keys
are written as runs, "0-63,70,9-5", upwards or downwards.
"""

from __future__ import annotations

import gzip
import json
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from itertools import groupby
from pathlib import Path
from typing import Any

FOLDER = Path(__file__).parent / "data" / "vllm_calls"
_COMPRESS_ABOVE = 100_000

LETTERS = {"MISS": "M", "HIT": "H", "HIT_PENDING": "P", "RETRY": "R"}
"""One letter per lookup result."""


@dataclass(slots=True)
class Call:
    """One call of the contract. Only fields that its method has are set."""

    method: str
    request: int | None = None
    keys: list[int] = field(default_factory=list)
    """In the given order; sorted if vLLM gave a set."""
    new_requests: list[int] = field(default_factory=list)
    preempted_requests: list[int] = field(default_factory=list)
    result: Any = None
    """The result. `lookup`: one letter for each key. `prepare_store`: null, or the stored and
    evicted keys as runs. `has_pending_work`: a boolean. `take_events`: each as [removed, runs of
    keys]."""


@dataclass(slots=True)
class Recording:
    """The calls of one scenario, and the manager they were recorded with."""

    scenario: str
    vllm_version: str
    num_blocks: int
    policy: str
    key_groups: list[int]
    """The group of each key; the keys are the indices."""
    calls: list[Call] = field(default_factory=list)


def recordings() -> dict[str, Path]:
    """All recordings, by the name of the scenario."""
    return {path.name.split(".")[0]: path for path in sorted(FOLDER.glob("*.jsonl*"))}


def load(path: Path) -> Recording:
    """Read a recording."""
    raw = path.read_bytes()
    text = gzip.decompress(raw) if path.suffix == ".gz" else raw
    header, *lines = [json.loads(line) for line in text.splitlines()]
    recording = Recording(**header)
    for line in lines:
        recording.calls.append(Call(**line | {"keys": list(parse_runs(line.get("keys", "")))}))
    return recording


def save(recording: Recording, folder: Path = FOLDER) -> Path:
    """Write a recording, compressed if it is large; an earlier one of the scenario is replaced."""
    header = asdict(recording)
    del header["calls"]
    lines = [json.dumps(header, separators=(",", ":"))]
    for call in _lookups_joined(recording.calls):
        fields = asdict(call) | {"keys": format_runs(call.keys)}
        kept = {name: value for name, value in fields.items() if value not in (None, "", [])}
        lines.append(json.dumps(kept, separators=(",", ":")))
    text = ("\n".join(lines) + "\n").encode()
    plain, compressed = (folder / f"{recording.scenario}.{end}" for end in ("jsonl", "jsonl.gz"))
    plain.unlink(missing_ok=True)
    compressed.unlink(missing_ok=True)
    if len(text) <= _COMPRESS_ABOVE:
        plain.write_bytes(text)
        return plain
    compressed.write_bytes(gzip.compress(text, mtime=0))
    return compressed


def _lookups_joined(calls: Iterable[Call]) -> Iterator[Call]:
    """Merge consecutive lookups of one request into one call."""
    for is_lookup, run in groupby(calls, lambda call: call.method == "lookup"):
        if not is_lookup:
            yield from run
            continue
        for request, lookups in groupby(run, lambda call: call.request):
            joined = Call("lookup", request, result="")
            for lookup in lookups:
                joined.keys += lookup.keys
                joined.result += lookup.result
            yield joined


def format_runs(keys: Sequence[int]) -> str:
    """Numbers as runs: [0, 1, 2, 7, 6, 5] is "0-2,7-5"."""
    runs: list[str] = []
    start = 0
    while start < len(keys):
        end = start + 1
        if end < len(keys) and abs(keys[end] - keys[start]) == 1:
            step = keys[end] - keys[start]
            while end < len(keys) and keys[end] - keys[end - 1] == step:
                end += 1
        first, last = keys[start], keys[end - 1]
        runs.append(str(first) if end == start + 1 else f"{first}-{last}")
        start = end
    return ",".join(runs)


def parse_runs(text: str) -> Iterator[int]:
    """The numbers of `format_runs`."""
    for run in filter(None, text.split(",")):
        first, _, last = run.partition("-")
        start, stop = int(first), int(last or first)
        step = 1 if stop >= start else -1
        yield from range(start, stop + step, step)
