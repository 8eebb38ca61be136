"""Planted bugs, each of which a run has to notice. They are planted in the lives alone."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

__all__ = ["Mutant", "Mutants"]

_Bias = TypeVar("_Bias")


@dataclass(frozen=True, slots=True)
class Mutant(Generic[_Bias]):
    """One planted bug, and the kind of lives in which it shows."""

    plant: Callable[[], None]
    bias: _Bias
    first_seed: int
    """One of the runs from this seed on notices it soon."""


class Mutants(dict[str, Mutant[_Bias]]):
    """The planted bugs of a tier, by name."""

    def __init__(self, bias_cls: type[_Bias]) -> None:
        super().__init__()
        self._bias_cls = bias_cls

    def mutant(
        self, first_seed: int = 0, **bias: Any
    ) -> Callable[[Callable[[], None]], Callable[[], None]]:
        """Decorates a function that plants a bug. `bias`: fields of the tier's bias."""

        def register(plant_bug: Callable[[], None]) -> Callable[[], None]:
            self[plant_bug.__name__] = Mutant(plant_bug, self._bias_cls(**bias), first_seed)
            return plant_bug

        return register
