"""Bayesian gradient descent: online variational Bayes with independent weights, one mini-batch at a time."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import ClassVar

import torch
from torch import Tensor

from nclbayes.engines.base import Problem
from nclbayes.errors import SettingError
from nclbayes.gaussians import State, Structure
from nclbayes.methods.sampling import SamplingEngine, SamplingStepper


@dataclass(frozen=True, kw_only=True)
class BGD(SamplingEngine):
    """Bayesian gradient descent (Zeno, Golan, Hoffer and Soudry 2018), which knows no tasks.

    Each mini-batch is a task of its own: the posterior of a step is the prior of the next one. With L the negative log
    likelihood of the mini-batch, summed over its examples, and samples ``theta = mu + sigma eps``,

        mu    <- mu - eta sigma^2 E[dL/dtheta]
        sigma <- sigma sqrt(1 + k^2) - sigma k,   k = sigma E[dL/dtheta eps] / 2.

    Each example counts once each time that it comes. Neither the number of tasks nor their sizes enter: an update, or a
    segment of a stream, goes on where the last one ended.

    Attributes:
        lr: eta, of the means only; 1 is the equation itself.
        momentum: There is none.
        particles: Samples of the weights for each step.
        init_scale: The largest sigma at the first step of a block's first task; a narrower prior's is kept.

    Example:
        >>> from nclbayes.methods import BGD
        >>> BGD(init_scale=0.03).particles
        10
    """

    structure: ClassVar[Structure] = Structure.DIAGONAL
    can_stream: ClassVar[bool] = True
    has_prior: ClassVar[bool] = False
    lr: float = 1.0
    momentum: float = 0.0
    particles: int = 10
    init_scale: float = 0.05

    def __post_init__(self) -> None:
        super().__post_init__()
        self._require("init_scale", lambda v: 1e-100 <= v <= 1e100, "positive, from 1e-100 to 1e100")
        if self.momentum:
            raise SettingError(f"{type(self).__name__} has no momentum: leave it at 0.")

    def begun(self, problem: Problem) -> BGDStepper:
        """What takes the steps of a task.

        Args:
            problem: The task, and the normals before it.

        Returns:
            The stepper, at the start.
        """
        return BGDStepper(self, problem)


class BGDStepper(SamplingStepper):
    """The steps of Bayesian gradient descent.

    Args:
        engine: The settings.
        problem: The task, and the normals before it.
    """

    def __init__(self, engine: BGD, problem: Problem) -> None:
        super().__init__(problem)
        self._engine = engine
        self._log_sigma = {
            name: first_scale(state, engine.init_scale, name in problem.trained).log().to(state.loc)
            for name, state in problem.states.items()
        }

    def step(self, batch: tuple[object, ...], lr: float) -> float:
        """Take one step on one batch.

        Args:
            batch: The batch.
            lr: eta.

        Returns:
            The mean negative log likelihood at the samples.
        """
        sigma = {name: log_sigma.exp() for name, log_sigma in self._log_sigma.items()}
        total = {name: torch.zeros_like(mu) for name, mu in self.mu.items()}
        with_noise = {name: torch.zeros_like(mu) for name, mu in self.mu.items()}
        particles, fit = self._engine.particles, 0.0
        weight = float(self._engine.likelihood_weight) / particles
        for sample in self.samples(batch, particles, lambda name, eps: sigma[name] * eps):
            fit += sample.value / (particles * sample.examples)
            for name, g in sample.gradient.items():
                total[name].sub_(g, alpha=weight)
                with_noise[name].addcmul_(g, sample.noise[name], value=-weight)
        for name, mu in self.mu.items():
            mu.sub_(sigma[name].square() * total[name], alpha=lr)
            # sqrt(1 + k^2) - k = exp(-asinh k), which stays positive however large k is.
            self._log_sigma[name].sub_(torch.asinh(sigma[name] * with_noise[name] / 2))
        return -fit

    def posterior(self) -> dict[str, State]:
        """The normals of the last step."""
        return {
            name: replace(state, loc=self.mu[name].clone(), precision=(-2 * self._log_sigma[name].double()).exp())
            for name, state in self.problem.states.items()
        }

    def parts(self) -> Mapping[str, Mapping[str, Tensor]]:
        """The log standard deviations."""
        return {"log_sigma": self._log_sigma}


def first_scale(state: State, largest: float, is_trained: bool) -> Tensor:
    """The standard deviations that a task begins with.

    Args:
        state: Independent normals.
        largest: Of the first task that touches them, the largest standard deviation.
        is_trained: Whether a task has touched them before.

    Returns:
        Of the block's shape, float64.
    """
    sigma: Tensor = state.precision.rsqrt()
    return sigma if is_trained else sigma.clamp(max=largest)
