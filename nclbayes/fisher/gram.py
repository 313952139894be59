"""Sums of outer products: multiplied in the rows' own precision, added up in float64."""

from __future__ import annotations

import math
from collections.abc import Mapping

import torch
from torch import Tensor

# Rows are gathered up to this number before they are multiplied: fewer, longer products are faster.
_ROWS = 1024
# A symmetric product is computed in panels of so many rows, each from the diagonal on.
_PANEL = 96
# After so many rows the sum in their own precision is moved to float64.
_CARRIED = 16_384


class GramSum:
    """A running sum of r r^T over rows r.

    Args:
        shape: [k] or [stack, k], the shape of one row (of each matrix of a stack).
        dtype: The rows' dtype.
        device: The rows' device.
    """

    def __init__(self, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> None:
        self._partial = torch.zeros(*shape, shape[-1], dtype=dtype, device=device)
        self._total = torch.zeros(*shape, shape[-1], dtype=torch.float64, device=device)
        # Products are faster on rows that start at multiples of 64 bytes: lay them out a little longer than k.
        width = -(-shape[-1] // 16) * 16
        self._rows = torch.empty(*shape[:-1], _ROWS, width, dtype=dtype, device=device)[..., : shape[-1]]
        self._held = 0
        self._summed = 0
        self._finite = True

    def add(self, rows: Tensor, weight: float = 1.0) -> None:
        """Add the outer products of rows.

        Args:
            rows: [R, k] or [stack, R, k].
            weight: What each of them counts.
        """
        for piece in rows.split(_ROWS, dim=-2):
            count = piece.shape[-2]
            if self._held + count > _ROWS:
                self._multiply()
            slot = self._rows[..., self._held : self._held + count, :]
            assert slot.shape == piece.shape
            torch.mul(piece, math.sqrt(weight), out=slot)
            self._held += count

    def scale(self, factor: float) -> None:
        """Multiply what has been summed so far.

        Args:
            factor: By what.
        """
        self._multiply()
        self._carry()
        self._total *= factor

    def value(self, factor: float = 1.0) -> Tensor:
        """The sum, symmetric, [..., k, k] in float64.

        Args:
            factor: What to multiply it with.
        """
        self._multiply()
        self._carry()
        whole = torch.empty_like(self._total)
        for i in range(0, whole.shape[-1], _PANEL):
            j = i + _PANEL
            panel = self._total[..., i:j, i:] * factor
            corner, rest = panel.tensor_split((panel.shape[-2],), dim=-1)
            whole[..., i:j, i:j] = (corner + corner.mT) / 2
            whole[..., i:j, j:] = rest
            whole[..., j:, i:j] = rest.mT
        return whole

    def tensors(self) -> dict[str, Tensor]:
        """Everything that it holds, to be restored exactly."""
        counts = torch.tensor([self._held, self._summed], device="cpu")
        return {
            "rows": self._rows[..., : self._held, :],
            "partial": self._partial,
            "total": self._total,
            "counts": counts,
        }

    def restore(self, tensors: Mapping[str, Tensor]) -> None:
        """Take up what :meth:`tensors` gave.

        Args:
            tensors: Its result.
        """
        self._held, self._summed = (int(c) for c in tensors["counts"])
        self._rows[..., : self._held, :] = tensors["rows"]
        self._partial.copy_(tensors["partial"])
        self._total.copy_(tensors["total"])

    def is_finite(self) -> bool:
        """Whether no row that has been multiplied held NaN or infinity."""
        return self._finite

    def _multiply(self) -> None:
        if self._held == 0:
            return
        rows = self._rows[..., : self._held, :]
        for i in range(0, rows.shape[-1], _PANEL):
            panel, left = self._partial[..., i : i + _PANEL, i:], rows[..., i : i + _PANEL].mT
            panel.addmm_(left, rows[..., i:]) if rows.ndim == 2 else panel.baddbmm_(left, rows[..., i:])
        self._finite = self._finite and math.isfinite(float(self._partial.diagonal(dim1=-2, dim2=-1).sum()))
        self._summed += self._held
        self._held = 0
        if self._summed >= _CARRIED:
            self._carry()

    def _carry(self) -> None:
        self._total += self._partial
        self._partial.zero_()
        self._summed = 0
