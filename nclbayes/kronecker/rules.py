"""Five ways to choose the four scalars of ``(x1 A + x2 C) (x) (y1 B + y2 D) ~= A (x) B + C (x) D``.

Every rule sees the two sums through their pencils: c, the eigenvalues of C relative to A, and d, those of D
relative to B. The formulas are derived in the documentation of Kronecker sums.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from enum import Enum
from typing import NamedTuple

import torch
from torch import Tensor

from nclbayes.kronecker.blockdiagonal import BlockDiagonal, Matrix
from nclbayes.kronecker.pencil import AnyPencil


class SumRule(str, Enum):
    """Which Kronecker product stands for the sum of two.

    Attributes:
        KL: The one closest in Kullback-Leibler divergence (the paper's text).
        ADDITIVE: ``(A + pi C) (x) (B + D / pi)`` with the trace-norm pi; never underestimates a precision. Its cross
            terms add up: over hundreds of sums it overestimates by a factor that grows with their number.
        BOUND: The member of that family with the smallest KL.
        MSE: The best in Frobenius norm.
        NAIVE: ``(A + C) (x) (B + D)``.

    Example:
        >>> from nclbayes import SumRule
        >>> SumRule("kl")
        <SumRule.KL: 'kl'>
    """

    KL = "kl"
    ADDITIVE = "additive"
    BOUND = "bound"
    MSE = "mse"
    NAIVE = "naive"


class Scalars(NamedTuple):
    """x1, x2, y1, y2 of ``(x1 A + x2 C) (x) (y1 B + y2 D)``, each of the batch shape, and the iterations spent."""

    x1: Tensor
    x2: Tensor
    y1: Tensor
    y2: Tensor
    iterations: int = 0


def relative_kl(left: AnyPencil, right: AnyPencil, scalars: Scalars) -> Tensor:
    """KL( N(mu, (X (x) Y)^-1) || N(mu, (A (x) B + C (x) D)^-1) ) of a choice of scalars.

    In the joint eigenbasis both precisions are diagonal, and the divergence is
    ``1/2 sum_ij (r_ij - 1 - log r_ij)``, ``r_ij = (1 + c_i d_j) / (x_i y_j)``.

    Args:
        left: The pencil of (A, C), k = n.
        right: The pencil of (B, D), k = m.
        scalars: x1, x2, y1, y2.

    Returns:
        The divergence in nats, of the batch shape.
    """
    x = scalars.x1.unsqueeze(-1) + scalars.x2.unsqueeze(-1) * left.values
    y = scalars.y1.unsqueeze(-1) + scalars.y2.unsqueeze(-1) * right.values
    exact = 1 + left.values.unsqueeze(-1) * right.values.unsqueeze(-2)
    excess = exact.div_(x.unsqueeze(-1)).div_(y.unsqueeze(-2)).sub_(1)
    return (excess - excess.log1p()).sum(dim=(-2, -1)) / 2


def naive(left: AnyPencil, right: AnyPencil) -> Scalars:
    """(A + C) (x) (B + D).

    Args:
        left: The pencil of (A, C).
        right: The pencil of (B, D).

    Returns:
        Ones.
    """
    one = torch.ones_like(left.logdet + right.logdet)
    return Scalars(one, one, one, one)


def additive(left: AnyPencil, right: AnyPencil) -> Scalars:
    """(A + pi C) (x) (B + D / pi), pi = sqrt( tr(A) tr(D) / (tr(B) tr(C)) ).

    That pi minimises the trace norm of the two cross terms. The paper prints its reciprocal.

    Args:
        left: The pencil of (A, C).
        right: The pencil of (B, D).

    Returns:
        1, pi, 1, 1/pi; or 1, 0, 1, 0 where C (x) D = 0.
    """
    pi = torch.sqrt(_trace(left.base) * _trace(right.added) / (_trace(right.base) * _trace(left.added)))
    return _family(pi, left, right)


def bound(left: AnyPencil, right: AnyPencil) -> Scalars:
    """The pi of the additive family with the smallest KL.

    Minimises ``m sum_i log(1 + pi c_i) + n sum_j log(1 + d_j / pi) + S1 T1 + S2 T2`` over log pi, where
    S1 = sum 1/(1 + pi c_i), T1 = sum 1/(1 + d_j/pi), S2 = sum c_i/(1 + pi c_i), T2 = sum d_j/(1 + d_j/pi): a grid
    over all scales of c and d, then finer grids around its best point.

    Args:
        left: The pencil of (A, C).
        right: The pencil of (B, D).

    Returns:
        1, pi, 1, 1/pi; or 1, 0, 1, 0 where C (x) D = 0.
    """
    c, d = left.values, right.values
    nothing = _adds_nothing(left, right)
    log_c = torch.where(nothing, 0.0, c[..., -1].log())
    log_d = torch.where(nothing, 0.0, d[..., -1].log())
    # Outside this range every eigenvalue that is not a rounding error of the largest has saturated.
    span = -math.log(torch.finfo(c.dtype).eps)
    low, high = torch.minimum(-log_c, log_d - span), torch.maximum(log_d, span - log_c)
    steps = torch.linspace(0.0, 1.0, 129, dtype=c.dtype, device=c.device)
    iterations = 0
    while bool((high - low).amax() > 1e-10):
        grid = low.unsqueeze(-1) + (high - low).unsqueeze(-1) * steps
        best = _family_objective(grid.exp(), c, d).argmin(-1, keepdim=True)
        low = grid.gather(-1, (best - 1).clamp(min=0)).squeeze(-1)
        high = grid.gather(-1, (best + 1).clamp(max=len(steps) - 1)).squeeze(-1)
        iterations += 1
    return _family(((low + high) / 2).exp(), left, right)._replace(iterations=iterations)


def mse(left: AnyPencil, right: AnyPencil) -> Scalars:
    """The best rank-one approximation of vec(A) vec(B)^T + vec(C) vec(D)^T.

    With P and Q the Gram matrices of (A, C) and (B, D), the leading singular pair is ``x = [A C] alpha`` and
    ``y = [B D] beta``, ``beta ~ P alpha`` and alpha the leading eigenvector of Q P: two by two, with non-negative
    entries, hence with a non-negative leading eigenvector.

    Args:
        left: The pencil of (A, C).
        right: The pencil of (B, D).

    Returns:
        The four non-negative scalars, with x1 = y1.
    """
    left_norms, gram_p = _gram(left)
    right_norms, gram_q = _gram(right)
    # In units of the norms: A (x) B and C (x) D have weights w, A, B, C, D have norm one.
    weights = left_norms * right_norms
    largest = weights.amax(-1, keepdim=True)
    w = weights / largest
    q, p = w.unsqueeze(-1) * gram_q, w.unsqueeze(-1) * gram_p
    alpha = _leading_vector(q @ p)
    beta = (p @ alpha.unsqueeze(-1)).squeeze(-1)
    image = (q @ beta.unsqueeze(-1)).squeeze(-1)  # the rank-two map applied to y, in [A C] coordinates
    x_norm = torch.einsum("...i,...ij,...j->...", alpha, gram_p, alpha)
    y_norm = torch.einsum("...i,...ij,...j->...", beta, gram_q, beta)
    singular = torch.einsum("...i,...ij,...j->...", alpha, gram_p, image)
    scale = (largest.squeeze(-1) * singular / (x_norm * y_norm)).unsqueeze(-1)
    x = alpha / torch.where(left_norms > 0, left_norms, torch.ones_like(left_norms))
    y = scale * beta / torch.where(right_norms > 0, right_norms, torch.ones_like(right_norms))
    even = (y[..., 0] / x[..., 0]).sqrt().unsqueeze(-1)
    x, y = x * even, y / even
    return Scalars(x[..., 0], x[..., 1], y[..., 0], y[..., 1])


def kl(left: AnyPencil, right: AnyPencil) -> Scalars:
    """The Kronecker product with the smallest KL to the sum.

    Stationarity couples the four scalars by alternating means,

        x1 = mean_j 1/(y1 + y2 d_j)    x2 = mean_j d_j/(y1 + y2 d_j)
        y1 = mean_i 1/(x1 + x2 c_i)    y2 = mean_i c_i/(x1 + x2 c_i)

    which see only the ratios s = x2/x1 and t = y2/y1: ``s = phi_d(t)`` and ``t = phi_c(s)`` with
    ``phi_d(t) = mean(d/(1 + t d)) / mean(1/(1 + t d))``. Alternating is a contraction of log t, but its rate tends to 1
    when the spectra are wide, so the fixed point is found by Newton's method on that one number, kept inside a
    bracket. It is the only stationary point: the divergence is geodesically convex in (X, Y).

    Args:
        left: The pencil of (A, C).
        right: The pencil of (B, D).

    Returns:
        The scalars with x1 = y1, and the number of Newton steps.
    """
    c, d = left.values, right.values
    nothing = _adds_nothing(left, right)
    positive_c, positive_d = (torch.where(nothing.unsqueeze(-1), 1.0, v) for v in (c, d))
    low, high = _phi(positive_c, positive_d.mean(-1).log())[0], positive_c.mean(-1).log()
    u = torch.where(nothing, high, additive(left, right).y2.log()).clamp(low, high)
    iterations, eps = 0, torch.finfo(c.dtype).eps
    while True:
        log_s, slope_d = _phi(positive_d, u)
        log_t, slope_c = _phi(positive_c, log_s)
        residual = log_t - u
        low, high = torch.where(residual > 0, u, low), torch.where(residual < 0, u, high)
        newton = u + residual / (1 - slope_c * slope_d).clamp(min=eps)
        proposal = torch.where((newton < low) | (newton > high), (low + high) / 2, newton)
        settled = (residual.abs() <= 4 * eps * u.abs().clamp(min=1.0)) | ((proposal - u).abs() <= 1e-13)
        if bool(settled.all()) or iterations == _MAX_ITERATIONS:
            break
        u = torch.where(settled, u, proposal)
        iterations += 1
    s, t = (torch.where(nothing, 0.0, ratio.exp()) for ratio in (log_s, u))
    # x1 y1 = mean_j 1/(1 + t d_j)
    scale = (1 / (1 + t.unsqueeze(-1) * d)).mean(-1).sqrt()
    return Scalars(scale, scale * s, scale, scale * t, iterations)


RULES: dict[SumRule, Callable[[AnyPencil, AnyPencil], Scalars]] = {
    SumRule.KL: kl,
    SumRule.ADDITIVE: additive,
    SumRule.BOUND: bound,
    SumRule.MSE: mse,
    SumRule.NAIVE: naive,
}

_MAX_ITERATIONS = 200


def _trace(matrix: Matrix) -> Tensor:
    return matrix.diagonal(dim1=-2, dim2=-1).sum(-1)


def _family(pi: Tensor, left: AnyPencil, right: AnyPencil) -> Scalars:
    """Scalars of (A + pi C) (x) (B + D / pi), exact where C (x) D = 0."""
    one, nothing = torch.ones_like(pi), _adds_nothing(left, right)
    return Scalars(one, torch.where(nothing, 0.0, pi), one, torch.where(nothing, 0.0, 1 / pi))


def _adds_nothing(left: AnyPencil, right: AnyPencil) -> Tensor:
    """Where C (x) D = 0."""
    return (_trace(left.added) == 0) | (_trace(right.added) == 0)


def _family_objective(pi: Tensor, c: Tensor, d: Tensor) -> Tensor:
    """2 KL of the additive family up to a constant; pi: [..., g], c: [..., n], d: [..., m] -> [..., g]."""
    n, m = c.shape[-1], d.shape[-1]
    x = 1 + pi.unsqueeze(-1) * c.unsqueeze(-2)
    y = 1 + d.unsqueeze(-2) / pi.unsqueeze(-1)
    traces = (1 / x).sum(-1) * (1 / y).sum(-1) + (c.unsqueeze(-2) / x).sum(-1) * (d.unsqueeze(-2) / y).sum(-1)
    return m * x.log().sum(-1) + n * y.log().sum(-1) + traces


def _gram(pencil: AnyPencil) -> tuple[Tensor, Tensor]:
    """Frobenius norms of (A, C), [..., 2], and the Gram matrix of the normalised pair, [..., 2, 2]."""
    pair = torch.stack([_entries(pencil.base), _entries(pencil.added)], dim=-2)
    norms = torch.linalg.vector_norm(pair, dim=-1)
    unit = pair / torch.where(norms > 0, norms, torch.ones_like(norms)).unsqueeze(-1)
    return norms, unit @ unit.mT


def _entries(matrix: Matrix) -> Tensor:
    return matrix.entries() if isinstance(matrix, BlockDiagonal) else matrix.flatten(-2)


def _leading_vector(matrix: Tensor) -> Tensor:
    """The leading eigenvector of a non-negative 2-by-2 matrix, [..., 2, 2] -> [..., 2], without cancellation."""
    (a, b), (c, d) = (row.unbind(-1) for row in matrix.unbind(-2))
    gap = ((a - d).square() + 4 * b * c).sqrt()
    first = torch.stack([(gap + (a - d)) / 2, c], dim=-1)
    second = torch.stack([b, (gap - (a - d)) / 2], dim=-1)
    vector = torch.where((a >= d).unsqueeze(-1), first, second)
    return vector / vector.amax(-1, keepdim=True)


def _phi(values: Tensor, log_ratio: Tensor) -> tuple[Tensor, Tensor]:
    """Log of phi(r) = mean(v/(1 + r v)) / mean(1/(1 + r v)), and its slope d log phi / d log r in (-1, 0]."""
    scaled = log_ratio.exp().unsqueeze(-1) * values
    w = 1 / (1 + scaled)
    a, b = w.mean(-1), (scaled * w).mean(-1)  # a + b = 1
    variance = (w - a.unsqueeze(-1)).square().mean(-1)
    return b.log() - a.log() - log_ratio, -variance / (a * b)
