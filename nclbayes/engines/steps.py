"""The natural-gradient step that both engines take on a block's mean."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import NamedTuple

import torch
from torch import Tensor

from nclbayes.engines.base import Problem
from nclbayes.engines.settings import EngineSettings, StepRule
from nclbayes.fisher import DiagonalFisher, KroneckerFisher
from nclbayes.gaussians import State
from nclbayes.gaussians.gradients import Gradient, Preconditioned
from nclbayes.gaussians.preconditioners import Elementwise


class Rate(NamedTuple):
    """How large a step is.

    Attributes:
        lr: The learning rate.
        pulls: How many times the previous posterior pulls in it.
    """

    lr: float
    pulls: int = 1


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
        prior: The block's prior, where earlier tasks are to be held by a stiffness; None: each direction is held as
            firmly as the block's own precision says.
    """

    def __init__(
        self, settings: EngineSettings, state: State, start: Tensor, size: float, prior: State | None = None
    ) -> None:
        self.state = state
        self.theta = start.clone()
        self._rho = settings.momentum
        self._tau, self._damping = math.exp(state.log_scale), size * settings.preconditioner_damping**2
        self._pull = settings.prior_weight * self._tau / size
        self._momentum = torch.zeros_like(self.theta)
        # Memory that each step would otherwise have to be given anew.
        self._share: Tensor | None = None
        self._stiffening = None if prior is None else state.stiffening(prior)
        if self._stiffening is None:
            self._precondition(None)

    def hold(self, stiffness: float) -> None:
        """Hold earlier tasks so firmly from now on, where they are held by a stiffness.

        Args:
            stiffness: How many times more slowly than a free direction the mean one is learnt.
        """
        if self._stiffening is not None:
            self._precondition(self._stiffening(stiffness))

    def _precondition(self, held: State | None) -> None:
        self._preconditioner = self.state.preconditioner(self._tau, self._damping, held)
        self._strength: float | None = None

    @property
    def pull(self) -> float:
        """The largest eigenvalue of the pull, lambda (tau / N) P Lambda."""
        if self._strength is None:
            self._strength = self._pull * self._preconditioner.pull_strength if self._pull else 0.0
        return self._strength

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
        """Whether a gradient of so many rows is better left as them."""
        return self._preconditioner.prefers_rows(rows)

    def curvature(self, fisher: KroneckerFisher | DiagonalFisher) -> float:
        """The largest eigenvalue of tau P F, or a bound of it.

        Args:
            fisher: F, the Fisher of one example.

        Returns:
            The bound.
        """
        if isinstance(fisher, KroneckerFisher):
            return self._preconditioner.curvature(fisher.input, fisher.output)
        # Of its off-diagonal nothing is known: the trace is a bound.
        assert isinstance(self._preconditioner, Elementwise)
        return float((self._preconditioner.weights * fisher.diagonal).sum())

    def preconditioned(self, gradient: Gradient) -> Preconditioned:
        """A gradient, or a share of one, times tau P.

        Args:
            gradient: The gradient.

        Returns:
            What a step may be taken with in its place, until this is called again.
        """
        if self._share is None:
            self._share = torch.zeros_like(self.theta)
        self._preconditioner.add(self._share, gradient, 0.0, 1.0)
        return Preconditioned(self._share)

    def direction(self, gradient: Gradient, examples: int, pulls: int = 1) -> Tensor:
        """Advance the momentum: M <- rho M - (tau / B) G^-1 g A^-1 + lambda (tau / N) (theta - mu).

        With damping or a stiffness, another P takes the place of Lambda^-1, and P Lambda (theta - mu) that of
        theta - mu.

        Args:
            gradient: The gradient g of a batch's log likelihood.
            examples: B.
            pulls: How many times the last term is added.

        Returns:
            M itself, not a copy; a step is ``theta - lr M``.
        """
        self._preconditioner.add(self._momentum, gradient, self._rho, -1 / examples)
        if pulls and self._pull:
            self._preconditioner.add_pull(self._momentum, self.theta, self.state.loc, pulls * self._pull)
        return self._momentum


