"""Sums of outer products: multiplied in the rows' own precision, added up in float64."""

from __future__ import annotations

import torch
from torch import Tensor

# Rows are gathered up to this number before they are multiplied: longer products are faster.
_ROWS = 512
# A symmetric product is computed in panels of so many rows, each from the diagonal on.
_PANEL = 96
# After so many products the sum in the rows' own precision is moved to float64.
_PRODUCTS = 8


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
        self._partial = torch.zeros(*stack, k, k, dtype=dtype, device=device)
        self._products = 0
        self._checked = True
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

    def value(self, factor: float = 1.0) -> Tensor:
        """The sum, symmetric, [..., k, k] in float64.

        Args:
            factor: What to multiply it with.
        """
        self._multiply()
        self._carry()
        whole = self._total * factor
        for i in range(0, whole.shape[-1], _PANEL):
            j = i + _PANEL
            whole[..., i:j, i:j] = (whole[..., i:j, i:j] + whole[..., i:j, i:j].mT) / 2
            whole[..., j:, i:j] = whole[..., i:j, j:].mT
        return whole

    def is_finite(self) -> bool:
        """Whether no row that has been multiplied since the last call held NaN or infinity."""
        if self._checked:
            return True
        self._checked = True
        diagonal = self._partial.diagonal(dim1=-2, dim2=-1) + self._total.diagonal(dim1=-2, dim2=-1)
        return bool(torch.isfinite(diagonal).all())

    def _multiply(self) -> None:
        """Add the gathered rows' outer products, on and above the diagonal (of panels)."""
        rows = self._rows[..., : self._held, :]
        for i in range(0, rows.shape[-1], _PANEL):
            panel, left = self._partial[..., i : i + _PANEL, i:], rows[..., i : i + _PANEL].mT
            panel.addmm_(left, rows[..., i:]) if rows.ndim == 2 else panel.baddbmm_(left, rows[..., i:])
        self._held = 0
        self._checked = False
        self._products += 1
        if self._products == _PRODUCTS:
            self._carry()

    def _carry(self) -> None:
        self._total += self._partial
        self._partial.zero_()
        self._products = 0
