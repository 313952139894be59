"""Gradients of examples from the uses of a weight that is no linear map, without running any example again."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from nclbayes.blocks import DiagonalBlock
from nclbayes.fisher.per_example import NUMBERS, Moments
from nclbayes.watch import LinearUse, ModelRun, Separable
from nclbayes.watch.rows import single
from nclbayes.watch.separable import Parts, keyed


def pieces_of(block: DiagonalBlock, run: ModelRun) -> list[Separable] | None:
    """The uses of a weight, if all of them tell examples apart; but for idle ones, which may be none.

    Args:
        block: The weight.
        run: A watched run.

    Returns:
        None if one does not.
    """
    found = []
    for other in (use for use in run.others if use.site == block.name and not use.idle):
        if other.separable is None or other.separable.shape[0] != run.examples:
            return None
        found.append(other.separable)
    for use in run.linear:
        if block.name in (use.weight, use.bias):
            parts = _of_rows(block, use, run.examples)
            if parts is None:
                return None
            found.append(Separable(use.edge, use.shape, parts))
    return found or None


def _of_rows(block: DiagonalBlock, use: LinearUse, examples: int) -> Parts | None:
    """A linear map whose weight has another use besides, or a bias that several maps share."""
    lead, is_weight = use.rows.lead, use.weight == block.name
    if use.maps is not None:
        return None
    if lead[0] != examples or use.mask is not None or (is_weight and (len(block.shape) != 2 or use.bias == block.name)):
        return None

    def parts(g: Tensor, which: slice) -> Tensor:
        whole = torch.zeros(use.shape, dtype=g.dtype, device=g.device)
        whole[which] = g
        rows = use.gradient_rows(whole).reshape(*lead, -1)[which].flatten(1, -2) if len(lead) > 1 else None
        rows = use.gradient_rows(whole)[which].unsqueeze(1) if rows is None else rows
        if not is_weight:
            return rows.sum(1).reshape(len(g), *block.shape)
        inputs = torch.cat(list(use.input_rows()), dim=-2).reshape(examples, -1, block.shape[int(not use.transposed)])
        found = rows.mT @ inputs[which]
        return found.mT if use.transposed else found

    return parts


Told = Sequence[tuple[Separable, Tensor]]
"""The uses of a weight that the likelihood depends on, each with the gradient of its call's output."""


def summed(block: DiagonalBlock, told: Told, examples: int, device: torch.device) -> Moments:
    """What the gradients of examples add up to.

    Args:
        block: The weight.
        told: Its uses.
        examples: How many examples there are.
        device: Where to sum.

    Returns:
        The sum, and that of squares; of a table, the rows that were looked up.
    """
    if told and all(piece.index is not None for piece, _ in told):
        return _of_tables(block, told)
    squares = torch.zeros(block.shape, dtype=torch.float64, device=device)
    total = squares.clone()
    several = max(1, NUMBERS // block.size)
    for start in range(0, examples if told else 0, several):
        gradients = gradients_of(told, slice(start, min(start + several, examples)))
        total += gradients.sum(0)
        squares += gradients.double().square().sum(0)
    return Moments(total, squares)


def gradients_of(told: Told, which: slice) -> Tensor:
    """The gradients of some examples.

    Args:
        told: The uses of a weight, at least one.
        which: The examples.

    Returns:
        [examples, *weight].
    """
    found = [piece.parts(single(grad.reshape(piece.shape)[which]), which) for piece, grad in told]
    return torch.stack(found).sum(0) if len(found) > 1 else found[0]


def _of_tables(block: DiagonalBlock, told: Told) -> Moments:
    """A table alone: most rows of an example's gradient are zero, and those that no example has are left out."""
    size = block.shape[0]
    found = []
    for piece, grad in told:
        assert piece.index is not None
        found.append(keyed(piece.index, grad.reshape(piece.shape), size))
    keys, rows = (torch.cat([pair[i] for pair in found]) for i in (0, 1))
    met, place = keys.unique(return_inverse=True)
    sums = torch.zeros(len(met), rows.shape[-1], dtype=torch.float64, device=rows.device)
    sums.index_add_(0, place, rows.double())
    read, place = (met % size).unique(return_inverse=True)
    table = torch.zeros(2, len(read), rows.shape[-1], dtype=torch.float64, device=rows.device)
    for into, values in zip(table, (sums, sums.square()), strict=True):
        into.index_add_(0, place, values)
    total, squares = table.reshape(2, len(read), *block.shape[1:])
    return Moments(total, squares, read)
