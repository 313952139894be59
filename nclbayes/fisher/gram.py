"""Sums of outer products: multiplied in the rows' own precision, added up in float64."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from nclbayes.fisher.panels import columns_at, diagonal, mirrored, numbers, packed, panels
from nclbayes.kronecker import BlockDiagonal
from nclbayes.storage import under

# Rows are gathered up to this number before they are multiplied: fewer, longer products are faster.
_ROWS = 2048
# After so many rows the sum in their own precision is moved to float64.
_CARRIED = 16_384
# Rows this narrow are multiplied in float64 from the start: it costs nothing, and libraries that multiply wide rows in
# short runs add up narrow ones one by one, with an error that grows with their number.
_NARROW = 16


class GramSum:
    """A running sum of r r^T over rows r.

    Args:
        shape: [k] or [stack, k], the shape of one row (of each matrix of a stack).
        dtype: The rows' dtype.
        device: The rows' device.
    """

    def __init__(self, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> None:
        *stack, k = shape
        self._width = k
        dtype = torch.float64 if k <= _NARROW else dtype
        # Products are faster on rows that start at multiples of 64 bytes: lay them out a little longer than k.
        length = -(-k // 16) * 16
        self._rows = torch.empty(*stack, _ROWS, length, dtype=dtype, device=device)[..., :k]
        # What each row counts in the plain sum of rows; None while none has been added to it.
        self._parts: Tensor | None = None
        # The sum in the rows' own precision, as the panels of its lower triangle, and the one in float64.
        self._partial = torch.zeros(*stack, numbers(k), dtype=dtype, device=device)
        self._total: Tensor | None = None
        self._row_sum = torch.zeros(shape, dtype=torch.float64, device=device)
        self._held = 0
        self._summed = 0
        self._finite = True

    def add(self, rows: Tensor, weight: float = 1.0, in_row_sum: bool = False) -> None:
        """Add the outer products of rows.

        Args:
            rows: [R, k] or [stack, R, k].
            weight: What each of them counts.
            in_row_sum: Whether they also enter the plain sum of rows.
        """
        pieces = rows.split(_ROWS, dim=-2) if rows.shape[-2] > _ROWS else (rows,)
        root = math.sqrt(weight)
        for piece in pieces:
            count = piece.shape[-2]
            if self._held + count > _ROWS:
                self.multiply()
            slot = self._rows.narrow(-2, self._held, count)
            assert slot.shape == piece.shape
            slot.copy_(piece) if root == 1.0 else torch.mul(piece, root, out=slot)
            if in_row_sum:
                self._weights_of_rows().narrow(0, self._held, count).fill_(root)
            self._held += count

    def scale(self, factor: float) -> None:
        """Multiply what has been summed so far.

        Args:
            factor: By what.
        """
        self.multiply()
        self._carry().mul_(factor)
        self._row_sum *= factor

    def value(self, factor: float = 1.0) -> Tensor:
        """The sum, symmetric and positive semi-definite up to rounding, [..., k, k] in float64.

        Args:
            factor: What to multiply it with.
        """
        self.multiply()
        lower = self._partial if self._total is None else self._carry()
        whole = mirrored(lower, self._width, factor)
        # Squares so small that they, or products with them, may have underflowed: gone, with their row and column.
        limits = torch.finfo(self._partial.dtype)
        kept = diagonal(lower, self._width) >= limits.tiny / limits.eps
        if not bool(kept.all()):
            whole *= kept.unsqueeze(-1) & kept.unsqueeze(-2)
        return whole

    def row_sum(self) -> Tensor:
        """The sum of those rows that were added to it, [..., k] in float64."""
        self.multiply()
        return self._row_sum

    def tensors(self) -> dict[str, Tensor]:
        """Everything that it holds, to be restored exactly."""
        counts = torch.tensor([self._held, self._summed], device="cpu")
        found = {
            "rows": self._rows[..., : self._held, :],
            "partial": self._partial,
            "row_sum": self._row_sum,
            "counts": counts,
        }
        if self._parts is not None:
            found["parts"] = self._parts[: self._held]
        return found if self._total is None else found | {"total": self._total}

    def restore(self, tensors: Mapping[str, Tensor]) -> None:
        """Take up what :meth:`tensors` gave.

        Args:
            tensors: Its result.
        """
        self._held, self._summed = (int(c) for c in tensors["counts"])
        self._rows[..., : self._held, :] = tensors["rows"]
        self._partial.copy_(self._panels_of(tensors["partial"]))
        self._row_sum.copy_(tensors["row_sum"])
        if "parts" in tensors:
            self._weights_of_rows()[: self._held] = tensors["parts"]
        if "total" in tensors:
            self._total = self._panels_of(tensors["total"]).to(self._partial.device, copy=True)

    def totals(self) -> dict[str, Tensor]:
        """What was summed, each number once, in the precision that it was summed in: such totals may be added up."""
        self.multiply()
        panels = self._partial.clone() if self._total is None else self._total + self._partial
        return {"panels": panels, "row_sum": self._row_sum.clone()}

    def take(self, totals: Mapping[str, Tensor]) -> None:
        """Take up what :meth:`totals` gave, or a sum of such, in place of what was summed.

        Args:
            totals: Its result.
        """
        panels = totals["panels"]
        if panels.dtype == self._partial.dtype:
            self._partial, self._total = panels, None
        else:
            self._partial, self._total = torch.zeros_like(self._partial), panels
        self._row_sum.copy_(totals["row_sum"])

    def is_finite(self) -> bool:
        """Whether no row that has been multiplied held NaN or infinity."""
        return self._finite

    def multiply(self) -> None:
        """Sum the rows that are still held."""
        if self._held == 0:
            return
        rows = self._rows[..., : self._held, :]
        for i, panel in panels(self._partial, self._width):
            left, right = rows[..., i:].mT, columns_at(rows, i)
            panel.addmm_(left, right) if rows.ndim == 2 else panel.baddbmm_(left, right)
        if self._parts is not None:
            self._row_sum += rows.mT @ self._parts[: self._held]
            self._parts.zero_()
        self._finite = self._finite and math.isfinite(float(diagonal(self._partial, self._width).sum()))
        self._summed += self._held
        self._held = 0
        if self._summed >= _CARRIED:
            self._carry()

    def _panels_of(self, held: Tensor) -> Tensor:
        # Files of earlier releases hold whole squares.
        return packed(held) if held.ndim > self._partial.ndim else held

    def _weights_of_rows(self) -> Tensor:
        if self._parts is None:
            self._parts = torch.zeros(_ROWS, dtype=self._rows.dtype, device=self._rows.device)
        return self._parts

    def _carry(self) -> Tensor:
        """Move the sum in the rows' own precision to the one in float64."""
        if self._total is None:
            # A copy even if the rows are in float64: what is carried is set to zero next.
            self._total = self._partial.to(torch.float64, copy=True)
        elif self._summed == 0:
            return self._total
        else:
            self._total += self._partial
        self._partial.zero_()
        self._summed = 0
        return self._total


