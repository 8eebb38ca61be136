"""How tiers misbehave."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum, auto


class Weather(Enum):
    """The condition of a tier's storage. It changes from step to step."""

    FAIR = auto()
    BLACK_HOLE = auto()
    """Nothing is answered and nothing moves until it is over."""
    STORM = auto()
    """Everything raises or fails."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Faults:
    """The faults of one kind of tier, as rates per call, per job or per block. All 0: a sound
    tier."""

    raises: float = 0.0
    """Per call, from any method."""
    refuses: float = 0.0
    """Per job: refuses it."""
    slow: float = 0.0
    """Per job and per lookup: takes many times as long as the deadline allows."""
    hangs: float = 0.0
    """Per job: does not move until the tier recovers."""
    drops: float = 0.0
    """Per job: ended, but not reported until the tier recovers."""
    duplicates: float = 0.0
    """Per job: reported again later."""
    invents: float = 0.0
    """Per poll: reports unknown jobs, jobs of another tier, or jobs of the future."""
    fails: float = 0.0
    """Per job: nothing is moved, or the wrong bytes are."""
    fails_partly: float = 0.0
    """Per block."""
    garbage: float = 0.0
    """Per answer: breaks the contract."""
    corrupts: float = 0.0
    """Per stored block: its bytes or its identity are corrupted."""
    vanishes: float = 0.0
    """Per block to be loaded: it is gone."""
    forgets_epochs: bool = False
    """Keeps all epochs in one namespace."""
    weather: float = 0.0
    """Per step: the weather changes."""


CHARACTERS: dict[str, Faults] = {
    "sound": Faults(),
    "evicting": Faults(vanishes=0.1),
    "slow": Faults(slow=0.3, vanishes=0.02),
    "stuck": Faults(hangs=0.2, slow=0.1),
    "lossy": Faults(drops=0.15, duplicates=0.05, slow=0.05),
    "misreporting": Faults(duplicates=0.3, invents=0.3, garbage=0.05, slow=0.1),
    "raising": Faults(raises=0.05),
    "refusing": Faults(refuses=0.3, slow=0.05),
    "failing": Faults(fails=0.2, fails_partly=0.1, vanishes=0.1),
    "corrupt": Faults(corrupts=0.4, forgets_epochs=True, slow=0.1),
    "garbage": Faults(garbage=0.2, fails_partly=0.05),
    "black hole": Faults(weather=0.06, slow=0.05),
    "everything": Faults(
        raises=0.01,
        refuses=0.05,
        slow=0.1,
        hangs=0.03,
        drops=0.03,
        duplicates=0.1,
        invents=0.1,
        fails=0.05,
        fails_partly=0.05,
        garbage=0.02,
        corrupts=0.1,
        vanishes=0.05,
        weather=0.03,
    ),
}
