"""Targets for the score: drawn from the model, enumerated, or as observed.

A Fisher is ``E[ (grad log p(y)) (grad log p(y))^T ]``. Each kind replaces the expectation over y by a list of targets,
each with a weight for every observed number; backpropagating ``sum weight * log p(target)`` for each of them gives
gradients whose outer products add up to the expectation (or, drawn, to an estimate of it).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from enum import Enum
from itertools import product
from typing import Any

import pyro.distributions as dist
import torch
import torch.nn.functional as F
from torch import Tensor
from torch import distributions as torch_dist

from nclbayes.errors import DataError, NCLError, NonFiniteError, SettingError
from nclbayes.fisher.draws import Place, base_of, drawn_from, signed_from
from nclbayes.watch import ModelRun, Observed


class FisherKind(str, Enum):
    """How the expectation over targets is taken.

    Attributes:
        MODEL: Targets drawn from the model: the Fisher, estimated.
        SIGNS: Targets that lie as far from their mean as the model's do, on a side that is drawn: the Fisher, estimated
            with less noise than by targets that are drawn themselves where the model is sure of them.
        EXACT: Targets enumerated, or integrated exactly for a normal: the Fisher without sampling noise.
        EMPIRICAL: The observed targets: the empirical Fisher, for comparison only.

    Example:
        >>> from nclbayes import FisherKind
        >>> [kind.value for kind in FisherKind]
        ['model', 'signs', 'exact', 'empirical']
    """

    MODEL = "model"
    SIGNS = "signs"
    EXACT = "exact"
    EMPIRICAL = "empirical"

    @property
    def is_drawn(self) -> bool:
        """Whether targets are drawn, each example's by themselves."""
        return self in (FisherKind.MODEL, FisherKind.SIGNS)


@dataclass(frozen=True)
class Target:
    """Values for observed sites, and how much each observed number counts.

    Attributes:
        values: A value for each site that is scored.
        weights: What multiplies that site's log probability, elementwise; absent: 1.
        drawn: Whether the values were drawn, so that nobody has to check that they are possible ones.
        between: The sites whose values lie between possible ones, as :func:`signed_from` makes them.
    """

    values: Mapping[str, Tensor]
    weights: Mapping[str, Tensor]
    drawn: bool = False
    between: frozenset[str] = frozenset()


class Draws:
    """Draws targets for the examples of a run.

    Args:
        observed: The observed sites of the run.
        signs: Whether to draw no more than signs, wherever :func:`signed_from` knows how.
    """

    def __init__(self, observed: Mapping[str, Observed], signs: bool = False) -> None:
        self._observed, self._signs = observed, signs

    def draw(self) -> Target:
        """A target for all sites at once; it carries no gradient."""
        values: dict[str, Tensor] = {}
        between: set[str] = set()
        with torch.no_grad():
            for name, site in self._observed.items():
                value = signed_from(site.fn, self._place(name)) if self._signs else None
                if value is not None:
                    between.add(name)
                values[name] = self._drawn(name, site.fn) if value is None else value
        return Target(values, {}, drawn=True, between=frozenset(between))

    def _place(self, name: str) -> Place | None:
        """Where a site's examples lie among others."""
        return None

    def _drawn(self, name: str, fn: Any) -> Tensor:
        """A value drawn from a site's distribution."""
        return drawn_from(fn)


def as_observed(observed: Mapping[str, Observed]) -> Target:
    """The observed values themselves.

    Args:
        observed: The observed sites of a run.

    Returns:
        The target.
    """
    return Target({name: site.value for name, site in observed.items()}, {})


