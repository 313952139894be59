"""From a map's input and its output's gradient to rows.

A row is one application of the map: input z (n numbers) and gradient g (m numbers), such that the sum of g z^T over
all rows is the gradient of the weight. A stack of k maps (a batched product, a grouped convolution) has k at a time.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

# Patches of a convolution are cut for so many numbers at a time, to bound the memory that they take.
_PATCH_NUMBERS = 1 << 23


@dataclass(frozen=True)
class ProductRows:
    """Rows of ``x @ W^T`` (a linear layer, or a product with the weight on the right) or of ``W @ x``.

    Attributes:
        shape: The shape of the product.
        left: Whether the weight stands on the left: a row is then a column of x.
        stacked: Whether the weight is a stack of matrices, along the third dimension from the right.
        vector: Whether the weight is a vector: a map to one output.
    """

    shape: tuple[int, ...]
    left: bool
    stacked: bool
    vector: bool

    @property
    def lead(self) -> tuple[int, ...]:
        """The shape of the rows' index."""
        if self.vector:
            return self.shape or (1,)
        if len(self.shape) == 1:
            return (1,)
        return (*self.shape[:-2], self.shape[-1]) if self.left else self.shape[:-1]

    @property
    def count(self) -> int:
        """The number of rows, R."""
        total = math.prod(self.lead)
        return total // self.lead[-2] if self.stacked else total

    def inputs(self, x: Tensor) -> Iterator[Tensor]:
        """All input rows at once.

        Args:
            x: The map's input.

        Yields:
            [R, n], or [k, R, n] for a stack.
        """
        rows = x.unsqueeze(0) if x.ndim == 1 else x.mT if self.left else x
        lead = self.lead
        yield self._flat(rows if rows.shape[:-1] == lead else rows.expand(*lead, rows.shape[-1]))

    def gradients(self, grad: Tensor) -> Tensor:
        """The gradient rows.

        Args:
            grad: The gradient of the map's output.

        Returns:
            [R, m], or [k, R, m] for a stack.
        """
        if self.vector:
            return grad.reshape(-1, 1)
        return self._flat(grad.unsqueeze(0) if grad.ndim == 1 else grad.mT if self.left else grad)

    def mask(self, mask: Tensor) -> Tensor:
        """Which rows are valid.

        Args:
            mask: Boolean, over the first dimensions of the rows' index.

        Returns:
            [R], or [k, R] for a stack.
        """
        spread = _spread(mask, self.lead)
        return spread.movedim(-2, 0).flatten(1) if self.stacked else spread.flatten()

    def _flat(self, rows: Tensor) -> Tensor:
        if self.stacked:
            return rows.movedim(-3, 0).flatten(1, -2)
        return rows if rows.ndim == 2 else rows.reshape(-1, rows.shape[-1])


