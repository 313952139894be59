"""The precision ``A (x) G`` of one block, with everything that a factorisation of it gives."""

from __future__ import annotations

from dataclasses import dataclass, field, fields
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from nclbayes.errors import MatrixError
from nclbayes.kronecker.blockdiagonal import BlockDiagonal, Matrix, whole

if TYPE_CHECKING:
    from typing_extensions import Self


def check_symmetric(name: str, matrix: Tensor) -> None:
    """Refuse what is not a finite floating-point symmetric matrix (or batch of them).

    Args:
        name: How the error message calls the matrix.
        matrix: [..., k, k].

    Raises:
        MatrixError: If the matrix is not square, not floating point, not finite, or not symmetric up to rounding.
    """
    if matrix.ndim < 2 or matrix.shape[-1] != matrix.shape[-2] or matrix.shape[-1] == 0:
        raise MatrixError(f"{name} must be a square matrix [..., k, k], not {tuple(matrix.shape)}.")
    if not matrix.is_floating_point():
        raise MatrixError(f"{name} must be floating point, not {matrix.dtype}.")
    if not bool(torch.isfinite(matrix).all()):
        raise MatrixError(f"{name} has NaN or infinite entries.")
    gap = (matrix - matrix.mT).abs().amax(dim=(-2, -1))
    if bool((gap > 1e3 * torch.finfo(matrix.dtype).eps * matrix.abs().amax(dim=(-2, -1))).any()):
        raise MatrixError(f"{name} is not symmetric: an entry and its mirror image differ by {float(gap.amax()):.3g}.")


def cholesky(name: str, matrix: Tensor) -> Tensor:
    """The lower Cholesky factor L of a positive definite matrix, L L^T.

    Args:
        name: How the error message calls the matrix.
        matrix: [..., k, k], symmetric.

    Returns:
        L: [..., k, k], lower triangular.

    Raises:
        MatrixError: If the matrix is not positive definite.
    """
    factor, info = torch.linalg.cholesky_ex(matrix)
    _refuse_indefinite(name, info)
    return factor


def _refuse_indefinite(name: str, info: Tensor) -> None:
    if bool(info.any()):
        order = int(info[info != 0].flatten()[0])
        raise MatrixError(
            f"{name} is not positive definite (its leading minor of order {order} is not positive). "
            "A precision factor must be; nothing is added to repair it."
        )


def kronecker_logdet(input_logdet: Tensor, output_logdet: Tensor, n: int, m: int) -> Tensor:
    """Log determinant of a Kronecker product, log|A (x) G| = m log|A| + n log|G|.

    Args:
        input_logdet: log|A|, [...].
        output_logdet: log|G|, [...].
        n: The size of A.
        m: The size of G.

    Returns:
        [...].
    """
    return m * input_logdet + n * output_logdet