class AdamSteps(BlockSteps):
    """Adam in coordinates that are longer the more firmly a direction is held: ``theta = tau P phi``.

    The gradient there is ``h = tau P (-g / B) + lambda (tau / N) P Lambda (theta - mu)``, and a step of Adam in phi is

        theta <- theta - lr tau P m / (sqrt(v) + eps),

    m and v the averages of h and of its squares. No number of phi moves by more than about `lr`, so that the steps are
    bounded by the precision as those of plain gradients are: a direction that is held s times as firmly as a free one
    moves s times less. Where no task has constrained anything tau P = I, and this is Adam itself.
    """

    _BETA, _EPS = 0.999, 1e-8

    def __init__(
        self, settings: EngineSettings, state: State, start: Tensor, size: float, prior: State | None = None
    ) -> None:
        super().__init__(settings, state, start, size, prior)
        self._squares, self._taken = torch.zeros_like(self.theta), 0

    def tensors(self) -> dict[str, Tensor]:
        """Iterate, momentum, mean squares, and how many steps were taken."""
        taken = torch.tensor(float(self._taken), dtype=torch.float64, device="cpu")
        return super().tensors() | {"squares": self._squares, "taken": taken}

    def restore(self, tensors: Mapping[str, Tensor]) -> None:
        """Take up what :meth:`tensors` gave.

        Args:
            tensors: Its result.
        """
        super().restore(tensors)
        self._squares.copy_(tensors["squares"])
        self._taken = int(tensors["taken"])

    def direction(self, gradient: Gradient, examples: int, pulls: int = 1) -> Tensor:
        """Advance the averages; the step is ``theta - lr`` times what is returned.

        Args:
            gradient: The gradient g of a batch's log likelihood.
            examples: B.
            pulls: How many times the pull is added.

        Returns:
            tau P m / (sqrt(v) + eps), with the averages freed of their start at zero.
        """
        h, step = torch.zeros_like(self.theta), torch.zeros_like(self.theta)
        self._preconditioner.add(h, gradient, 0.0, -1 / examples)
        if pulls and self._pull:
            self._preconditioner.add_pull(h, self.theta, self.state.loc, pulls * self._pull)
        self._taken += 1
        self._momentum.mul_(self._rho).add_(h, alpha=1 - self._rho)
        self._squares.mul_(self._BETA).addcmul_(h, h, value=1 - self._BETA)
        size = (self._squares / (1 - self._BETA**self._taken)).sqrt_().add_(self._EPS)
        self._preconditioner.add(step, self._momentum / size, 0.0, 1 / (1 - self._rho**self._taken))
        return step


def steps_of(settings: EngineSettings, problem: Problem) -> list[BlockSteps]:
    """The steps of every block of a task.

    Args:
        settings: The engine's settings.
        problem: The task, and the Gaussians before it.

    Returns:
        One for each block; those that an earlier task has trained are held as `stiffness` says.
    """
    found = []
    for name, state in problem.states.items():
        prior = problem.priors.get(name) if settings.stiffness is not None else None
        kind = AdamSteps if settings.steps_by is StepRule.ADAM else BlockSteps
        found.append(kind(settings, state, problem.start[name], problem.size, prior))
    hold(found, settings.firmness)
    return found


def hold(blocks: list[BlockSteps], stiffness: float) -> None:
    """Hold earlier tasks so firmly from now on, in every block that is held by a stiffness.

    Args:
        blocks: The blocks.
        stiffness: How many times more slowly than a free direction the mean one is learnt.
    """
    for steps in blocks:
        steps.hold(stiffness)


def take_step(
    blocks: list[BlockSteps],
    gradient: Mapping[str, Gradient],
    examples: int,
    rate: Rate,
    settings: EngineSettings,
) -> None:
    """Theta <- theta - lr M in every block, scaled back to the trust radius if there is one.

    Args:
        blocks: The blocks.
        gradient: The gradient of a batch's log likelihood, by block.
        examples: B.
        rate: How large a step.
        settings: The engine's settings.
    """
    directions, lr = [steps.direction(gradient[steps.name], examples, rate.pulls) for steps in blocks], rate.lr
    if settings.trust_radius is not None:
        length = sum(steps.state.quadratic(lr * m) for steps, m in zip(blocks, directions, strict=True)) / 2
        lr *= min(1.0, settings.trust_radius / math.sqrt(length)) if length > 0 else 1.0
    for steps, m in zip(blocks, directions, strict=True):
        steps.theta.add_(m, alpha=-lr)
