"""Sums of outer products: multiplied in the rows' own precision, added up in float64."""

from __future__ import annotations

import torch
from torch import Tensor

# Rows are gathered up to this number before they are multiplied: longer products are faster.
_ROWS = 1024
# A symmetric product is computed in square tiles of this size, on and above the diagonal only.
_TILE = 256


class GramSum:
    """A running sum of r r^T over rows r.

    Args:
        shape: [k] or [stack, k], the shape of one row (of each matrix of a stack).
        dtype: The rows' dtype.
        device: The rows' device.
    """

    def __init__(self, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> None:
        *stack, k = shape
        self._rows = torch.empty(*stack, _ROWS, k, dtype=dtype, device=device)
        self._held = 0
        self._total = torch.zeros(*stack, k, k, dtype=torch.float64, device=device)

    def add(self, rows: Tensor, tail: Tensor | float | None = None) -> None:
        """Add the outer products of rows.

        Args:
            rows: [R, k] or [stack, R, k]; one column less if there is a tail.
            tail: The last column, a number or [..., R].
        """
        start, count = 0, rows.shape[-2]
        while start < count:
            stop = min(count, start + _ROWS - self._held)
            slot = self._rows[..., self._held : self._held + stop - start, :]
            if tail is None:
                slot.copy_(rows[..., start:stop, :])
            else:
                slot[..., :-1].copy_(rows[..., start:stop, :])
                slot[..., -1] = tail[..., start:stop] if isinstance(tail, Tensor) else tail
            self._held += stop - start
            start = stop
            if self._held == _ROWS:
                self._multiply()

    def value(self) -> Tensor:
        """The sum, symmetric, [..., k, k] in float64."""
        self._multiply()
        upper = self._total.triu()
        return upper + upper.triu(1).mT

    def is_finite(self) -> bool:
        """Whether no row that has been multiplied held NaN or infinity."""
        return bool(torch.isfinite(self._total.diagonal(dim1=-2, dim2=-1)).all())

    def _multiply(self) -> None:
        rows, k = self._rows[..., : self._held, :], self._rows.shape[-1]
        for i in range(0, k, _TILE):
            left = rows[..., i : i + _TILE].mT
            for j in range(i, k, _TILE):
                self._total[..., i : i + _TILE, j : j + _TILE] += left @ rows[..., j : j + _TILE]
        self._held = 0