class BlockGramSum:
    """A running sum of r r^T over rows r of which only blocks along the diagonal are wanted.

    Args:
        shape: [k] or [stack, k], the shape of one row.
        widths: Those of the blocks, which add up to k.
        dtype: The rows' dtype.
        device: The rows' device.
    """

    def __init__(self, shape: tuple[int, ...], widths: Sequence[int], dtype: torch.dtype, device: torch.device) -> None:
        self._widths = list(widths)
        self._sums = [GramSum((*shape[:-1], width), dtype, device) for width in widths]

    def add(self, rows: Tensor, weight: float = 1.0, in_row_sum: bool = False) -> None:
        """As of a :class:`GramSum`."""
        for total, part in zip(self._sums, rows.split(self._widths, dim=-1), strict=True):
            total.add(part, weight, in_row_sum)

    def scale(self, factor: float) -> None:
        """As of a :class:`GramSum`."""
        for total in self._sums:
            total.scale(factor)

    def multiply(self) -> None:
        """As of a :class:`GramSum`."""
        for total in self._sums:
            total.multiply()

    def value(self, factor: float = 1.0) -> BlockDiagonal:
        """As of a :class:`GramSum`."""
        return BlockDiagonal.of(total.value(factor) for total in self._sums)

    def row_sum(self) -> Tensor:
        """As of a :class:`GramSum`."""
        return torch.cat([total.row_sum() for total in self._sums], dim=-1)

    def tensors(self) -> dict[str, Tensor]:
        """As of a :class:`GramSum`."""
        return {f"{i}.{name}": t for i, total in enumerate(self._sums) for name, t in total.tensors().items()}

    def restore(self, tensors: Mapping[str, Tensor]) -> None:
        """As of a :class:`GramSum`."""
        for i, total in enumerate(self._sums):
            total.restore(under(tensors, f"{i}."))

    def totals(self) -> dict[str, Tensor]:
        """As of a :class:`GramSum`."""
        return {f"{i}.{name}": t for i, total in enumerate(self._sums) for name, t in total.totals().items()}

    def take(self, totals: Mapping[str, Tensor]) -> None:
        """As of a :class:`GramSum`."""
        for i, total in enumerate(self._sums):
            total.take(under(totals, f"{i}."))

    def is_finite(self) -> bool:
        """As of a :class:`GramSum`."""
        return all(total.is_finite() for total in self._sums)


