"""The log likelihood of a batch and its gradient, at the cost of little more than the network's own."""

from __future__ import annotations

import math
from collections.abc import Mapping, Set
from typing import Any

import torch
from pyro.distributions.util import scale_and_mask
from torch import Tensor
from torch.autograd.graph import GradientEdge, get_gradient_edge

from nclbayes.blocks import Block
from nclbayes.engines.base import Problem
from nclbayes.engines.steps import BlockSteps
from nclbayes.errors import DataError, ModelError, NonFiniteError
from nclbayes.fisher.verify import unseen_use
from nclbayes.gaussians.gradients import (
    Gradient,
    Preconditioned,
    RowGradient,
    rows_of_blocks,
    summed,
    uses_by_weight,
)
from nclbayes.isolation.autocasting import as_called
from nclbayes.isolation.failures import first_line, is_plain, running
from nclbayes.ranks import Ranks
from nclbayes.watch import LinearUse, ModelRun, Observed, SiteRecorder, watch
from nclbayes.watch.rows import single
from nclbayes.watch.run import batch_size


def log_likelihood(observed: Mapping[str, Observed]) -> Tensor:
    """The log probability of what was observed, summed.

    Args:
        observed: The observed sites of a run.

    Returns:
        A scalar.

    Raises:
        DataError: If what was observed is not what the site's distribution can have.
    """
    total: Any = 0.0
    for site in observed.values():
        try:
            total = total + single(scale_and_mask(site.fn.log_prob(site.value), site.scale, site.mask)).sum()
        except Exception as error:
            if not is_plain(error):
                raise
            raise DataError(
                f"The targets of site '{site.name}' are not what its distribution can have: {first_line(error)}."
            ) from error
    return total


def least_loss(observed: Mapping[str, Observed]) -> float:
    """What a loss is measured from: the negative log probability of targets that are just as was predicted.

    Args:
        observed: The observed sites of a run.

    Returns:
        Their sum, for a distribution over discrete values 0, since these may be certain; NaN where a distribution
        cannot tell.
    """
    total = 0.0
    for site in observed.values():
        try:
            if not site.fn.support.is_discrete:
                best = site.fn.log_prob(site.fn.mean)
                total -= float(scale_and_mask(best, site.scale, site.mask).detach().sum())
        except (NotImplementedError, AttributeError, ValueError):
            return math.nan
    return total


def can_be_certain(observed: Mapping[str, Observed]) -> bool:
    """Whether targets can be predicted with certainty: one of finitely many values, as classes are.

    Args:
        observed: The observed sites of a run.

    Returns:
        Whether that holds for all of them.
    """
    return all(getattr(_base(site), "has_enumerate_support", False) for site in observed.values())


def guess_loss(observed: Mapping[str, Observed]) -> float:
    """What a guess loses: the negative log probability of targets if every value that they may have is as likely.

    Args:
        observed: The observed sites of a run.

    Returns:
        Their sum; 0 where targets cannot be certain, or their values cannot be counted.
    """
    if not can_be_certain(observed):
        return 0.0
    total = 0.0
    for site in observed.values():
        base, whole = _base(site), site.fn
        try:
            values = base.enumerate_support(expand=False)
        except NotImplementedError:
            return 0.0
        # A class that is masked has the probability 0.
        possible = (base.log_prob(values).exp() > 0).sum(0).clamp(min=1)
        elements = whole.event_shape.numel() // base.event_shape.numel()
        lost = (elements * possible.double().log().mean()).expand(whole.batch_shape)
        total += float(scale_and_mask(lost, site.scale, site.mask).sum())
    return total


def _base(site: Observed) -> Any:
    """A site's distribution without what expands, masks or groups it."""
    distribution: Any = site.fn
    while hasattr(distribution, "base_dist"):
        distribution = distribution.base_dist
    return distribution


def objective(observed: Mapping[str, Observed]) -> Tensor:
    """The log probability of what was observed, to be differentiated.

    Args:
        observed: The observed sites of a run.

    Returns:
        A scalar with the run's graph behind it.

    Raises:
        ModelError: If it depends on no weight, or nothing was observed.
    """
    if not observed:
        raise ModelError("The model observed nothing: the targets of a batch did not reach an observed site.")
    value = log_likelihood(observed)
    if not value.requires_grad:
        raise ModelError(
            "The likelihood depends on none of the model's weights: they are not used, or are detached from the output."
        )
    return value


