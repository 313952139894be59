"""Triangles: products with them, panel by panel, at half the work of plain ones; and symmetric matrices as one."""

from __future__ import annotations

import math

import torch
from torch import Tensor

# Wide enough for fast products, narrow enough to leave out most of the zeros.
_PANEL = 96


def between_triangles(left: Tensor, matrix: Tensor, right: Tensor) -> Tensor:
    """L M R^T for upper triangular L and R; what they hold below the diagonal is not read beyond a panel.

    Args:
        left: L, [..., m, m].
        matrix: M, [..., m, n].
        right: R, [..., n, n].

    Returns:
        [..., m, n].
    """
    m, n = matrix.shape[-2:]
    rows = [left[..., i : i + _PANEL, i:] @ matrix[..., i:, :] for i in range(0, m, _PANEL)]
    product = torch.cat(rows, dim=-2)
    columns = [product[..., j:] @ right[..., j : j + _PANEL, j:].mT for j in range(0, n, _PANEL)]
    return torch.cat(columns, dim=-1)


def upper_root(root: Tensor) -> Tensor:
    """The upper triangular S with S S^T = R R^T, by a QR decomposition.

    Args:
        root: R, [..., k, k].

    Returns:
        S, [..., k, k].
    """
    factor = torch.linalg.qr(root.flip(-2).mT, mode="r").R
    return factor.mT.flip(-1, -2)


def triangle_of(matrix: Tensor) -> Tensor:
    """The entries of a matrix's upper triangle, row by row: all of a symmetric one, each once.

    Args:
        matrix: [..., k, k].

    Returns:
        [..., k (k + 1) / 2].
    """
    rows, columns = torch.triu_indices(*matrix.shape[-2:], device=matrix.device)
    return matrix[..., rows, columns]


def upper_of(triangle: Tensor) -> Tensor:
    """The upper triangular matrix that a triangle is of.

    Args:
        triangle: [..., k (k + 1) / 2].

    Returns:
        [..., k, k].
    """
    k = (math.isqrt(1 + 8 * triangle.shape[-1]) - 1) // 2
    rows, columns = torch.triu_indices(k, k, device=triangle.device)
    matrix = triangle.new_zeros(*triangle.shape[:-1], k, k)
    matrix[..., rows, columns] = triangle
    return matrix


def symmetric_of(triangle: Tensor) -> Tensor:
    """The symmetric matrix that a triangle is of.

    Args:
        triangle: [..., k (k + 1) / 2].

    Returns:
        [..., k, k].
    """
    upper = upper_of(triangle)
    return upper + upper.triu(1).mT