def enumerate_targets(observed: Mapping[str, Observed], run: ModelRun) -> Iterator[Target]:
    """Targets whose weighted scores have exactly the second moment of the score.

    One target for each observed number of an example and each value that it can take (weighted by the root of its
    probability), or for each direction of a normal: so many backward passes.

    Args:
        observed: The observed sites of a run, tempered or not.
        run: The run.

    Yields:
        The targets.
    """
    for name, site in observed.items():
        base = base_of(site.fn)
        axis = example_axis(run, name)
        positions = [range(1) if i == axis else range(size) for i, size in enumerate(base.batch_shape)]
        for value, weight in _nodes(name, base):
            for position in product(*positions):
                index = tuple(slice(None) if i == axis else at for i, at in enumerate(position))
                chosen = torch.zeros_like(weight)
                chosen[index] = weight[index]
                yield Target({name: value}, {name: chosen})


def score(observed: Mapping[str, Observed], target: Target) -> Tensor:
    """The weighted log likelihood of a target, summed over everything.

    A user's own ``poutine.scale`` enters by its square root: an example of scale 2 counts as two examples, and its
    Fisher doubles, though its gradient's outer product would quadruple.

    Args:
        observed: The observed sites of a run.
        target: Values and weights.

    Returns:
        A scalar with the run's graph behind it.
    """
    total: Any = 0.0
    for name, value in target.values.items():
        site = observed[name]
        weight = target.weights.get(name)
        if weight is None and name not in target.between:
            log_prob, extra = _log_prob(site, value, target.drawn), 0
        else:
            base, extra = base_of(site.fn), len(site.fn.event_shape) - len(base_of(site.fn).event_shape)
            log_prob = _log_prob_between(base, value) if weight is None else weight * base.log_prob(value)
            for mask, dims in _masks(site.fn):
                log_prob = _masked(log_prob, mask, dims)
        log_prob = _masked(log_prob, site.mask, extra)
        scale = site.scale
        if isinstance(scale, Tensor):
            log_prob = log_prob * scale.sqrt().reshape(scale.shape + (1,) * extra)
        elif scale != 1.0:
            log_prob = log_prob * scale**0.5
        total = total + log_prob.sum()
    return total


def temper(observed: Mapping[str, Observed], temperature: float) -> dict[str, Observed]:
    """Observed sites with their logits divided by a temperature.

    Args:
        observed: The observed sites of a run.
        temperature: T; 1 changes nothing.

    Returns:
        The tempered sites.

    Raises:
        SettingError: If a site is neither Categorical nor Bernoulli, or the temperature too low for its logits.
    """
    if temperature == 1.0:
        return dict(observed)
    try:
        return {name: replace(site, fn=_tempered(name, site.fn, temperature)) for name, site in observed.items()}
    except ValueError as error:
        if isinstance(error, NCLError):
            raise
        raise SettingError(f"fisher_temperature {temperature:g} is too low: divided by it, logits overflow.") from error


def draw_unlikely(observed: Mapping[str, Observed]) -> Target:
    """Draw targets as the model would, but let a classifier be wrong as often as right.

    A confident classifier's own draws leave gradients that are nothing but rounding errors.

    Args:
        observed: The observed sites of a run.

    Returns:
        Values and weights of the observed sites.
    """
    flat = dict(observed)
    for name, site in observed.items():
        with suppress(SettingError):
            flat[name] = replace(site, fn=_tempered(name, site.fn, temperature=1e6))
    return Draws(flat).draw()


def example_axis(run: ModelRun, name: str) -> int:
    """Along which dimension of an observed site's batch shape the examples lie.

    Args:
        run: The run.
        name: The observed site.

    Returns:
        The dimension.

    Raises:
        DataError: If that is not clear.
    """
    axis = run.axes[name]
    if axis is None:
        shape = tuple(run.observed[name].fn.batch_shape)
        raise DataError(
            f"Cannot tell the examples of observed site '{name}' apart: which dimension of its batch shape {shape} are "
            f"the batch's {run.examples} examples? Observe the batch's last tensor as it is, or put one pyro.plate "
            "of that size around the examples."
        )
    return axis


