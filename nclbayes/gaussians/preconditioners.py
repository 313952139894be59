"""What a gradient is multiplied with: the inverse of a block's precision, damped or not."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from nclbayes.gaussians.gradients import Gradient, Preconditioned, RowGradient
from nclbayes.kronecker import BlockDiagonal, KroneckerPrecision, kronecker_sum
from nclbayes.kronecker.blockdiagonal import Matrix, each, identity_like

# Rows must save so many multiplications of a step to be worth the watching that finds them.
_WORTH = 2e7
# The largest eigenvalue of a product is that of so many powers of it, which is too small by some per cent at most.
_POWERS = 20


class Preconditioner(Protocol):
    """What a gradient is multiplied with, ``tau P``."""

    def prefers_rows(self, rows: float) -> bool:
        """Whether a gradient of so many rows is better left as them."""

    def curvature(self, inputs: Matrix, outputs: Matrix) -> float:
        """The largest eigenvalue of ``tau P (inputs (x) outputs)``, or a bound of it."""

    def add(self, m: Tensor, g: Gradient, rho: float, factor: float) -> None:
        """M <- rho M + factor tau P g, in place."""

    def add_pull(self, m: Tensor, theta: Tensor, loc: Tensor, factor: float) -> None:
        """M <- M + factor P Lambda (theta - mu), in place."""

    @property
    def has_pull(self) -> bool:
        """Whether P Lambda is another matrix than the identity."""

    @property
    def pull_strength(self) -> float:
        """The largest eigenvalue of P Lambda."""


@dataclass(frozen=True)
class Elementwise:
    """A preconditioner of independent weights.

    Attributes:
        weights: tau P, of the block's shape.
        pull: P Lambda, of the block's shape; None for the identity.
    """

    weights: Tensor
    pull: Tensor | None

    def prefers_rows(self, rows: float) -> bool:
        """Whether a gradient of so many rows is better left as them: never."""
        return False

    def curvature(self, inputs: Matrix, outputs: Matrix) -> float:
        """A bound of the largest eigenvalue of ``tau P (inputs (x) outputs)``.

        Args:
            inputs: [n, n] or [k, n, n], float64.
            outputs: [m, m] or [k, m, m], float64.

        Returns:
            The bound; the eigenvalue itself where all weights are the same.
        """
        return float(self.weights.max()) * float((_largest(None, inputs) * _largest(None, outputs)).max())

    def add(self, m: Tensor, g: Gradient, rho: float, factor: float) -> None:
        """M <- rho M + factor tau P g.

        Args:
            m: M, changed in place.
            g: The gradient; of rows there must be none.
            rho: What M is multiplied with.
            factor: What the rest is multiplied with.
        """
        m.mul_(rho)
        if isinstance(g, Preconditioned):
            m.add_(g.value, alpha=factor)
        elif isinstance(g, RowGradient):
            assert not g.pieces
        else:
            m.addcmul_(g, self.weights, value=factor)

    def add_pull(self, m: Tensor, theta: Tensor, loc: Tensor, factor: float) -> None:
        """M <- M + factor P Lambda (theta - mu).

        Args:
            m: M, changed in place.
            theta: The weights.
            loc: mu.
            factor: What that is multiplied with.
        """
        if self.pull is None:
            m.add_(theta, alpha=factor).sub_(loc, alpha=factor)
        else:
            m.addcmul_(theta - loc, self.pull, value=factor)

    @property
    def has_pull(self) -> bool:
        """Whether P Lambda is another matrix than the identity."""
        return self.pull is not None

    @property
    def pull_strength(self) -> float:
        """The largest eigenvalue of P Lambda."""
        return 1.0 if self.pull is None else float(self.pull.max())


@dataclass(frozen=True)
class TwoSided:
    """A preconditioner ``P = left (x) right`` of a linear map, or of a stack of them.

    Attributes:
        left: [m, m] or [k, m, m], symmetric; whole, or block-diagonal, as the other side.
        right: tau times the other side, [n, n] or [k, n, n], symmetric.
        pull: The two sides of P Lambda; None for the identity.
    """

    left: Matrix
    right: Matrix
    pull: tuple[Matrix, Matrix] | None

    def prefers_rows(self, rows: float) -> bool:
        """Whether a gradient is better left as its rows.

        Args:
            rows: How many there are.

        Returns:
            Whether multiplying them by the two sides saves work worth the name.
        """
        if self.left.ndim != 2:
            return False
        (m, left), (n, right) = ((side.shape[0], _width(side)) for side in (self.left, self.right))
        return m * n * (left + right) - rows * (m * left + n * right) > _WORTH

    def curvature(self, inputs: Matrix, outputs: Matrix) -> float:
        """The largest eigenvalue of ``tau P (inputs (x) outputs)``.

        Args:
            inputs: [n, n] or [k, n, n], float64.
            outputs: [m, m] or [k, m, m], float64.

        Returns:
            The eigenvalue, of the worst of a stack.
        """
        return float((_largest(self.right, inputs) * _largest(self.left, outputs)).max())

    def add(self, m: Tensor, g: Gradient, rho: float, factor: float) -> None:
        """M <- rho M + factor tau P g.

        Args:
            m: M, changed in place.
            g: The gradient.
            rho: What M is multiplied with.
            factor: What the rest is multiplied with.
        """
        if isinstance(g, Preconditioned):
            m.mul_(rho).add_(g.value, alpha=factor)
        elif isinstance(g, RowGradient):
            products = iter(g.between(self.left, self.right))
            # M is scaled while the first product is added to it: one pass less over memory.
            leading = next(products, None)
            m.mul_(rho) if leading is None else m.addmm_(*leading, beta=rho, alpha=factor)
            for first, second in products:
                m.addmm_(first, second, alpha=factor)
        elif isinstance(self.right, BlockDiagonal):
            m.mul_(rho).add_(self.left @ g @ self.right, alpha=factor)
        elif g.ndim == 2:
            torch.addmm(m, self.left @ g, self.right, beta=rho, alpha=factor, out=m)
        else:
            torch.baddbmm(m, self.left @ g, self.right, beta=rho, alpha=factor, out=m)

    def add_pull(self, m: Tensor, theta: Tensor, loc: Tensor, factor: float) -> None:
        """M <- M + factor P Lambda (theta - mu).

        Args:
            m: M, changed in place.
            theta: The weights.
            loc: mu.
            factor: What that is multiplied with.
        """
        if self.pull is None:
            m.add_(theta, alpha=factor).sub_(loc, alpha=factor)
        else:
            left, right = self.pull
            m.add_(left @ (theta - loc) @ right, alpha=factor)

    @property
    def has_pull(self) -> bool:
        """Whether P Lambda is another matrix than the identity."""
        return self.pull is not None

    @property
    def pull_strength(self) -> float:
        """The largest eigenvalue of P Lambda, of the worst of a stack."""
        return 1.0 if self.pull is None else float((_radius(self.pull[0]) * _radius(self.pull[1])).max())


def kronecker_preconditioner(
    p: KroneckerPrecision, tau: float, damping: float, dtype: torch.dtype, held: KroneckerPrecision | None = None
) -> Preconditioner:
    """The preconditioner ``tau P``, ``P = (Lambda_held + damping I)^-1``, of a linear map.

    Where P is not the inverse of Lambda the pull of the prior is preconditioned too: P Lambda (theta - mu) in place of
    theta - mu.

    Args:
        p: Lambda.
        tau: What P is multiplied with.
        damping: N alpha^2.
        dtype: That of the result, the model's.
        held: Lambda_held; None: Lambda.

    Returns:
        What multiplies a gradient.
    """
    stiff = p if held is None else held
    left, right, pull, is_own = stiff.output_inverse, stiff.input_inverse, None, held is None
    # ||Lambda^-1|| N alpha^2 bounds what damping changes, relatively; below 1e-9 it is not worth an eigendecomposition,
    # and the two products of every step that its pull takes.
    if damping > 0 and float((_norm(left) * _norm(right)).max()) * damping >= 1e-9:
        sides = (stiff.input, stiff.output)
        total = kronecker_sum(*sides, damping * identity_like(sides[0]), identity_like(sides[1]))
        left, right, is_own = total.output_inverse, total.input_inverse, False
    if not is_own:
        pull = (left @ p.output).to(dtype), (p.input @ right).to(dtype)
    elif _is_diagonal(left) and _is_diagonal(right):
        # As before the first task: what the two products do is one product elementwise.
        return Elementwise((tau * _diagonal(left).unsqueeze(-1) * _diagonal(right).unsqueeze(-2)).to(dtype), None)
    return TwoSided(each(_clean, left).to(dtype), each(_clean, tau * right).to(dtype), pull)


def _width(side: Matrix) -> int:
    """How wide the matrices are that a product with a side takes."""
    return side.width if isinstance(side, BlockDiagonal) else side.shape[-1]


def _largest(first: Matrix | None, second: Matrix) -> Tensor:
    """The largest eigenvalue of a product of two positive semidefinite matrices, for each of a stack, by powers."""
    vector = (second.sum(-1) + _diagonal(second).sqrt() * _uneven(second)).unsqueeze(-1)
    left, length = None if first is None else first.to(second.dtype), torch.zeros_like(vector[..., :1, :])
    for _ in range(_POWERS):
        vector = second @ (vector / vector.norm(dim=-2, keepdim=True).clamp(min=torch.finfo(second.dtype).tiny))
        vector = vector if left is None else left @ vector
        length = vector.norm(dim=-2, keepdim=True)
    return length[..., 0, 0]


def _radius(matrix: Matrix) -> Tensor:
    """The largest eigenvalue of a matrix whose eigenvalues are positive, for each of a stack, by powers."""
    vector = (_uneven(matrix) * (1 + _diagonal(matrix).abs())).unsqueeze(-1)
    for _ in range(_POWERS):
        vector = matrix @ (vector / vector.norm(dim=-2, keepdim=True).clamp(min=torch.finfo(matrix.dtype).tiny))
    return vector.norm(dim=-2)[..., 0]


def _uneven(matrix: Matrix) -> Tensor:
    """Numbers from 1 to 2, one a row: equal ones may be orthogonal to the eigenvector, as they are for two classes."""
    generator = torch.Generator().manual_seed(0)
    numbers = 1 + torch.rand(matrix.shape[-1], generator=generator, dtype=torch.float64, device="cpu")
    return numbers.to(matrix.device, matrix.dtype)


def _norm(matrix: Matrix) -> Tensor:
    """A bound of a symmetric matrix's largest eigenvalue, the largest sum of a row, for each of a stack."""
    return matrix.abs().sum(-1).amax(-1)


def _diagonal(matrix: Matrix) -> Tensor:
    return matrix.diagonal(dim1=-2, dim2=-1)


def _is_diagonal(matrix: Matrix) -> bool:
    parts = matrix.parts if isinstance(matrix, BlockDiagonal) else (matrix,)
    return all(bool((part == torch.diag_embed(_diagonal(part))).all()) for part in parts)


def _clean(inverse: Tensor) -> Tensor:
    """A positive definite matrix without the entries that no rounding can tell from zero.

    Units that hardly ever fire leave entries like 1e-39, and arithmetic on denormal numbers is a hundred times slower.
    """
    scale = _diagonal(inverse).sqrt()
    negligible = inverse.abs() < 1e-20 * scale.unsqueeze(-1) * scale.unsqueeze(-2)
    return inverse.masked_fill(negligible, 0.0)
