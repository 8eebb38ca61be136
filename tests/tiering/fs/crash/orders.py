"""What one life of the fs tier does, and how it ends."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Orders:
    """Everything that one life depends on, except what the others do meanwhile."""

    seed: str
    number: int
    """Of this life in its run."""
    root: str
    max_bytes: int
    namespace: str
    boot: int
    """Number of times that the machine was started."""
    num_keys: int
    num_operations: int
    """At most."""
    work_for_s: float = 3600.0
    """Seconds after which no operation begins."""
    epoch_rate: float = 0.0
    is_hasty: bool = True
    """The tier's periodic work is done much more often than usual."""
    point: str | None = None
    """The life kills itself when it reaches this point for the `nth` time."""
    nth: int = 1
    kill_after_s: float | None = None
    """The life is killed from outside after this time."""
    ends_cleanly: bool = False
    """The life shuts down after its last operation; otherwise it kills itself."""
    inspects: bool = False
    """The life loads all blocks at its end; it must be the only one left."""
    quiet_patience_s: float = 20.0
    """Seconds in which the gauge must equal what `du` says, when it inspects; 0: not checked."""
    mutant: str | None = None
    """A planted bug."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Bias:
    """Draws lives in which one planted bug shows soon. None: as usual."""

    point: str | None = None
    epoch_rate: float | None = None
    num_blocks: int | None = None
    foreign_rate: float | None = None
    quiet_patience_s: float = 0.0
