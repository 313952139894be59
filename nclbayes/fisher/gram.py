"""Sums of outer products, fast in float32 and kept in float64."""

from __future__ import annotations

import torch
from torch import Tensor

# A symmetric product is computed in square tiles of this size, above the diagonal only.
_TILE = 256
# Float32 partial sums are moved to float64 after so many rows.
_FLUSH_ROWS = 4096


class GramSum:
    """A running sum of r r^T over rows r, and of the rows themselves.

    Products are made in the rows' dtype and added up in float64 every few thousand rows.

    Args:
        shape: [k] or [stack, k], the shape of one row (of each matrix of a stack).
        dtype: The rows' dtype.
        device: The rows' device.
    """

    def __init__(self, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> None:
        self._partial = torch.zeros(*shape, shape[-1], dtype=dtype, device=device)
        self._total = torch.zeros(*shape, shape[-1], dtype=torch.float64, device=device)
        self._pending = 0

    def add(self, rows: Tensor) -> None:
        """Add the outer products of rows.

        Args:
            rows: [R, k] or [stack, R, k].
        """
        k = rows.shape[-1]
        cuts = list(range(0, k, _TILE))
        for i in cuts:
            for j in cuts[cuts.index(i) :]:
                tile = self._partial[..., i : i + _TILE, j : j + _TILE]
                left, right = rows[..., i : i + _TILE].mT, rows[..., j : j + _TILE]
                tile.addmm_(left, right) if rows.ndim == 2 else tile.baddbmm_(left, right)
        self._pending += rows.shape[-2]
        if self._pending >= _FLUSH_ROWS:
            self._flush()

    def value(self) -> Tensor:
        """The sum, symmetric, [..., k, k] in float64."""
        self._flush()
        upper = self._total.triu()
        return upper + upper.mT - torch.diag_embed(upper.diagonal(dim1=-2, dim2=-1))

    def trace(self) -> Tensor:
        """The trace of what has been added, [...]; NaN or infinite if a row was."""
        partial, total = (m.diagonal(dim1=-2, dim2=-1).sum(-1) for m in (self._partial, self._total))
        return partial + total

    def _flush(self) -> None:
        self._total += self._partial
        self._partial.zero_()
        self._pending = 0