class LogLikelihood:
    """A task's log likelihood as a function of batch and weights; only observed sites are scored.

    Args:
        problem: The task.
    """

    def __init__(self, problem: Problem) -> None:
        self._problem = problem
        # Whoever has a gradient there has come late.
        self._fixed = {site: value.detach().requires_grad_() for site, value in problem.fixed.items()}

    def __call__(self, batch: tuple[Any, ...], leaves: Mapping[str, Tensor]) -> tuple[float, dict[str, Tensor], int]:
        """Value and gradient on a batch.

        Args:
            batch: The batch.
            leaves: The weights by site, each a leaf that requires grad.

        Returns:
            The summed log likelihood, its gradient by site (zero where it does not depend on a site), and the number of
            examples.
        """
        first, *others = self._problem.parts(batch)
        fit, gradient = self._of_part(first.batch, leaves)
        for part in others:
            value, further = self._of_part(part.batch, leaves)
            fit += value
            gradient = {site: g + further[site] for site, g in gradient.items()}
        ranks = self._problem.ranks
        if ranks.are_many:
            if first.weight != 1:
                gradient = {site: first.weight * g for site, g in gradient.items()}
            own = checked_fit(ranks, first.weight * fit)
            totals, fit = ranks.sum("a gradient", list(gradient.values()), own)
            gradient = dict(zip(gradient, totals, strict=True))
        return fit, gradient, batch_size(batch)

    def _of_part(self, batch: tuple[Any, ...], leaves: Mapping[str, Tensor]) -> tuple[float, dict[str, Tensor]]:
        problem, values = self._problem, {**self._fixed, **leaves}
        recorder = SiteRecorder(values)
        with running(batch), torch.enable_grad(), as_called(), recorder:
            problem.model(*batch, **problem.task.context)
        with torch.enable_grad():
            value = objective(recorder.observed)
        found = torch.autograd.grad(value, list(values.values()), allow_unused=True)
        grads = dict(zip(values, found, strict=True))
        late = [site for site in self._fixed if grads[site] is not None]
        if late or recorder.latents.keys() - values.keys():
            problem.meet(watch(problem.model, batch, values, problem.task.context))
            raise unseen_use(late[0])
        return float(value.detach()), {s: _or_zero(grads[s], leaf) for s, leaf in leaves.items()}


class BlockLikelihood:
    """A task's log likelihood as a function of batch and weights, its gradient by block.

    The model is watched only if some block's gradient is better left as rows.

    Args:
        problem: The task.
        blocks: Whose steps the gradient is for.
        batch_size: How many examples a batch will have.
    """

    def __init__(self, problem: Problem, blocks: list[BlockSteps], batch_size: int) -> None:
        self._problem = problem
        self._blocks = blocks
        self._plain = LogLikelihood(problem)
        self._by_rows = blocks_by_rows(problem, blocks, batch_size)

    def __call__(self, batch: tuple[Any, ...], leaves: Mapping[str, Tensor]) -> tuple[float, dict[str, Gradient], int]:
        """Value and gradient on a batch.

        Args:
            batch: The batch.
            leaves: The weights by site, each a leaf that requires grad.

        Returns:
            The summed log likelihood, its gradient by block, and the number of examples.
        """
        if not self._by_rows:
            fit, by_site, examples = self._plain(batch, leaves)
            return fit, {steps.name: steps.state.block.pack(by_site) for steps in self._blocks}, examples
        problem = self._problem
        fit, gradient = 0.0, dict[str, Gradient]()
        for part in problem.parts(batch):
            run = watch(problem.model, part.batch, {**problem.fixed, **leaves}, problem.task.context)
            problem.meet(run)
            value = part.weight * objective(run.observed)
            fit += float(value.detach())
            planned = self._by_rows if problem.ranks.are_many else None
            own = block_gradients(value, run, self._blocks, parts=problem.accumulate, planned=planned)
            gradient = summed(gradient, own)
        fit, gradient = gradient_of_all(problem, self._blocks, fit, gradient, self._by_rows)
        return fit, gradient, batch_size(batch)


def checked_fit(ranks: Ranks, fit: float) -> float:
    """The log likelihood of a rank's share of a batch, before the others hear of it.

    Args:
        ranks: The ranks.
        fit: This rank's.

    Returns:
        The same.

    Raises:
        NonFiniteError: If it is not finite: then the others hear which rank it was.
    """
    if ranks.are_many and not math.isfinite(fit):
        raise NonFiniteError(f"The log likelihood of rank {ranks.rank}'s share of a batch became {fit}.")
    return fit


