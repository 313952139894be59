"""Squared per-example gradients of a linear map, from its rows."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from nclbayes.blocks import KroneckerBlock
from nclbayes.watch import LinearUse

# Per-example gradients are formed for so many numbers at a time, to bound the memory that they take.
_NUMBERS = 1 << 24


def summed_squares(
    block: KroneckerBlock, pairs: Sequence[tuple[LinearUse, Tensor]], examples: int, first: bool = False
) -> Tensor | None:
    """The sum over examples of the squared gradient of an example's log likelihood.

    An example's gradient is the sum of g z^T over its rows. Where it has one row only, the square of that product is
    the product of squares, and no gradient is ever formed.

    Args:
        block: The map.
        pairs: Its uses, with the gradient of their outputs.
        examples: How many examples the batch has.
        first: Whether the first of several dimensions that have as many entries is the examples'.

    Returns:
        Of the block's shape, float64; None if it cannot be told which rows belong to which example.
    """
    sides = [_by_example(block, use, grad, examples, first) for use, grad in pairs]
    if len(block.shape) != 2 or any(side is None for side in sides):
        return None
    g, z = (torch.cat([side[i] for side in sides if side is not None], dim=1) for i in (0, 1))
    if g.shape[1] == 1:
        return g[:, 0].double().square().mT @ z[:, 0].double().square()
    total = torch.zeros(block.shape, dtype=torch.float64, device=g.device)
    several = max(1, _NUMBERS // block.size)
    for some_g, some_z in zip(g.split(several), z.split(several), strict=True):
        total += (some_g.mT @ some_z).double().square().sum(0)
    return total


def _by_example(
    block: KroneckerBlock, use: LinearUse, grad: Tensor, examples: int, first: bool
) -> tuple[Tensor, Tensor] | None:
    """Gradient and input rows as [examples, rows of each, m] and [examples, rows of each, n]."""
    lead = use.rows.lead
    found = lead.count(examples)
    if found == 0 or (found > 1 and not first) or len(block.shape) != 2:
        return None
    g, z = use.gradient_rows(grad), torch.cat(list(use.input_rows()), dim=-2)
    biased = use.bias is not None and use.bias == block.bias
    if use.transposed != block.transposed:
        g, z = z, g
    if block.bias is not None:
        z = F.pad(z, (0, 1), value=float(biased))
    axis = lead.index(examples)
    g, z = (rows.reshape(*lead, -1).movedim(axis, 0).reshape(examples, -1, rows.shape[-1]) for rows in (g, z))
    return g, z
