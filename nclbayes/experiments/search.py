"""What to search for: ranges of a method's hyperparameters, on a held-out seed."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace

from nclbayes.errors import SettingError
from nclbayes.experiments.config import RunConfig
from nclbayes.experiments.setup import base_name
from nclbayes.methods import find_method
from nclbayes.tuning.ranges import Plan, Range, ranges_of

HELD_OUT = 1000
"""The default seed of a search, which no evaluation uses."""


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
    "bgd": Range("init_scale", 0.01, 0.1, factor=10**0.25),
    "foo-vb": Range("init_scale", 0.1, 3.0, factor=math.sqrt(10)),
    "ivon": Range("hess_init", 0.01, 10.0, factor=math.sqrt(10)),
}


# Around what an engine begins with that decides itself.
_STIFFNESS = Range("stiffness", 20.0, 2000.0, factor=math.sqrt(10))


@dataclass(frozen=True)
class Search:
    """What to search for.

    Attributes:
        base: The run whose hyperparameter is sought; its seed is the held-out one.
        ranges: What to vary; empty: the paper's range for the method, or the stiffness of one that decides itself.
        trials: How many values to try; None: the whole grid, or 20.
        sampler: "grid" or "tpe" (Optuna's tree of Parzen estimators).
        objective: "accuracy" or "evidence", as for :func:`nclbayes.tune`.
    """

    base: RunConfig
    ranges: tuple[Range, ...] = ()
    trials: int | None = None
    sampler: str = "grid"
    objective: str = "accuracy"

    def __post_init__(self) -> None:
        ranges_of(self.ranges)
        method = find_method(self.base.method)
        usual = _STIFFNESS if self.base.prior == "scaled" else PAPER_RANGES.get(base_name(method.name), _SCALES)
        ranges = self.ranges or (usual,)
        if not self.ranges and not method.engine.has_prior and base_name(method.name) not in PAPER_RANGES:
            raise SettingError(f"{method.name} has no prior to search for: name a range, such as --range lr=0.001:0.1.")
        whole = method.whole_numbers
        object.__setattr__(self, "ranges", tuple(replace(r, whole=r.name in whole) for r in ranges))
        Plan(self.ranges, self.trials, self.sampler)

    @property
    def plan(self) -> Plan:
        """Which values it tries."""
        return Plan(self.ranges, self.trials, self.sampler)

    @property
    def count(self) -> int:
        """How many trials there will be."""
        return self.plan.count

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
        config = replace(base, prior_scale=scale, settings={**base.settings, **rest})
        config.check()
        return config
