"""Lower triangles of symmetric matrices as panels of columns, each from the diagonal down, one after the other."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

# So many columns each; of the corner on the diagonal, both triangles are held.
_PANEL = 96


def numbers(k: int) -> int:
    """How many numbers the panels of a [k, k] matrix have."""
    return sum((k - i) * min(_PANEL, k - i) for i in range(0, k, _PANEL))


def panels(packed: Tensor, k: int) -> Iterator[tuple[int, Tensor]]:
    """Views of the panels, with the column that each begins with.

    Args:
        packed: [..., numbers].
        k: The width of the matrix.

    Yields:
        i and [..., k - i, columns].
    """
    start = 0
    for i in range(0, k, _PANEL):
        rows, columns = k - i, min(_PANEL, k - i)
        yield i, packed[..., start : start + rows * columns].unflatten(-1, (rows, columns))
        start += rows * columns


def columns_at(rows: Tensor, i: int) -> Tensor:
    """Those columns of [..., R, k] rows that make the panel beginning with column i, [..., R, columns]."""
    return rows[..., i : i + _PANEL]


def packed(lower: Tensor) -> Tensor:
    """The panels of a matrix.

    Args:
        lower: [..., k, k], of which only the lower triangle is looked at.

    Returns:
        [..., numbers].
    """
    *stack, k, _ = lower.shape
    found = lower.new_empty(*stack, numbers(k))
    for i, panel in panels(found, k):
        panel.copy_(columns_at(lower[..., i:, :], i))
    return found


def diagonal(packed: Tensor, k: int) -> Tensor:
    """The diagonal of the matrix, [..., k]."""
    return torch.cat([panel.diagonal(dim1=-2, dim2=-1) for _, panel in panels(packed, k)], dim=-1)


def mirrored(packed: Tensor, k: int, factor: float) -> Tensor:
    """The symmetric matrix, times a number.

    Args:
        packed: [..., numbers].
        k: Its width.
        factor: The number.

    Returns:
        [..., k, k] in float64.
    """
    whole = torch.empty(*packed.shape[:-1], k, k, dtype=torch.float64, device=packed.device)
    for i, lower in panels(packed, k):
        panel = lower.double() * factor
        columns = panel.shape[-1]
        corner = panel[..., :columns, :].tril()
        whole[..., i:, i : i + columns] = panel
        whole[..., i : i + columns, i:] = panel.mT
        # Exact: off the diagonal one of the two is zero.
        whole[..., i : i + columns, i : i + columns] = corner + corner.tril(-1).mT
    return whole
