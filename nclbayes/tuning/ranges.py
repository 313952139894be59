"""Ranges of settings, their grids, and all that a search of them is."""

from __future__ import annotations

import math
import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from typing import TYPE_CHECKING

from nclbayes.errors import SettingError

if TYPE_CHECKING:
    import optuna


@dataclass(frozen=True)
class Range:
    """A range to search on a logarithmic scale.

    Attributes:
        name: The setting: one of the engine's, or ``prior_scale``.
        low: The least value.
        high: The greatest.
        factor: The ratio of neighbours on a grid.
        whole: Whether only whole numbers will do.

    Raises:
        SettingError: If it is empty or not positive.

    Example:
        >>> from nclbayes.tuning import Range
        >>> Range("stiffness", 20.0, 2000.0).grid()
        [20.0, 200.0, 2000.0]
    """

    name: str
    low: float
    high: float
    factor: float = 10.0
    whole: bool = False

    def __post_init__(self) -> None:
        if not 0 < self.low <= self.high < math.inf:
            raise SettingError(f"A range needs 0 < low <= high, both finite, not {self.low:g} to {self.high:g}.")
        if not self.factor > 1:
            raise SettingError(f"The factor of a range must be above 1, not {self.factor:g}.")
        if self.whole and round(self.low) < 1:
            raise SettingError(f"{self.name} is a whole number of at least 1: its range cannot begin at {self.low:g}.")

    @classmethod
    def parse(cls, text: str) -> Range:
        """A range from text such as ``alpha=1e-6:1e-2``.

        Args:
            text: The text.

        Returns:
            The range.

        Raises:
            SettingError: If it is not of that form.
        """
        name, equals, rest = text.partition("=")
        low, colon, high = rest.partition(":")
        try:
            if not (name and equals and colon):
                raise ValueError
            ends = float(low), float(high)
        except ValueError:
            raise SettingError(f"A range is given as name=low:high, such as alpha=1e-6:1e-2, not '{text}'.") from None
        return cls(name.strip(), *ends)

    def grid(self) -> list[float]:
        """From low on, each so many times the one before, and high."""
        steps = math.ceil(math.log(self.high / self.low, self.factor) - 1e-6)
        values = [self.low * self.factor**i for i in range(steps)] + [self.high]
        return list(dict.fromkeys(map(round, values))) if self.whole else values

    def suggest(self, trial: optuna.Trial) -> float:
        """A sampler's next value, or that of the grid which the trial stands for."""
        if self.whole:
            return trial.suggest_int(self.name, round(self.low), round(self.high), log=True)
        return trial.suggest_float(self.name, self.low, self.high, log=True)


def ranges_of(given: Mapping[str, tuple[float, float]] | Sequence[Range]) -> tuple[Range, ...]:
    """Ranges as they may be given.

    Args:
        given: By name, the two ends; or ranges.

    Returns:
        Ranges.

    Raises:
        SettingError: If one is empty, or a setting has several.
    """
    if isinstance(given, Mapping):
        try:
            ends = [(name, float(low), float(high)) for name, (low, high) in given.items()]
        except (TypeError, ValueError):
            raise SettingError('Ranges are given by name, each by its ends: {"stiffness": (20, 2000)}.') from None
        return tuple(Range(*each) for each in ends)
    if not all(isinstance(r, Range) for r in given):
        raise SettingError('Ranges are given by name, each by its ends: {"stiffness": (20, 2000)}.')
    names = [r.name for r in given]
    if len(set(names)) < len(names):
        raise SettingError(f"A setting can have one range only, and these are of {', '.join(names)}.")
    return tuple(given)


@dataclass(frozen=True)
class Plan:
    """Which values a search tries.

    Attributes:
        ranges: What to vary.
        trials: How many values to try; None: the whole grid, or 20.
        sampler: "grid" or "tpe" (Optuna's tree of Parzen estimators).
    """

    ranges: tuple[Range, ...]
    trials: int | None = None
    sampler: str = "grid"

    def __post_init__(self) -> None:
        if self.sampler not in ("grid", "tpe"):
            raise SettingError(f"sampler is '{self.sampler}'; choose 'grid' or 'tpe'.")
        if not self.ranges:
            raise SettingError("There is nothing to search for: name a range.")

    @property
    def count(self) -> int:
        """How many trials there will be."""
        if self.sampler == "grid":
            points = len(self.grid())
            return points if self.trials is None else min(self.trials, points)
        return self.trials or 20

    def grid(self) -> list[dict[str, float]]:
        """Every combination of the ranges' grids, in an order that is random and always the same."""
        points = product(*(r.grid() for r in self.ranges))
        found = [dict(zip((r.name for r in self.ranges), point, strict=True)) for point in points]
        random.Random(0).shuffle(found)
        return found

    def ends(self) -> list[dict[str, float]]:
        """All ranges at their low ends, and all at their high ones."""
        return [{r.name: r.grid()[end] for r in self.ranges} for end in (0, -1)]
