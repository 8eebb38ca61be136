"""What one life of a tier is told to do, and how it ends."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Orders:
    """Everything that one life depends on, but for the order in which its threads run."""

    seed: str
    number: int
    """Of this life on its slab. Generations of blocks are numbered by it."""
    path: str
    row_bytes: int
    max_bytes: int
    namespace: str
    policy: str
    num_keys: int
    num_operations: int
    write_every_s: float
    """How often the index is written."""
    epoch_rate: float
    point: str | None
    """Kills itself when it gets there for the `nth` time."""
    nth: int
    kill_after_s: float | None
    """Is killed from outside then, wherever it is."""
    ends_cleanly: bool
    """Shuts down after its last operation; otherwise it is killed there."""
    mutant: str | None = None
    """A planted bug."""

    def to_json(self) -> str:
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: str) -> Orders:
        return cls(**json.loads(text))


@dataclass(frozen=True, slots=True, kw_only=True)
class Bias:
    """What lives are to be drawn into, to show one thing soon."""

    point: str | None = None
    power_cut: str | None = None
    epoch_rate: float | None = None
    row_rate: float | None = None
    """How often the size of blocks changes."""
