"""Laplace-NCL: the posterior mode by trust-region steps, and the Fisher around it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from nclbayes.engines.base import Engine, Outcome, Problem
from nclbayes.engines.curvature import Fisher, add_fishers, task_fisher
from nclbayes.engines.likelihood import BlockLikelihood
from nclbayes.engines.loop import Stepper, run_loop
from nclbayes.engines.stability import StableRate
from nclbayes.engines.steps import hold, steps_of, take_step
from nclbayes.fisher import FisherKind
from nclbayes.gaussians import State
from nclbayes.kronecker import SumRule
from nclbayes.storage import under


@dataclass(frozen=True, kw_only=True)
class TrustRegion(Engine):
    """What Laplace-NCL and its relatives share: trust-region steps to the mode, then a Fisher there.

    Defaults are the paper's: steps of constant size, as stiff as the prior is wide.
    """

    can_stiffen: ClassVar[bool] = True
    can_stream: ClassVar[bool] = True

    kronecker_sum: SumRule | str = SumRule.ADDITIVE

    def run(self, problem: Problem) -> Outcome:
        """Find the mode of the task's posterior, then add the Fisher there to the precision.

        Args:
            problem: The task, and the Gaussians before it.

        Returns:
            The Gaussians after it.
        """
        stepper = self.begun(problem)
        history = run_loop(stepper, self, problem)
        fishers, fit = task_fisher(self, problem, stepper.values())
        after, memory = self.ended(problem, stepper, fishers)
        is_bayes = self.has_evidence and problem.task.is_bayes
        evidence = _log_evidence(fit, problem.states, after) if is_bayes else None
        return Outcome(after, history, evidence, memory, stepper.least_rate)

    def begun(self, problem: Problem) -> LaplaceStepper:
        """What takes the steps of a task.

        Args:
            problem: The task, and the Gaussians before it.

        Returns:
            The stepper, at the start.
        """
        return LaplaceStepper(self, problem)

    def ended(
        self, problem: Problem, stepper: Stepper, fishers: Mapping[str, Fisher]
    ) -> tuple[dict[str, State], dict[str, Tensor]]:
        """What a task leaves, once its steps have been taken.

        Args:
            problem: The task, and the Gaussians before it.
            stepper: What has taken the steps.
            fishers: The task's Fisher, by block.

        Returns:
            The Gaussians after it, and what to keep in memory besides.
        """
        assert isinstance(stepper, LaplaceStepper)
        return self.absorb(problem, stepper.matrices(), fishers)

    @property
    def has_evidence(self) -> bool:
        """Whether what it approximates is Bayes' rule: otherwise its evidence would be that of something else."""
        is_weighted = self.prior_weight != 1 or self.likelihood_weight != 1 or self.fisher_temperature != 1
        return not is_weighted and self.fisher is not FisherKind.EMPIRICAL

    def absorb(
        self, problem: Problem, theta: Mapping[str, Tensor], fishers: Mapping[str, Fisher]
    ) -> tuple[dict[str, State], dict[str, Tensor]]:
        """What a learnt task leaves.

        Args:
            problem: The task, and the Gaussians before it.
            theta: The learnt weights of each block, as matrices.
            fishers: The task's Fisher there.

        Returns:
            The Gaussians after it, and what to keep in memory besides.
        """
        return add_fishers(problem, theta, fishers, self.kronecker_sum), {}


@dataclass(frozen=True, kw_only=True)
class LaplaceNCL(TrustRegion):
    """Settings of Laplace-NCL.

    For task k it climbs ``log p(D_k | theta) - (lambda/2) (theta - mu)^T Lambda (theta - mu)`` in the direction that a
    trust region of the previous precision gives,

        theta <- theta + lr [ Lambda^-1 grad log p(D_k | theta) - lambda (theta - mu) ],

    with momentum, and then adds the task's Fisher at the mode to Lambda.

    Example:
        >>> from nclbayes import LaplaceNCL
        >>> LaplaceNCL(steps=500).stiffness
        'auto'
    """

    schedule: Callable[[float], float] | str | None = "auto"
    likelihood_weight: float | str = "auto"
    stiffness: float | str | None = "auto"
    enough: float | str | None = "auto"
    fisher_samples: int | str = "auto"


class LaplaceStepper:
    """The steps of Laplace-NCL on one task.

    Args:
        settings: The engine's settings.
        problem: The task, and the Gaussians before it.
    """

    def __init__(self, settings: TrustRegion, problem: Problem) -> None:
        self._settings = settings
        self._blocks = steps_of(settings, problem)
        self._rate = StableRate(settings, problem, self._blocks)
        self._likelihood = BlockLikelihood(problem, self._blocks, settings.batch_size)
        # Views of the blocks' matrices: a step in place moves the weights.
        self._leaves = {}
        for steps in self._blocks:
            for site, value in steps.state.block.unpack(steps.theta).items():
                self._leaves[site] = value.detach().requires_grad_()

    def step(self, batch: tuple[object, ...], lr: float) -> float:
        """Take one step on one batch.

        Args:
            batch: The batch.
            lr: The learning rate.

        Returns:
            The mean negative log likelihood before the step.
        """
        rate = self._rate.allowed(lr, batch, self.values())
        value, gradient, examples = self._likelihood(batch, self._leaves)
        take_step(self._blocks, gradient, examples, rate, self._settings)
        return -value / examples

    def tensors(self) -> dict[str, Tensor]:
        """Everything that changes with the steps."""
        found = {f"block.{s.name}.{part}": t for s in self._blocks for part, t in s.tensors().items()}
        return found | self._rate.tensors()

    def restore(self, tensors: Mapping[str, Tensor]) -> None:
        """Take up what :meth:`tensors` gave.

        Args:
            tensors: Its result.
        """
        for steps in self._blocks:
            steps.restore(under(tensors, f"block.{steps.name}."))
        self._rate.restore(tensors)

    def hold(self, stiffness: float) -> None:
        """Hold earlier tasks so firmly from now on.

        Args:
            stiffness: How many times more slowly than a free direction the mean one is learnt.
        """
        hold(self._blocks, stiffness)

    @property
    def least_rate(self) -> float:
        """The least learning rate that the task's curvature allowed."""
        return self._rate.least

    def matrices(self) -> dict[str, Tensor]:
        """The present theta of each block."""
        return {steps.name: steps.theta for steps in self._blocks}

    def values(self) -> dict[str, Tensor]:
        """The present weights, by site."""
        return {site: leaf.detach() for site, leaf in self._leaves.items()}


def _log_evidence(fit: float, before: dict[str, State], after: dict[str, State]) -> float:
    """Log p(D_k | theta) + log q_{k-1}(theta) + (d/2) log 2 pi - 1/2 log|Lambda_k|, at the mode theta."""
    total = fit
    for name, state in after.items():
        prior = before[name]
        total += (prior.logdet - state.logdet - prior.quadratic(state.loc - prior.loc)) / 2
    return total
