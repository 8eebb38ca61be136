"""What one life of an engine is told to do, and how it ends."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Orders:
    """Everything that one life depends on, but for what the others do meanwhile."""

    seed: str
    number: int
    """Of this life in its saga."""
    root: str
    max_bytes: int
    namespace: str
    boot: int
    """How often the machine has been started."""
    num_keys: int
    num_operations: int
    """At most."""
    work_for_s: float = 3600.0
    """No operation begins later."""
    epoch_rate: float = 0.0
    is_hasty: bool = True
    """What is done every few seconds is done all the time."""
    point: str | None = None
    """Kills itself when it gets there for the `nth` time."""
    nth: int = 1
    kill_after_s: float | None = None
    """Is killed from outside then, wherever it is."""
    ends_cleanly: bool = False
    """Shuts down after its last operation; otherwise it is killed there."""
    inspects: bool = False
    """At the end, when it is the only one left: loads all blocks, and waits until all is quiet."""
    quiet_patience_s: float = 20.0
    """How long it waits for that; 0: it does not."""
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
    epoch_rate: float | None = None
    num_blocks: int | None = None
    foreign_rate: float | None = None
    quiet_patience_s: float = 0.0