class SquareSum:
    """A running sum of the squares of rows, in float64: the diagonal of that of r r^T.

    Args:
        shape: [k] or [stack, k], the shape of one row.
        device: The rows' device.
    """

    def __init__(self, shape: tuple[int, ...], device: torch.device) -> None:
        self._squares, self._row_sum = (torch.zeros(shape, dtype=torch.float64, device=device) for _ in range(2))

    def add(self, rows: Tensor, weight: float = 1.0, in_row_sum: bool = False) -> None:
        """As of a :class:`GramSum`."""
        for piece in rows.split(_ROWS, dim=-2):
            double = piece.double()
            self._squares += weight * double.square().sum(-2)
            if in_row_sum:
                self._row_sum += weight * double.sum(-2)

    def scale(self, factor: float) -> None:
        """As of a :class:`GramSum`."""
        self._squares *= factor
        self._row_sum *= factor

    def multiply(self) -> None:
        """Nothing is held."""

    def value(self, factor: float = 1.0) -> BlockDiagonal:
        """As of a :class:`GramSum`."""
        return BlockDiagonal(((factor * self._squares)[..., None, None],))

    def row_sum(self) -> Tensor:
        """As of a :class:`GramSum`."""
        return self._row_sum

    def tensors(self) -> dict[str, Tensor]:
        """As of a :class:`GramSum`."""
        return {"squares": self._squares, "row_sum": self._row_sum}

    def restore(self, tensors: Mapping[str, Tensor]) -> None:
        """As of a :class:`GramSum`."""
        self._squares.copy_(tensors["squares"])
        self._row_sum.copy_(tensors["row_sum"])

    def totals(self) -> dict[str, Tensor]:
        """As of a :class:`GramSum`."""
        return {name: tensor.clone() for name, tensor in self.tensors().items()}

    def take(self, totals: Mapping[str, Tensor]) -> None:
        """As of a :class:`GramSum`."""
        self.restore(totals)

    def is_finite(self) -> bool:
        """As of a :class:`GramSum`."""
        return math.isfinite(float(self._squares.sum()))


AnyGramSum = GramSum | BlockGramSum | SquareSum


def gram_sum(
    shape: tuple[int, ...], widths: Sequence[int] | None, dtype: torch.dtype, device: torch.device
) -> AnyGramSum:
    """A running sum of r r^T, or of blocks along its diagonal.

    Args:
        shape: [k] or [stack, k], the shape of one row.
        widths: Those of the blocks; None: all of it.
        dtype: The rows' dtype.
        device: The rows' device.

    Returns:
        What sums as little as is wanted.
    """
    if widths is None:
        return GramSum(shape, dtype, device)
    return SquareSum(shape, device) if max(widths) == 1 else BlockGramSum(shape, widths, dtype, device)


def rounding(width: int, rows: float, dtype: torch.dtype) -> float:
    """How far below zero rounding errors may push an eigenvalue of a sum, relative to its largest entry.

    Each of the k^2 entries adds up R terms in the rows' own precision, with independent rounding errors of about eps.

    Args:
        width: k.
        rows: How many rows were summed.
        dtype: Their dtype.

    Returns:
        ``eps sqrt(k max(k, R))``, R no more than are summed before they are carried to float64.
    """
    return torch.finfo(dtype).eps * math.sqrt(width * max(width, min(rows, _CARRIED + _ROWS)))