@dataclass(frozen=True)
class ConvolutionRows:
    """Rows of a convolution: one for each example and output position, its input a patch.

    Attributes:
        shape: The shape of the output, [batch, channels, *positions] or without batch.
        kernel: The kernel's spatial shape.
        stride: Steps between patches, one a spatial dimension.
        padding: Zeros (before, after) each spatial dimension.
        dilation: Steps inside a patch.
        groups: Into how many independent convolutions the channels are split.
    """

    shape: tuple[int, ...]
    kernel: tuple[int, ...]
    stride: tuple[int, ...]
    padding: tuple[tuple[int, int], ...]
    dilation: tuple[int, ...]
    groups: int

    @property
    def lead(self) -> tuple[int, ...]:
        """The shape of the rows' index, (batch, *positions)."""
        spatial = len(self.kernel)
        return (*(self.shape[: -1 - spatial] or (1,)), *self.shape[-spatial:])

    @property
    def count(self) -> int:
        """The number of rows, R."""
        return math.prod(self.lead)

    def inputs(self, x: Tensor) -> Iterator[Tensor]:
        """Patches, a bounded number of examples at a time.

        Args:
            x: The map's input, [batch, channels, *space] or without batch.

        Yields:
            [R', n], or [groups, R', n], with R' rows in the order of :meth:`gradients`.
        """
        if x.ndim == len(self.kernel) + 1:
            x = x.unsqueeze(0)
        numbers = x.shape[1] * math.prod(self.kernel) * math.prod(self.lead[1:])
        for part in x.split(max(1, _PATCH_NUMBERS // max(1, numbers))):
            yield self._patches(part)

    def gradients(self, grad: Tensor) -> Tensor:
        """The gradient rows.

        Args:
            grad: The gradient of the map's output.

        Returns:
            [R, m], or [groups, R, m / groups].
        """
        if grad.ndim == len(self.kernel) + 1:
            grad = grad.unsqueeze(0)
        rows = grad.movedim(1, -1)
        return self._grouped(rows.reshape(-1, rows.shape[-1]))

    def mask(self, mask: Tensor) -> Tensor:
        """Which rows are valid.

        Args:
            mask: Boolean, over the first dimensions of (batch, *positions).

        Returns:
            [R].
        """
        return _spread(mask, self.lead).flatten()

    def _patches(self, x: Tensor) -> Tensor:
        x = F.pad(x, [pad for pair in reversed(self.padding) for pad in pair])
        for axis, (size, stride, dilation) in enumerate(zip(self.kernel, self.stride, self.dilation, strict=True)):
            x = x.unfold(axis + 2, dilation * (size - 1) + 1, stride)[..., ::dilation]
        # [batch, channels, *positions, *kernel] -> [batch, *positions, channels, *kernel]
        rows = x.movedim(1, 1 + len(self.kernel)).flatten(-1 - len(self.kernel))
        return self._grouped(rows.reshape(-1, rows.shape[-1]))

    def _grouped(self, rows: Tensor) -> Tensor:
        if self.groups == 1:
            return rows
        return rows.unflatten(-1, (self.groups, -1)).movedim(-2, 0)


@dataclass(frozen=True)
class TransposedConvolutionRows:
    """Rows of a transposed convolution: one for each example and input position, its gradient a patch of the output's.

    Attributes:
        shape: The shape of the input, [batch, channels, *positions] or without batch.
        patches: The convolution that this is the transpose of, from its output to its input.
    """

    shape: tuple[int, ...]
    patches: ConvolutionRows

    @property
    def groups(self) -> int:
        """Into how many independent convolutions the channels are split."""
        return self.patches.groups

    @property
    def lead(self) -> tuple[int, ...]:
        """The shape of the rows' index, (batch, *positions)."""
        return self.patches.lead

    @property
    def count(self) -> int:
        """The number of rows, R."""
        return self.patches.count

    def inputs(self, x: Tensor) -> Iterator[Tensor]:
        """All input rows at once.

        Args:
            x: The map's input.

        Yields:
            [R, n], or [groups, R, n / groups].
        """
        yield self.patches.gradients(x)

    def gradients(self, grad: Tensor) -> Tensor:
        """The gradient rows.

        Args:
            grad: The gradient of the map's output.

        Returns:
            [R, m], or [groups, R, m / groups].
        """
        return torch.cat(list(self.patches.inputs(grad)), dim=-2)

    def mask(self, mask: Tensor) -> Tensor:
        """Which rows are valid.

        Args:
            mask: Boolean, over the first dimensions of (batch, *positions).

        Returns:
            [R].
        """
        return self.patches.mask(mask)


def _spread(mask: Tensor, lead: tuple[int, ...]) -> Tensor:
    """Repeat a mask over the first dimensions of an index along the others."""
    return mask.reshape(mask.shape + (1,) * (len(lead) - mask.ndim)).expand(lead)


def single(tensor: Tensor) -> Tensor:
    """A tensor in single precision, if it is of half: sums are not formed in that.

    Args:
        tensor: The tensor.

    Returns:
        The same numbers, in float32 at least.
    """
    return tensor.to(torch.promote_types(tensor.dtype, torch.float32))


def only_valid(rows: Tensor, mask: Tensor | None) -> Tensor:
    """Rows with zeros in place of the invalid ones, whatever those hold.

    Args:
        rows: [..., R, k].
        mask: [..., R] or None.

    Returns:
        [..., R, k].
    """
    return rows if mask is None else torch.where(mask.unsqueeze(-1), rows, torch.zeros_like(rows))