@dataclass(frozen=True)
class KroneckerPrecision:
    """A precision ``A (x) G`` of an m-by-n matrix, factorised once and for all.

    ``(A (x) G) vec(V) = vec(G V A)``, vec stacking columns. Leading batch dimensions are allowed on every
    tensor. Build one with :meth:`factorise`, or get one from :func:`~nclbayes.kronecker.kronecker_sum`. A side that is
    too large to be held whole is a :class:`~nclbayes.kronecker.BlockDiagonal`, and so are its inverse and its root.

    Attributes:
        input: A, [..., n, n].
        output: G, [..., m, m].
        input_inverse: A^-1, [..., n, n].
        output_inverse: G^-1, [..., m, m].
        input_root: S_A, upper triangular, with S_A S_A^T = A^-1, [..., n, n].
        output_root: S_G, upper triangular, with S_G S_G^T = G^-1, [..., m, m].
        logdet: log|A (x) G|, [...].
        is_own: Whether inverses, roots and log determinant are those that :meth:`factorise` finds of A and G.

    Example:
        >>> import torch
        >>> from nclbayes.kronecker import KroneckerPrecision
        >>> p = KroneckerPrecision.factorise(2 * torch.eye(3), torch.eye(2))
        >>> round(float(p.logdet), 4)   # 6 log 2
        4.1589
    """

    input: Matrix
    output: Matrix
    input_inverse: Matrix
    output_inverse: Matrix
    input_root: Matrix
    output_root: Matrix
    logdet: Tensor
    is_own: bool = field(default=True, kw_only=True)

    @classmethod
    def factorise(cls, input: Matrix, output: Matrix) -> KroneckerPrecision:
        """Factorise A and G (in float64 inside; the results have the inputs' dtype).

        Args:
            input: A, [..., n, n], positive definite.
            output: G, [..., m, m], positive definite.

        Returns:
            The precision with its inverses, covariance roots and log determinant.

        Raises:
            MatrixError: If a factor is not a finite positive definite matrix.
        """
        A_inverse, A_root, A_logdet = _invert("the input factor", input)
        G_inverse, G_root, G_logdet = _invert("the output factor", output)
        logdet = kronecker_logdet(A_logdet, G_logdet, input.shape[-1], output.shape[-1])
        return KroneckerPrecision(input, output, A_inverse, G_inverse, A_root, G_root, logdet=logdet.to(input.dtype))

    @property
    def shape(self) -> tuple[int, int]:
        """(m, n), the shape of the matrix whose precision this is."""
        return self.output.shape[-1], self.input.shape[-1]

    @property
    def size(self) -> int:
        """The number of weights, m n."""
        return self.output.shape[-1] * self.input.shape[-1]

    def times(self, matrix: Tensor) -> Tensor:
        """Lambda vec(V), as a matrix: G V A.

        Args:
            matrix: V, [..., m, n].

        Returns:
            G V A, [..., m, n].
        """
        return self.output @ matrix @ self.input

    def solve(self, matrix: Tensor) -> Tensor:
        """Lambda^-1 vec(V), as a matrix: G^-1 V A^-1.

        Args:
            matrix: V, [..., m, n].

        Returns:
            G^-1 V A^-1, [..., m, n].
        """
        return self.output_inverse @ matrix @ self.input_inverse

    def dense(self) -> Tensor:
        """The whole precision matrix A (x) G, [..., mn, mn]; for small blocks and tests.

        Returns:
            A (x) G in the order of column-stacking vec.
        """
        n, m = self.input.shape[-1], self.output.shape[-1]
        product = torch.einsum("...ij,...kl->...ikjl", whole(self.input), whole(self.output))
        return product.reshape(*product.shape[:-4], n * m, n * m)

    def to(self, *args: torch.dtype | torch.device | str) -> Self:
        """A copy with every tensor on another device or in another dtype, as ``Tensor.to``.

        Args:
            *args: What ``Tensor.to`` takes.

        Returns:
            The moved precision, of the same class.
        """
        moved = {}
        for each in fields(self):
            value = getattr(self, each.name)
            moves = isinstance(value, BlockDiagonal) or (isinstance(value, Tensor) and value.is_floating_point())
            moved[each.name] = value.to(*args) if moves else value
        return type(self)(**moved)


def inverse_root(factor: Tensor) -> Tensor:
    """L^-T, a square root of the inverse of L L^T.

    Args:
        factor: L, [..., k, k], lower triangular.

    Returns:
        S = L^-T, [..., k, k], with S S^T = (L L^T)^-1.
    """
    identity = torch.eye(factor.shape[-1], dtype=factor.dtype, device=factor.device)
    return torch.linalg.solve_triangular(factor.mT, identity.expand_as(factor), upper=True)


def _invert(name: str, matrix: Matrix) -> tuple[Matrix, Matrix, Tensor]:
    """Inverse, its root and log determinant of one factor, computed in float64."""
    if isinstance(matrix, BlockDiagonal):
        inverses, roots, logdets = zip(*(_invert(name, part) for part in matrix.parts), strict=True)
        return BlockDiagonal(inverses), BlockDiagonal(roots), torch.stack([part.sum(-1) for part in logdets]).sum(0)
    check_symmetric(name, matrix)
    inverse, root, logdet, info = factored(matrix.double())
    _refuse_indefinite(name, info)
    return inverse.to(matrix.dtype), root.to(matrix.dtype).contiguous(), logdet


def factored(matrix: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """What a Cholesky factor tells of a symmetric matrix X.

    Args:
        matrix: X, [..., k, k].

    Returns:
        X^-1, S with S S^T = X^-1, log|X|, and 0 where X is positive definite, [...].
    """
    diagonal = matrix.diagonal(dim1=-2, dim2=-1)
    if int(matrix.count_nonzero()) == diagonal.numel() and bool((diagonal > 0).all()):
        # As of a prior: nothing to factorise, however large it is.
        scale = 1 / diagonal.sqrt()
        info = torch.zeros(matrix.shape[:-2], dtype=torch.int32, device=matrix.device)
        return torch.diag_embed(scale.square()), torch.diag_embed(scale), diagonal.log().sum(-1), info
    factor, info = torch.linalg.cholesky_ex(matrix)
    root = inverse_root(factor)
    return root @ root.mT, root, 2 * factor.diagonal(dim1=-2, dim2=-1).log().sum(-1), info
