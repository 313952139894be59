"""The Fisher of one batch."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from nclbayes.fisher.accumulator import FisherAccumulator
from nclbayes.fisher.diagonal import DiagonalFisher
from nclbayes.fisher.sums import KroneckerFisher
from nclbayes.fisher.targets import FisherKind
from nclbayes.watch.run import Batch, Model


def fisher(
    model: Model,
    values: Mapping[str, Tensor],
    batch: Batch,
    *,
    size: int | None = None,
    kind: FisherKind | str = FisherKind.MODEL,
    samples: int = 1,
    temperature: float = 1.0,
    context: Mapping[str, Any] | None = None,
    generator: torch.Generator | None = None,
) -> dict[str, KroneckerFisher | DiagonalFisher]:
    """The factors of a model's Fisher at given weights, for every block.

    For more data than fit in one batch use :class:`FisherAccumulator`, which this is a short form of.

    Args:
        model: The Pyro model, called as ``model(*batch, **context)``.
        values: The weights, by site.
        batch: The model's positional arguments; the last tensor is the observed one.
        size: Scale to the Fisher of so many examples; by default of the batch.
        kind: "model" (drawn targets), "signs", "exact" or "empirical" (:class:`FisherKind`).
        samples: How many targets to draw for each example (kinds "model" and "signs").
        temperature: Divides the logits of Categorical and Bernoulli outputs.
        context: Keyword arguments of the model.
        generator: Decides all draws; by default one seeded with 0. The global random state is left as found.

    Returns:
        By block name, a :class:`KroneckerFisher` or a :class:`DiagonalFisher`.

    Example:
        >>> import pyro, torch
        >>> import pyro.distributions as dist
        >>> from nclbayes import fisher
        >>> def model(x, y):
        ...     w = pyro.sample("w", dist.Normal(torch.zeros(3), 1.0).to_event(1))
        ...     pyro.sample("y", dist.Normal(x @ w, 0.5), obs=y)
        >>> factors = fisher(model, {"w": torch.zeros(3)}, (torch.eye(3), torch.zeros(3)), kind="exact")
        >>> float((factors["w"].input * factors["w"].output)[0, 0])   # sum x x^T / 0.25
        4.0
    """
    accumulator = FisherAccumulator(
        model, values, kind=kind, samples=samples, temperature=temperature, context=context, generator=generator
    )
    accumulator.update(batch)
    return accumulator.factors(size)
