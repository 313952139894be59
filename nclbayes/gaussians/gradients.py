"""The gradient of a block: a matrix, or the rows whose products it is the sum of."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from nclbayes.blocks import Block, KroneckerBlock
from nclbayes.kronecker import BlockDiagonal
from nclbayes.kronecker.blockdiagonal import Matrix
from nclbayes.watch import LinearUse, ModelRun
from nclbayes.watch.rows import ProductRows


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

    def multiplied(self, like: Tensor) -> Tensor:
        """The gradient as a matrix.

        Args:
            like: A tensor of its shape, [m, n], and dtype.

        Returns:
            [m, n].
        """
        total = torch.zeros_like(like)
        for inputs, gradients, biased in self.pieces:
            total[:, : inputs.shape[-1]].addmm_(gradients.mT, inputs)
            if biased:
                total[:, -1] += gradients.sum(0)
        return total

    def between(self, left: Matrix, right: Matrix) -> Iterator[tuple[Tensor, Tensor]]:
        """Factors of ``left @ gradient @ right``, which is the sum of their products.

        Args:
            left: [m, m], symmetric.
            right: [n, n].

        Yields:
            [m, R] and [R, n].
        """
        for inputs, gradients, biased in self.pieces:
            missing = right.shape[0] - inputs.shape[-1]
            if isinstance(right, BlockDiagonal):
                rows = F.pad(inputs, (0, missing), value=float(biased)) @ right
            else:
                weight, bias = right.split((inputs.shape[-1], missing))
                rows = torch.addmm(bias, inputs, weight) if biased else inputs @ weight
            yield (gradients @ left).mT, rows


@dataclass(frozen=True)
class Preconditioned:
    """A gradient that has been preconditioned already.

    Attributes:
        value: tau P g.
    """

    value: Tensor


Gradient = Tensor | RowGradient | Preconditioned


def summed(first: Mapping[str, Gradient], second: Mapping[str, Gradient]) -> dict[str, Gradient]:
    """The sum of two gradients.

    Args:
        first: One, by block; what it does not have is zero.
        second: The other, by block.

    Returns:
        By block; rows, where both are such.
    """
    return {name: _sum(first[name], g) if name in first else g for name, g in second.items()}


def _sum(first: Gradient, second: Gradient) -> Gradient:
    assert not isinstance(first, Preconditioned)
    assert not isinstance(second, Preconditioned)
    if isinstance(first, RowGradient) and isinstance(second, RowGradient):
        return RowGradient(first.pieces + second.pieces)
    if isinstance(first, RowGradient):
        first, second = second, first
    assert isinstance(first, Tensor)
    return first + (second.multiplied(first) if isinstance(second, RowGradient) else second)


def rows_of_blocks(run: ModelRun, blocks: Iterable[Block]) -> dict[str, int]:
    """How many rows each block's gradient is a sum of, for the blocks where that is plain to see.

    Args:
        run: A watched run.
        blocks: Its blocks.

    Returns:
        By block; a convolution, a stack, or a weight that is also used transposed has no entry.
    """
    uses = uses_by_weight(run)
    found = {}
    for block in blocks:
        if isinstance(block, KroneckerBlock) and len(block.shape) == 2 and uses[block.weight]:
            if all(isinstance(u.rows, ProductRows) and u.transposed == block.transposed for u in uses[block.weight]):
                found[block.name] = sum(use.rows.count for use in uses[block.weight])
    return found


def uses_by_weight(run: ModelRun) -> defaultdict[str, list[LinearUse]]:
    """The linear maps of a run, by the site of their weight.

    Args:
        run: A watched run.

    Returns:
        Their uses, in order.
    """
    uses: defaultdict[str, list[LinearUse]] = defaultdict(list)
    for use in run.linear:
        uses[use.weight].append(use)
    return uses
