"""The gradient of a log likelihood by block, in the form that is cheaper to precondition."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import get_gradient_edge

from nclbayes.blocks import Block, KroneckerBlock
from nclbayes.engines.base import Problem
from nclbayes.engines.likelihood import LogLikelihood, log_likelihood
from nclbayes.state import KroneckerState, State
from nclbayes.watch import LinearUse, ModelRun, watch
from nclbayes.watch.rows import ProductRows

# Rows must save so many multiplications of a step to be worth the watching that finds them.
_WORTH = 2e7


@dataclass(frozen=True)
class RowGradient:
    """A gradient ``sum_r g_r z_r^T`` of a linear map, not multiplied out.

    R rows make a gradient of rank R at most. To multiply the rows by the two sides of a preconditioner takes
    R (m^2 + n^2) multiplications, to multiply the gradient itself m n (m + n).

    Attributes:
        pieces: Input rows [R, n] or, without a bias's constant 1, [R, n - 1]; gradient rows [R, m]; and whether these
            rows had the bias added.
    """

    pieces: tuple[tuple[Tensor, Tensor, bool], ...] = ()

    def __add__(self, other: RowGradient) -> RowGradient:
        return RowGradient(self.pieces + other.pieces)

    def between(self, left: Tensor, right: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
        """Factors of ``left @ gradient @ right``, which is the sum of their products.

        Args:
            left: [m, m], symmetric.
            right: [n, n].

        Yields:
            [m, R] and [R, n].
        """
        for inputs, gradients, biased in self.pieces:
            weight, bias = right.split((inputs.shape[-1], right.shape[0] - inputs.shape[-1]))
            rows = torch.addmm(bias, inputs, weight) if biased else inputs @ weight
            yield (gradients @ left).mT, rows


Gradient = Tensor | RowGradient


def rows_of_blocks(run: ModelRun, blocks: Iterable[Block]) -> dict[str, int]:
    """How many rows each block's gradient is a sum of, for the blocks where that is plain to see.

    Args:
        run: A watched run.
        blocks: Its blocks.

    Returns:
        By block; a convolution, a stack, or a weight that is also used transposed has no entry.
    """
    uses = _uses(run)
    found = {}
    for block in blocks:
        if isinstance(block, KroneckerBlock) and len(block.shape) == 2 and uses[block.weight]:
            if all(isinstance(u.rows, ProductRows) and u.transposed == block.transposed for u in uses[block.weight]):
                found[block.name] = sum(use.rows.count for use in uses[block.weight])
    return found


def rows_pay(state: State, rows: float) -> bool:
    """Whether a block's gradient is better left as its rows.

    Args:
        state: The block's Gaussian.
        rows: How many rows a batch has.

    Returns:
        Whether preconditioning them saves work worth the name.
    """
    if not isinstance(state, KroneckerState) or state.loc.ndim != 2:
        return False
    m, n = state.loc.shape
    return m * n * (m + n) - rows * (m * m + n * n) > _WORTH


def block_gradients(
    value: Tensor, run: ModelRun, states: Mapping[str, State], retain_graph: bool = False
) -> dict[str, Gradient]:
    """The gradient of a watched run's log likelihood.

    Args:
        value: The log likelihood.
        run: The run.
        states: The Gaussians of the blocks.
        retain_graph: Whether the run will be differentiated again.

    Returns:
        For each block its rows where that pays, else a matrix; no rows where it does not depend on the block.
    """
    uses = _uses(run)
    counts = rows_of_blocks(run, (state.block for state in states.values()))
    by_rows = [name for name, count in counts.items() if rows_pay(states[name], count)]
    whole = [n for n, s in states.items() if n not in by_rows and all(site in run.latents for site in s.block.sites)]
    leaves = {site: run.latents[site].value for name in whole for site in states[name].block.sites}
    edges = [use.edge for name in by_rows for use in uses[states[name].block.sites[0]]]
    edges += map(get_gradient_edge, leaves.values())
    grads = iter(torch.autograd.grad(value, edges, retain_graph=retain_graph, allow_unused=True))
    found: dict[str, Gradient] = {name: RowGradient() for name in states}
    for name in by_rows:
        block = states[name].block
        found[name] = sum((_rows(use, next(grads), block) for use in uses[block.sites[0]]), RowGradient())
    by_site = {site: _or_zero(next(grads), leaf) for site, leaf in leaves.items()}
    return found | {name: states[name].block.pack(by_site) for name in whole}


class BlockLikelihood:
    """A task's log likelihood as a function of batch and weights, its gradient by block.

    The model is watched only if some block's gradient is better left as rows.

    Args:
        problem: The task, and the Gaussians before it.
        batch_size: How many examples a batch will have.
    """

    def __init__(self, problem: Problem, batch_size: int) -> None:
        self._problem = problem
        self._plain = LogLikelihood(problem.model, problem.task.context, problem.fixed)
        states, batch = problem.states, min(batch_size, problem.task.size)
        self._watched = any(rows_pay(states[name], batch * rows) for name, rows in problem.rows.items())

    def __call__(self, batch: tuple[Any, ...], leaves: Mapping[str, Tensor]) -> tuple[float, dict[str, Gradient], int]:
        """Value and gradient on a batch.

        Args:
            batch: The batch.
            leaves: The weights by site, each a leaf that requires grad.

        Returns:
            The summed log likelihood, its gradient by block, and the number of examples.
        """
        problem = self._problem
        if not self._watched:
            fit, by_site, examples = self._plain(batch, leaves)
            return fit, {name: state.block.pack(by_site) for name, state in problem.states.items()}, examples
        run = watch(problem.model, batch, {**problem.fixed, **leaves}, problem.task.context)
        value = log_likelihood(run.observed)
        return float(value.detach()), block_gradients(value, run, problem.states), run.examples


def _uses(run: ModelRun) -> defaultdict[str, list[LinearUse]]:
    uses: defaultdict[str, list[LinearUse]] = defaultdict(list)
    for use in run.linear:
        uses[use.weight].append(use)
    return uses


def _rows(use: LinearUse, grad: Tensor | None, block: Block) -> RowGradient:
    if grad is None:
        return RowGradient()
    (inputs,) = use.input_rows()
    return RowGradient(((inputs, use.gradient_rows(grad), use.bias is not None and use.bias in block.sites),))


def _or_zero(grad: Tensor | None, leaf: Tensor) -> Tensor:
    return torch.zeros_like(leaf) if grad is None else grad
