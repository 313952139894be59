"""What to search for: ranges of a method's hyperparameters, on a held-out seed."""

from __future__ import annotations

import math
import random
from collections.abc import Mapping
from dataclasses import dataclass, replace
from itertools import product
from typing import TYPE_CHECKING, Any

from nclbayes.errors import SettingError
from nclbayes.experiments.config import RunConfig
from nclbayes.experiments.setup import base_name
from nclbayes.methods import find_method

if TYPE_CHECKING:
    import optuna

HELD_OUT = 1000
"""The default seed of a search, which no evaluation uses."""


@dataclass(frozen=True)
class Range:
    """A range to search on a logarithmic scale.

    Attributes:
        name: The setting: one of the method's, or ``prior_scale``.
        low: The least value.
        high: The greatest.
        factor: The ratio of neighbours on a grid.
        whole: Whether only whole numbers will do.

    Raises:
        SettingError: If it is empty or not positive.
    """

    name: str
    low: float
    high: float
    factor: float = 10.0
    whole: bool = False

    def __post_init__(self) -> None:
        if not 0 < self.low <= self.high < math.inf:
            raise SettingError(f"A range needs 0 < low <= high, both finite, not {self.low:g} to {self.high:g}.")
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


# The paper's ranges. Of NCL it varies p_w^-2 = N s^2 from 1e2 to 1e11, with N = 12,000: s from 0.09 to 2,900.
_SCALES = Range("prior_scale", math.sqrt(1e2 / 12_000), math.sqrt(1e11 / 12_000), factor=math.sqrt(10))
PAPER_RANGES: dict[str, Range] = {
    "si": Range("prior_weight", 1e-5, 1e8),
    "ewc": Range("prior_weight", 1e-4, 1e14),
    "kfac": Range("prior_weight", 1e-4, 1e14),
    "decoupled-kfac": Range("preconditioner_weight", 1e0, 1e6),
    "reverse-decoupled-kfac": Range("prior_weight", 1e0, 1e6),
    "owm": Range("alpha", 1e-12, 1e6),
    "dowm": Range("alpha", 1e-12, 1e6),
    "gpm": Range("threshold", 0.8, 0.999, factor=1.05),
    "laplace-ncl": _SCALES,
    # Samples of wider priors are noise.
    "variational-ncl": Range("prior_scale", 0.01, 100.0, factor=math.sqrt(10)),
    "vcl": Range("prior_scale", 0.01, 100.0, factor=math.sqrt(10)),
}


@dataclass(frozen=True)
class Search:
    """What to search for.

    Attributes:
        base: The run whose hyperparameter is sought; its seed is the held-out one.
        ranges: What to vary; empty: the paper's range for the method.
        trials: How many values to try; None: the whole grid, or 20.
        sampler: "grid" or "tpe" (Optuna's tree of Parzen estimators).
    """

    base: RunConfig
    ranges: tuple[Range, ...] = ()
    trials: int | None = None
    sampler: str = "grid"

    def __post_init__(self) -> None:
        if self.sampler not in ("grid", "tpe"):
            raise SettingError(f"sampler is '{self.sampler}'; choose 'grid' or 'tpe'.")
        names = [r.name for r in self.ranges]
        if len(set(names)) < len(names):
            raise SettingError(f"A setting can have one range only, and these are of {', '.join(names)}.")
        method = find_method(self.base.method)
        ranges = self.ranges or (PAPER_RANGES.get(base_name(method.name), _SCALES),)
        if not self.ranges and not method.engine.has_prior and base_name(method.name) not in PAPER_RANGES:
            raise SettingError(f"{method.name} has no prior to search for: name a range, such as --range lr=0.001:0.1.")
        whole = method.whole_numbers
        object.__setattr__(self, "ranges", tuple(replace(r, whole=r.name in whole) for r in ranges))

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

    def config(self, values: Mapping[str, float]) -> RunConfig:
        """The run with some values of the hyperparameters.

        Args:
            values: By name.

        Returns:
            The configuration.

        Raises:
            SettingError: If the method has no such setting.
        """
        base, rest = self.base, dict(values)
        scale = rest.pop("prior_scale", base.prior_scale)
        given: dict[str, Any] = {
            "size": base.size,
            "tasks": base.tasks,
            "num_samples": base.num_samples,
            "units": base.units,
        }
        return RunConfig.of(
            base.set,
            base.method,
            base.scenario,
            base.seed,
            prior_scale=scale,
            settings={**base.settings, **rest},
            device=base.device,
            **given,
        )
