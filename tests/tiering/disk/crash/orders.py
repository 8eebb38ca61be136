"""What one life of the disk tier does, and how it ends."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Orders:
    """Everything that one life depends on, except the order in which its threads run."""

    seed: str
    number: int
    """Of this life in its run. Generations of blocks begin with it."""
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
    """The life kills itself when it reaches this point for the `nth` time."""
    nth: int
    kill_after_s: float | None
    """The life is killed from outside after this time."""
    ends_cleanly: bool
    """The life shuts down after its last operation; otherwise it kills itself."""
    write: str | None = None
    """The write policy, if an engine drives the tier. None: the tier gets its jobs directly."""
    mutant: str | None = None
    """A planted bug."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Bias:
    """Draws lives in which one planted bug shows soon. None: as usual."""

    point: str | None = None
    power_cut: str | None = None
    epoch_rate: float | None = None
    row_rate: float | None = None
    """How often the size of blocks changes."""
