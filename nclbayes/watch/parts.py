"""Rows of a product with a part of a weight, as rows of the whole."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch.nn.functional as F
from torch import Tensor

from nclbayes.watch.aliases import Alias, Range
from nclbayes.watch.einsum import EinsumRows
from nclbayes.watch.grouped import GroupedRows
from nclbayes.watch.rows import ProductRows


@dataclass(frozen=True)
class PartRows:
    """Rows of a product with some rows, columns or matrices of a weight.

    What the part does not have is zero: inputs that it does not read, and gradients of outputs that it does not make.

    Attributes:
        rows: Those of the part itself.
        maps: Which matrices of a stack it has; None if the weight is one matrix.
        columns: Which inputs of the map it reads.
        outputs: Which outputs of the map it makes.
    """

    rows: ProductRows | EinsumRows | GroupedRows
    maps: Range | None
    columns: Range
    outputs: Range

    @property
    def lead(self) -> tuple[int, ...]:
        """The shape of the rows' index."""
        return self.rows.lead

    @property
    def count(self) -> int:
        """The number of rows, R."""
        return self.rows.count

    @property
    def reading(self) -> tuple[object, ...]:
        """How it makes rows of an input."""
        rows = self.rows
        if isinstance(rows, ProductRows):
            how: tuple[object, ...] = rows.left, rows.stacked
        else:
            how = rows.ends if isinstance(rows, GroupedRows) else (rows.input, rows.stack, rows.index, rows.inner)
        return type(rows), how, rows.lead, self.maps, self.columns

    def inputs(self, x: Tensor) -> Iterator[Tensor]:
        """All input rows at once.

        Args:
            x: The input.

        Yields:
            [R, n]; of some maps of a stack, [maps, R, n].
        """
        for rows in self.rows.inputs(x):
            yield self._placed(rows, self.columns)

    def gradients(self, grad: Tensor) -> Tensor:
        """The gradient rows.

        Args:
            grad: The gradient of the output.

        Returns:
            [R, m]; of some maps of a stack, [maps, R, m].
        """
        return self._placed(self.rows.gradients(grad), self.outputs)

    def mask(self, mask: Tensor) -> Tensor:
        """Which rows are valid.

        Args:
            mask: Boolean, over the first dimensions of the rows' index.

        Returns:
            [R] or [maps, R].
        """
        return self.rows.mask(mask)

    def _placed(self, rows: Tensor, part: Range) -> Tensor:
        placed = rows if part.size == part.whole else F.pad(rows, (part.start, part.whole - part.stop))
        return placed.unsqueeze(0) if self.maps is not None and placed.ndim == 2 else placed


def part_rows(rows: ProductRows | EinsumRows | GroupedRows, weight: Alias, transposed: bool) -> PartRows:
    """The rows of a product with a part of a weight.

    Args:
        rows: Those of the part itself.
        weight: The part, of a weight of two or three dimensions.
        transposed: Whether the map's matrix is the transpose of the weight's (last two) dimensions.

    Returns:
        The rows of the whole.
    """
    *stack, first, last = weight.ranges
    columns, outputs = (first, last) if transposed else (last, first)
    return PartRows(rows, stack[0] if stack else None, columns, outputs)


def adds_to_outputs(rows: PartRows, bias: Alias) -> bool:
    """Whether a site, or a part of it, has one number for each output of the same part of a map.

    Args:
        rows: The rows of the part.
        bias: The site.

    Returns:
        Whether it has.
    """
    if bias.tensor.ndim > 1 or (rows.maps is not None and rows.maps.size > 1):
        return False
    return bias.ranges == ((rows.outputs,) if rows.maps is None else (rows.maps, rows.outputs))
