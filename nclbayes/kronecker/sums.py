"""The sum of two Kronecker products as one Kronecker product."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from nclbayes.errors import SettingError
from nclbayes.kronecker.blockdiagonal import BlockDiagonal, Matrix
from nclbayes.kronecker.pencil import AnyPencil, BlockPencil, Pencil, pencil
from nclbayes.kronecker.precision import KroneckerPrecision, factored, inverse_root, kronecker_logdet
from nclbayes.kronecker.rules import RULES, SumRule, additive, relative_kl
from nclbayes.kronecker.triangular import upper_root


@dataclass(frozen=True)
class KroneckerSum(KroneckerPrecision):
    """The precision ``X (x) Y`` that stands for ``A (x) B + C (x) D``, factorised.

    Attributes:
        kl: KL( N(mu, (X (x) Y)^-1) || N(mu, (A (x) B + C (x) D)^-1) ) in nats, [...].
        start_kl: The same before the rule's search: that of the `additive` sum for rule `kl`; of the result for others.
        iterations: How many steps the rule's scalar search took (0 for a closed form).
        clipped: How far below zero the lowest eigenvalue of C relative to A, or of D relative to B, was before it
            was set to zero, [...]; zero if nothing had to be repaired.

    Example:
        >>> import torch
        >>> from nclbayes import kronecker_sum
        >>> A, B, C, D = torch.eye(3), torch.eye(2), torch.diag(torch.tensor([1.0, 2.0, 3.0])), torch.eye(2)
        >>> total = kronecker_sum(A, B, C, D)
        >>> total.kl.item() < 1e-9, total.shape
        (True, (2, 3))
    """

    kl: Tensor
    start_kl: Tensor
    iterations: int
    clipped: Tensor


def kronecker_sum(
    A: Matrix,
    B: Matrix,
    C: Matrix,
    D: Matrix,
    rule: SumRule | str = SumRule.KL,
    *,
    rtol: float | None = None,
    measure: bool = True,
) -> KroneckerSum:
    """One Kronecker product X (x) Y close to A (x) B + C (x) D.

    Every rule gives ``X = x1 A + x2 C`` and ``Y = y1 B + y2 D``; :class:`SumRule` says how it chooses the four scalars.
    The work is done in float64; matrices and log determinant have the dtype of A. A and C may be
    :class:`~nclbayes.kronecker.BlockDiagonal` matrices of the same blocks, and so may B and D; X and Y then are, too.

    Args:
        A: Input factor of the first product, [..., n, n], positive definite.
        B: Output factor of the first product, [..., m, m], positive definite.
        C: Input factor of the second product, [..., n, n], positive semi-definite; may be singular or zero.
        D: Output factor of the second product, [..., m, m], positive semi-definite; may be singular or zero.
        rule: "kl", "additive", "bound", "mse" or "naive".
        rtol: How negative an eigenvalue of C or D may be, relative to the matrix's largest entry, and still count as
            a rounding error (it is then set to zero and reported in ``clipped``). Default: the size of the
            matrix times the machine epsilon of its dtype. Pass a larger one for a float64 matrix that was summed
            from float32 products.
        measure: Whether to compute the divergence and what was clipped; where not, they are NaN. They need
            eigenvalues, which the rules "additive", "mse" and "naive" do without.

    Returns:
        X and Y with inverses, covariance roots, log determinant and divergence from the exact sum.

    Raises:
        SettingError: If the rule is unknown.
        MatrixError: If A or B is not positive definite, C or D not positive semi-definite, or the sizes do not fit.

    Example:
        >>> import torch
        >>> from nclbayes import kronecker_sum
        >>> I2, I3 = torch.eye(2), torch.eye(3)
        >>> total = kronecker_sum(I3, I2, 3 * I3, I2)          # exact: 4 I
        >>> bool(torch.allclose(total.dense(), 4 * torch.eye(6)))
        True
    """
    try:
        chosen = SumRule(rule)
    except ValueError:
        allowed = ", ".join(repr(r.value) for r in SumRule)
        raise SettingError(f"Unknown rule {rule!r} for a Kronecker sum; choose one of {allowed}.") from None
    left, right = pencil(A, C, ("A", "C"), rtol), pencil(B, D, ("B", "D"), rtol)
    scalars = RULES[chosen](left, right)
    X, X_inverse, X_root, X_logdet, X_is_own = _combine(left, scalars.x1, scalars.x2)
    Y, Y_inverse, Y_root, Y_logdet, Y_is_own = _combine(right, scalars.y1, scalars.y2)
    logdet = kronecker_logdet(X_logdet, Y_logdet, A.shape[-1], B.shape[-1])
    kl = start_kl = clipped = torch.full_like(logdet, torch.nan)
    if measure:
        kl = start_kl = relative_kl(left, right, scalars)
        clipped = torch.maximum(left.clipped, right.clipped)
        if chosen is SumRule.KL:
            start_kl = relative_kl(left, right, additive(left, right))
    return KroneckerSum(
        input=X.to(A.dtype),
        output=Y.to(A.dtype),
        input_inverse=X_inverse.to(A.dtype),
        output_inverse=Y_inverse.to(A.dtype),
        # Contiguous, so that a copy read back from a file multiplies in the same order.
        input_root=X_root.to(A.dtype).contiguous(),
        output_root=Y_root.to(A.dtype).contiguous(),
        logdet=logdet.to(A.dtype),
        is_own=X_is_own and Y_is_own,
        kl=kl,
        start_kl=start_kl,
        iterations=scalars.iterations,
        clipped=clipped,
    )


# A Cholesky factor is trusted while eps times the condition number, which bounds its relative error, stays below this.
_TRUSTED = 1e-8
# Negative eigenvalues of C (rounding errors) are left in x1 A + x2 C if they take off no more than this part of x1 A.
_NEGLIGIBLE = 1e-7


def _combine(pencil: AnyPencil, x1: Tensor, x2: Tensor) -> tuple[Matrix, Matrix, Matrix, Tensor, bool]:
    """X = x1 A + x2 C, X^-1, S with S S^T = X^-1, log|X|, and whether these are what a Cholesky of X gives."""
    if isinstance(pencil, BlockPencil):
        found = [_combined(part, x1.unsqueeze(-1), x2.unsqueeze(-1)) for part in pencil.parts]
        matrices, inverses, roots, logdets, own = zip(*found, strict=True)
        logdet = torch.stack([part.sum(-1) for part in logdets]).sum(0)
        return BlockDiagonal(matrices), BlockDiagonal(inverses), BlockDiagonal(roots), logdet, all(own)
    return _combined(pencil, x1, x2)


def _combined(pencil: Pencil, x1: Tensor, x2: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor, bool]:
    base, added = x1[..., None, None] * pencil.base, x2[..., None, None] * pencil.added
    matrix = base + added
    inverse, root, logdet, info = factored(matrix)
    condition = torch.linalg.matrix_norm(matrix) * torch.linalg.matrix_norm(inverse)
    _, negative = torch.linalg.cholesky_ex(added.add_(base, alpha=_NEGLIGIBLE))
    sound = (info == 0) & (negative == 0) & (torch.finfo(matrix.dtype).eps * condition < _TRUSTED)
    if bool(sound.all()):
        return matrix, inverse, root, logdet, True
    values = x1.unsqueeze(-1) + x2.unsqueeze(-1) * pencil.values
    matrix = base + x2[..., None, None] * pencil.repaired
    root = _sharpened(upper_root(pencil.basis * values.rsqrt().unsqueeze(-2)), matrix)
    return matrix, root @ root.mT, root, pencil.logdet + values.log().sum(-1), False


def _sharpened(root: Tensor, matrix: Tensor) -> Tensor:
    """A root of X^-1 from a Cholesky of X itself, wherever it agrees with the pencil's root.

    The pencil's root carries the rounding errors of whitening by A: X X^-1 may miss I by a thousand times what a
    Cholesky of X achieves. Where X is so ill conditioned that its own rounding spoils the Cholesky, the two disagree,
    and the pencil's root, which never sees the rounded X, is kept.
    """
    factor, info = torch.linalg.cholesky_ex(matrix)
    own = inverse_root(factor)
    gap = own.square().sum((-2, -1)) / root.square().sum((-2, -1)) - 1
    return torch.where(((info == 0) & (gap.abs() < 1e-6))[..., None, None], own, root)