def _log_prob(site: Observed, value: Tensor, drawn: bool) -> Tensor:
    """The log probability of a value, drawn or observed."""
    fn = site.fn
    if drawn and type(fn) is dist.Categorical:
        # Without the check that each number is one of the classes, which costs more than all the rest.
        return fn.logits.gather(-1, value.unsqueeze(-1)).squeeze(-1)
    try:
        return fn.log_prob(value)
    except ValueError as error:
        if drawn:
            raise NonFiniteError(
                f"What was drawn at site '{site.name}' is nothing that its distribution can have: the network's output "
                "is too large."
            ) from error
        raise DataError(f"The targets of site '{site.name}' are not what its distribution can have.") from error


def _log_prob_between(base: Any, value: Tensor) -> Tensor:
    """What of the log probability of a value between possible ones changes with the parameters."""
    kind = type(base)
    if kind is dist.Categorical:
        # A class that is ruled out has a logit of minus infinity, and none of the value.
        return torch.where(value == 0, 0.0, value * base.logits).sum(-1)
    if kind is dist.Bernoulli:
        return value * base.logits - F.softplus(base.logits)
    if kind is dist.Poisson:
        return torch.xlogy(value, base.rate) - base.rate
    found: Tensor = base.log_prob(value)
    return found


def _nodes(name: str, base: Any) -> Iterator[tuple[Tensor, Tensor]]:
    """Values and root weights, [batch shape of base], whose scores have the distribution's second moments."""
    if isinstance(base, torch_dist.Normal):
        # Gauss-Hermite: one node is exact for the mean's score, three for that of mean and scale together.
        nodes = [(1.0, 1.0)]
        if base.scale.requires_grad:
            nodes = [(0.0, 2 / 3), (3**0.5, 1 / 6), (-(3**0.5), 1 / 6)]
        for shift, weight in nodes:
            yield (base.loc + shift * base.scale).detach(), torch.full_like(base.loc.detach(), weight**0.5)
    elif isinstance(base, torch_dist.MultivariateNormal):
        if base._unbroadcasted_scale_tril.requires_grad:
            raise DataError(
                f"The exact Fisher of site '{name}' is known for a multivariate normal of fixed covariance only; "
                "use kind='model'."
            )
        d = base.event_shape[0]
        ones = torch.ones(base.batch_shape, dtype=base.loc.dtype, device=base.loc.device)
        for k in range(d):
            yield (base.loc + d**0.5 * base.scale_tril[..., k]).detach(), ones * d**-0.5
    elif base.has_enumerate_support:
        for value in base.enumerate_support(expand=True).unbind(0):
            yield value, base.log_prob(value).detach().div(2).exp()
    else:
        raise DataError(
            f"The exact Fisher of site '{name}' is not known for a {type(base).__name__}; use kind='model' with "
            "several samples."
        )


def _masks(fn: Any) -> Iterator[tuple[Tensor | bool, int]]:
    """The masks wrapped around the base, each with the number of the base's batch dimensions to its right."""
    base = base_of(fn)
    while fn is not base:
        if isinstance(fn, dist.MaskedDistribution):
            yield fn._mask, len(base.batch_shape) - len(fn.batch_shape)
        fn = fn.base_dist


def _masked(log_prob: Tensor, mask: Tensor | bool | None, dims: int) -> Tensor:
    if mask is None or mask is True:
        return log_prob
    if mask is False:
        return log_prob * 0.0
    return torch.where(mask.reshape(mask.shape + (1,) * dims), log_prob, torch.zeros_like(log_prob))


def _tempered(name: str, fn: Any, temperature: float) -> Any:
    if isinstance(fn, dist.MaskedDistribution):
        return dist.MaskedDistribution(_tempered(name, fn.base_dist, temperature), fn._mask)
    if isinstance(fn, torch_dist.Independent):
        return dist.Independent(_tempered(name, fn.base_dist, temperature), fn.reinterpreted_batch_ndims)
    for kind in (dist.Categorical, dist.Bernoulli, dist.OneHotCategorical):
        if isinstance(fn, kind):
            return kind(logits=fn.logits / temperature)
    raise SettingError(
        f"A Fisher temperature other than 1 needs Categorical or Bernoulli outputs; site '{name}' is a "
        f"{type(fn).__name__}."
    )