def blocks_by_rows(problem: Problem, blocks: list[BlockSteps], batch_size: int) -> frozenset[str]:
    """The blocks whose gradient each rank leaves as rows: those that it prefers for its share of a batch.

    Args:
        problem: The task.
        blocks: The steps of its blocks.
        batch_size: How many examples a batch will have.

    Returns:
        Their names, the same on every rank.
    """
    share = math.ceil(problem.task.batch_size(batch_size) / problem.ranks.count)
    return frozenset(s.name for s in blocks if s.name in problem.rows and s.prefers_rows(share * problem.rows[s.name]))


def gradient_of_all(
    problem: Problem, blocks: list[BlockSteps], fit: float, gradient: Mapping[str, Gradient], by_rows: Set[str]
) -> tuple[float, dict[str, Gradient]]:
    """The log likelihood of a batch, and its gradient, of which each rank has its share.

    Rows are preconditioned by the rank that has them, and only what they add up to is exchanged.

    Args:
        problem: The task.
        blocks: The steps of its blocks.
        fit: This rank's share of the log likelihood.
        gradient: Its share of the gradient, by block.
        by_rows: The blocks whose gradient is left as rows.

    Returns:
        Their sums over ranks.
    """
    if not problem.ranks.are_many:
        return fit, dict(gradient)
    fit, own = checked_fit(problem.ranks, fit), dict[str, Tensor]()
    for steps in blocks:
        share = gradient[steps.name]
        if steps.name in by_rows:
            share = steps.preconditioned(share).value
        assert isinstance(share, Tensor)
        own[steps.name] = share
    totals, fit = problem.ranks.sum("a gradient", list(own.values()), fit)
    found = zip(own, totals, strict=True)
    return fit, {name: Preconditioned(total) if name in by_rows else total for name, total in found}


def block_gradients(
    value: Tensor,
    run: ModelRun,
    blocks: list[BlockSteps],
    retain_graph: bool = False,
    parts: int = 1,
    planned: Set[str] | None = None,
) -> dict[str, Gradient]:
    """The gradient of a watched run's log likelihood, in the form that is cheaper to precondition.

    Args:
        value: The log likelihood.
        run: The run.
        blocks: Whose steps the gradient is for.
        retain_graph: Whether the run will be differentiated again.
        parts: How many such runs will be added up.
        planned: The blocks that prefer rows, where that is decided; None: it is, by how many rows there are.

    Returns:
        For each block its rows where it prefers them, else a matrix.
    """
    uses, counts = uses_by_weight(run), rows_of_blocks(run, (steps.state.block for steps in blocks))
    if planned is None:
        preferring = [s for s in blocks if s.prefers_rows(parts * counts.get(s.name, math.inf))]
    else:
        preferring = [s for s in blocks if s.name in planned and s.name in counts]
    by_rows = {steps.name: uses[steps.state.block.sites[0]] for steps in preferring}
    edges: dict[str | tuple[str, int], GradientEdge] = {}
    for steps in blocks:
        if steps.name in by_rows:
            edges |= {(steps.name, i): use.edge for i, use in enumerate(by_rows[steps.name])}
        else:
            met = (site for site in steps.state.block.sites if site in run.latents)
            edges |= {site: get_gradient_edge(run.latents[site].value) for site in met}
    values = torch.autograd.grad(value, list(edges.values()), retain_graph=retain_graph, allow_unused=True)
    grads = dict(zip(edges, values, strict=True))
    found: dict[str, Gradient] = {}
    for steps in blocks:
        block = steps.state.block
        if steps.name in by_rows:
            pieces = ((use, grads[steps.name, i]) for i, use in enumerate(by_rows[steps.name]))
            found[steps.name] = RowGradient(tuple(_piece(use, g, block) for use, g in pieces if g is not None))
        else:
            weights = block.unpack(steps.theta)
            found[steps.name] = block.pack({site: _or_zero(grads.get(site), w) for site, w in weights.items()})
    return found


def _piece(use: LinearUse, grad: Tensor, block: Block) -> tuple[Tensor, Tensor, bool]:
    (inputs,) = use.input_rows()
    return inputs, use.gradient_rows(grad), use.bias is not None and use.bias in block.sites


def _or_zero(grad: Tensor | None, leaf: Tensor) -> Tensor:
    return torch.zeros_like(leaf) if grad is None else grad
