"""The natural-gradient step that both engines take on a block's mean."""

from __future__ import annotations

import math
from collections.abc import Mapping

import torch
from torch import Tensor

from nclbayes.engines.gradients import Gradient, RowGradient
from nclbayes.engines.settings import EngineSettings
from nclbayes.kronecker import kronecker_sum
from nclbayes.state import DiagonalState, State

# Rows must save so many multiplications of a step to be worth the watching that finds them.
_WORTH = 2e7


class BlockSteps:
    """Iterate, momentum and preconditioner of one block on one task.

    In summed units a step on the bracket ``Lambda^-1 grad log p - lambda (theta - mu)`` is ``lr tau / N``, with
    tau = (det Lambda_0)^(1/d) of the block's first prior: in directions that no task has constrained, that is plain
    SGD on the mean loss with learning rate `lr`. The preconditioner is constant within a task, so momentum is kept
    after it.

    Args:
        settings: The engine's settings.
        state: The block's Gaussian before the task, N(mu, Lambda^-1).
        start: Where theta starts, [m, n].
        size: N.
    """

    def __init__(self, settings: EngineSettings, state: State, start: Tensor, size: int) -> None:
        self.state = state
        self.theta = start.clone()
        self._rho = settings.momentum
        tau = math.exp(state.log_scale)
        self._pull = settings.prior_weight * tau / size
        self._momentum = torch.zeros_like(self.theta)
        dtype = state.loc.dtype
        damped = _damped_inverse(state, size * settings.preconditioner_damping**2)
        self._left: Tensor | None = None
        # Where damping matters, the pull is preconditioned too: P Lambda in place of the identity.
        self._pulls: tuple[Tensor | None, Tensor] | None = None
        if isinstance(state, DiagonalState):
            assert isinstance(damped, Tensor)
            self._right = (tau * damped).to(dtype)
            self._pulls = None, (damped * state.precision).to(dtype)
        else:
            p = state.precision
            right, left = p.input_inverse, p.output_inverse
            if damped is not None:
                right, left = damped
                self._pulls = (left @ p.output).to(dtype), (p.input @ right).to(dtype)
            if _is_diagonal(left) and _is_diagonal(right):
                # As before the first task: what the two products do is one product elementwise.
                self._right = (tau * _diagonal(left).unsqueeze(-1) * _diagonal(right).unsqueeze(-2)).to(dtype)
            else:
                self._left, self._right = _clean(left).to(dtype), _clean(tau * right).to(dtype)

    @property
    def name(self) -> str:
        """The block's name."""
        return self.state.block.name

    def tensors(self) -> dict[str, Tensor]:
        """Iterate and momentum."""
        return {"theta": self.theta, "momentum": self._momentum}

    def restore(self, tensors: Mapping[str, Tensor]) -> None:
        """Take up what :meth:`tensors` gave.

        Args:
            tensors: Its result.
        """
        self.theta.copy_(tensors["theta"])
        self._momentum.copy_(tensors["momentum"])

    def prefers_rows(self, rows: float) -> bool:
        """Whether a gradient is better left as its rows.

        Args:
            rows: How many there are.

        Returns:
            Whether multiplying them by the two sides saves work worth the name.
        """
        if self._left is None or self.theta.ndim != 2:
            return False
        m, n = self.theta.shape
        return m * n * (m + n) - rows * (m * m + n * n) > _WORTH

    def direction(self, gradient: Gradient, examples: int) -> Tensor:
        """Advance the momentum: M <- rho M - (tau / B) G^-1 g A^-1 + lambda (tau / N) (theta - mu).

        With damping, P = (Lambda + N alpha^2 I)^-1 takes the place of Lambda^-1, and P Lambda (theta - mu) that of
        theta - mu.

        Args:
            gradient: The gradient g of a batch's log likelihood.
            examples: B.

        Returns:
            M itself, not a copy; a step is ``theta - lr M``.
        """
        m = self._momentum
        self._add_preconditioned(gradient, -1 / examples)
        if self._pull == 0:
            return m
        if self._pulls is None:
            return m.add_(self.theta, alpha=self._pull).sub_(self.state.loc, alpha=self._pull)
        (left, right), delta = self._pulls, self.theta - self.state.loc
        return m.add_(delta * right if left is None else left @ delta @ right, alpha=self._pull)

    def _add_preconditioned(self, g: Gradient, factor: float) -> None:
        """M <- rho M + factor tau G^-1 g A^-1."""
        m, left, right = self._momentum, self._left, self._right
        if isinstance(g, RowGradient):
            m.mul_(self._rho)
            if left is not None:
                for first, second in g.between(left, right):
                    m.addmm_(first, second, alpha=factor)
        elif left is None:
            m.mul_(self._rho).addcmul_(g, right, value=factor)
        elif g.ndim == 2:
            torch.addmm(m, left @ g, right, beta=self._rho, alpha=factor, out=m)
        else:
            torch.baddbmm(m, left @ g, right, beta=self._rho, alpha=factor, out=m)


def take_step(
    blocks: list[BlockSteps], gradient: Mapping[str, Gradient], examples: int, lr: float, settings: EngineSettings
) -> None:
    """Theta <- theta - lr M in every block, scaled back to the trust radius if there is one.

    Args:
        blocks: The blocks.
        gradient: The gradient of a batch's log likelihood, by block.
        examples: B.
        lr: The learning rate.
        settings: The engine's settings.
    """
    directions = [steps.direction(gradient[steps.name], examples) for steps in blocks]
    if settings.trust_radius is not None:
        length = sum(steps.state.quadratic(lr * m) for steps, m in zip(blocks, directions, strict=True)) / 2
        lr *= min(1.0, settings.trust_radius / math.sqrt(length)) if length > 0 else 1.0
    for steps, m in zip(blocks, directions, strict=True):
        steps.theta.add_(m, alpha=-lr)


def _diagonal(matrix: Tensor) -> Tensor:
    return matrix.diagonal(dim1=-2, dim2=-1)


def _is_diagonal(matrix: Tensor) -> bool:
    return bool((matrix == torch.diag_embed(_diagonal(matrix))).all())


def _clean(inverse: Tensor) -> Tensor:
    """A positive definite matrix without the entries that no rounding can tell from zero.

    Units that hardly ever fire leave entries like 1e-39, and arithmetic on denormal numbers is a hundred times slower.
    """
    scale = _diagonal(inverse).sqrt()
    negligible = inverse.abs() < 1e-20 * scale.unsqueeze(-1) * scale.unsqueeze(-2)
    return inverse.masked_fill(negligible, 0.0)


def _damped_inverse(state: State, damping: float) -> Tensor | tuple[Tensor, Tensor] | None:
    """(Lambda + N alpha^2 I)^-1: a diagonal, or the factors of its two sides, or None where damping changes nothing."""
    if isinstance(state, DiagonalState):
        return 1 / (state.precision + damping)
    p = state.precision
    # ||Lambda^-1|| N alpha^2 bounds what damping changes, relatively; below 1e-9 it is not worth an eigendecomposition.
    traces = [_diagonal(m).sum(-1) for m in (p.input_inverse, p.output_inverse)]
    if damping == 0 or float((traces[0] * traces[1]).max()) * damping < 1e-9:
        return None
    identities = [torch.eye(m.shape[-1], dtype=m.dtype, device=m.device).expand_as(m) for m in (p.input, p.output)]
    total = kronecker_sum(p.input, p.output, damping * identities[0], identities[1])
    return total.input_inverse, total.output_inverse
