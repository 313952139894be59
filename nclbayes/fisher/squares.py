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


def example_axes(pairs: Sequence[tuple[LinearUse, Tensor]], examples: int) -> tuple[int, ...] | None:
    """Which dimensions of a map's rows may be the examples', judged by their length.

    Args:
        pairs: Its uses, with the gradient of their outputs.
        examples: How many examples the batch has.

    Returns:
        Their numbers, the same for all uses; None if the uses differ.
    """
    found = {tuple(i for i, size in enumerate(use.rows.lead) if size == examples) for use, _ in pairs}
    return found.pop() if len(found) == 1 else None


def summed_squares(
    block: KroneckerBlock, pairs: Sequence[tuple[LinearUse, Tensor]], examples: int, axis: int
) -> Tensor | None:
    """The sum over examples of the squared gradient of an example's log likelihood.

    An example's gradient is the sum of g z^T over its rows. Where it has one row only, the square of that product is
    the product of squares, and no gradient is ever formed.

    Args:
        block: The map.
        pairs: Its uses, with the gradient of their outputs.
        examples: How many examples the batch has.
        axis: Which dimension of the rows is the examples'.

    Returns:
        Of the block's shape, float64; None for a stack of maps.
    """
    if len(block.shape) != 2:
        return None
    sides = [_by_example(block, use, grad, examples, axis) for use, grad in pairs]
    g, z = (torch.cat([side[i] for side in sides], dim=1) for i in (0, 1))
    if g.shape[1] == 1:
        return g[:, 0].double().square().mT @ z[:, 0].double().square()
    total = torch.zeros(block.shape, dtype=torch.float64, device=g.device)
    several = max(1, _NUMBERS // block.size)
    for some_g, some_z in zip(g.split(several), z.split(several), strict=True):
        total += (some_g.mT @ some_z).double().square().sum(0)
    return total


def _by_example(block: KroneckerBlock, use: LinearUse, grad: Tensor, examples: int, axis: int) -> tuple[Tensor, Tensor]:
    """Gradient and input rows as [examples, rows of each, m] and [examples, rows of each, n]."""
    lead = use.rows.lead
    g, z = use.gradient_rows(grad), torch.cat(list(use.input_rows()), dim=-2)
    biased = use.bias is not None and use.bias == block.bias
    if use.transposed != block.transposed:
        g, z = z, g
    if block.bias is not None:
        z = F.pad(z, (0, 1), value=float(biased))
    g, z = (rows.reshape(*lead, -1).movedim(axis, 0).reshape(examples, -1, rows.shape[-1]) for rows in (g, z))
    return g, z
