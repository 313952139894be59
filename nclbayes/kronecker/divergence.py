"""Kullback-Leibler divergences between zero-mean Gaussians given by their precisions.

A precision is a Kronecker product (:class:`KroneckerPrecision`), a sum of two (:class:`SummedPrecision`), or a dense
matrix [..., mn, mn] in the order of column-stacking vec, ``A (x) G``. Nothing of size mn-by-mn is formed unless one of
the two is dense already.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from nclbayes.errors import MatrixError
from nclbayes.kronecker.blockdiagonal import whole
from nclbayes.kronecker.pencil import Pencil
from nclbayes.kronecker.precision import KroneckerPrecision, check_symmetric, cholesky, kronecker_logdet


@dataclass(frozen=True)
class SummedPrecision:
    """The exact sum ``A (x) B + C (x) D``, held in the basis that makes it diagonal.

    Example:
        >>> import torch
        >>> from nclbayes.kronecker import SummedPrecision, gaussian_kl, kronecker_sum
        >>> A, B = torch.eye(3), torch.eye(2)
        >>> C, D = torch.diag(torch.tensor([1.0, 2.0, 0.0])), torch.eye(2)
        >>> exact = SummedPrecision.of(A, B, C, D)
        >>> float(gaussian_kl(kronecker_sum(A, B, C, D), exact)) < 1e-6
        True
    """

    left: Pencil
    right: Pencil

    @classmethod
    def of(cls, A: Tensor, B: Tensor, C: Tensor, D: Tensor, *, rtol: float | None = None) -> SummedPrecision:
        """Diagonalise the sum A (x) B + C (x) D.

        Args:
            A: [..., n, n], positive definite.
            B: [..., m, m], positive definite.
            C: [..., n, n], positive semi-definite.
            D: [..., m, m], positive semi-definite.
            rtol: As in :func:`~nclbayes.kronecker.kronecker_sum`.

        Returns:
            The sum.
        """
        return cls(
            left=Pencil.of(A, C, ("A", "C"), rtol),
            right=Pencil.of(B, D, ("B", "D"), rtol),
        )

    @property
    def shape(self) -> tuple[int, int]:
        """(m, n), the shape of the matrix whose precision this is."""
        return self.right.base.shape[-1], self.left.base.shape[-1]

    @property
    def eigenvalues(self) -> Tensor:
        """1 + c_i d_j, the sum relative to A (x) B in the joint basis, [..., n, m]."""
        return 1 + self.left.values.unsqueeze(-1) * self.right.values.unsqueeze(-2)

    @property
    def logdet(self) -> Tensor:
        """log|A (x) B + C (x) D|, [...]."""
        m, n = self.shape
        return kronecker_logdet(self.left.logdet, self.right.logdet, n, m) + self.eigenvalues.log().sum((-2, -1))

    def terms(self) -> list[tuple[Tensor, Tensor]]:
        """The two Kronecker products, [(A, B), (C, D)]."""
        return [(self.left.base, self.right.base), (self.left.repaired, self.right.repaired)]


Precision = KroneckerPrecision | SummedPrecision | Tensor


def gaussian_kl(first: Precision, second: Precision) -> Tensor:
    """KL( N(mu, L1^-1) || N(mu, L2^-1) ) = 1/2 ( tr(L1^-1 L2) - d + log|L1| - log|L2| ).

    Args:
        first: L1.
        second: L2.

    Returns:
        The divergence in nats, float64, [...].

    Raises:
        MatrixError: If the two are not of the same size, or a dense one is not positive definite.

    Example:
        >>> import torch
        >>> from nclbayes.kronecker import gaussian_kl
        >>> round(gaussian_kl(torch.eye(2), 2 * torch.eye(2)).item(), 4)
        0.3069
    """
    size = _common_size(first, second)
    return (_trace_ratio(first, second) - size + _logdet(first) - _logdet(second)) / 2


def scale_free_kl(first: Precision, second: Precision) -> Tensor:
    """The smallest KL( N(mu, L1^-1) || N(mu, (k L2)^-1) ) over scales k > 0.

    ``KL_s[L1 || L2] = 1/2 ( log|L1| - log|L2| + d log( tr(L1^-1 L2) / d ) )``.

    Args:
        first: L1.
        second: L2.

    Returns:
        The divergence in nats, float64, [...].

    Raises:
        MatrixError: If the two are not of the same size, or a dense one is not positive definite.

    Example:
        >>> import torch
        >>> from nclbayes.kronecker import scale_free_kl
        >>> abs(scale_free_kl(torch.eye(2), 2 * torch.eye(2)).item()) < 1e-12
        True
    """
    size = _common_size(first, second)
    ratio = _trace_ratio(first, second) / size
    return (_logdet(first) - _logdet(second) + size * ratio.log()) / 2


def _common_size(first: Precision, second: Precision) -> int:
    for dense in (p for p in (first, second) if isinstance(p, Tensor)):
        check_symmetric("the dense precision", dense)
    sizes = [p.shape[-1] if isinstance(p, Tensor) else p.shape[0] * p.shape[1] for p in (first, second)]
    shapes = {p.shape for p in (first, second) if not isinstance(p, Tensor)}
    if sizes[0] != sizes[1] or len(shapes) > 1:
        raise MatrixError(f"The two precisions are of different sizes: {sizes[0]} and {sizes[1]} {sorted(shapes)}.")
    return sizes[0]


def _logdet(precision: Precision) -> Tensor:
    if isinstance(precision, Tensor):
        return 2 * _dense_root(precision).diagonal(dim1=-2, dim2=-1).log().sum(-1)
    return precision.logdet.double()


def _dense_root(matrix: Tensor) -> Tensor:
    return cholesky("the dense precision", matrix.double())


def _trace_ratio(first: Precision, second: Precision) -> Tensor:
    """tr(L1^-1 L2)."""
    if isinstance(first, Tensor):
        root = _dense_root(first)
        inverse = torch.cholesky_inverse(root)
        if isinstance(second, Tensor):
            return torch.einsum("...ij,...ji->...", inverse, second.double())
        return _contract(inverse, _terms(second))
    if isinstance(first, KroneckerPrecision):
        inverses = whole(first.input_inverse).double(), whole(first.output_inverse).double()
        if isinstance(second, Tensor):
            return _contract(second.double(), [inverses])
        return torch.stack([_inner(inverses[0], p) * _inner(inverses[1], q) for p, q in _terms(second)]).sum(0)
    # In its joint basis T a sum is diagonal: tr(L1^-1 L2) = sum_ij (T^T L2 T)_ij,ij / (1 + c_i d_j).
    basis_n, basis_m = first.left.basis, first.right.basis
    if isinstance(second, Tensor):
        m, n = first.shape
        blocks = second.double().reshape(*second.shape[:-2], n, m, n, m)
        diagonal = torch.einsum("...aibj,...ap,...iq,...bp,...jq->...pq", blocks, basis_n, basis_m, basis_n, basis_m)
    else:
        diagonal = torch.stack(
            [
                _rotated_diagonal(basis_n, p).unsqueeze(-1) * _rotated_diagonal(basis_m, q).unsqueeze(-2)
                for p, q in _terms(second)
            ]
        ).sum(0)
    return (diagonal / first.eigenvalues).sum((-2, -1))


def _terms(precision: KroneckerPrecision | SummedPrecision) -> list[tuple[Tensor, Tensor]]:
    if isinstance(precision, KroneckerPrecision):
        return [(whole(precision.input).double(), whole(precision.output).double())]
    return precision.terms()


def _inner(p: Tensor, q: Tensor) -> Tensor:
    """tr(p q) of symmetric matrices."""
    return (p * q).sum((-2, -1))


def _rotated_diagonal(basis: Tensor, matrix: Tensor) -> Tensor:
    """diag(T^T M T)."""
    return (basis * (matrix @ basis)).sum(-2)


def _contract(dense: Tensor, terms: list[tuple[Tensor, Tensor]]) -> Tensor:
    """Sum over terms of tr(dense (P (x) Q)), dense symmetric."""
    n, m = terms[0][0].shape[-1], terms[0][1].shape[-1]
    blocks = dense.reshape(*dense.shape[:-2], n, m, n, m)
    return torch.stack([torch.einsum("...aibj,...ab,...ij->...", blocks, p, q) for p, q in terms]).sum(0)
