"""Online variational Bayes, a mini-batch at a time: the posterior of a step is the prior of the next one."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import ClassVar

import torch
from torch import Tensor

from nclbayes.engines.base import Problem
from nclbayes.errors import SettingError
from nclbayes.gaussians import State
from nclbayes.methods.sampling import SamplingEngine, SamplingStepper


@dataclass(frozen=True, kw_only=True)
class OnlineEngine(SamplingEngine):
    """Settings of the methods to which each mini-batch is a task of its own.

    Each example counts once each time that it comes. Neither the number of tasks nor their sizes enter: an update, or a
    segment of a stream, goes on where the last one ended.

    Attributes:
        lr: eta, of the means only; 1 is the equation itself.
        momentum: There is none.
        particles: Samples of the weights for each step.
    """

    has_prior: ClassVar[bool] = False
    lr: float = 1.0
    momentum: float = 0.0
    particles: int = 10

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.momentum:
            raise SettingError(f"{type(self).__name__} has no momentum: leave it at 0.")

    @abstractmethod
    def moved(self, state: State, is_trained: bool) -> Move:
        """What moves a block's Gaussian.

        Args:
            state: The Gaussian before the task.
            is_trained: Whether a task has touched it before.

        Returns:
            What moves it, at the start.
        """

    def begun(self, problem: Problem) -> OnlineStepper:
        """What takes the steps of a task.

        Args:
            problem: The task, and the Gaussians before it.

        Returns:
            The stepper, at the start.
        """
        return OnlineStepper(self, problem)


class Move(ABC):
    """What moves the Gaussian of one block from step to step."""

    @abstractmethod
    def spread(self, noise: Tensor) -> Tensor:
        """How far a sample that is made of a noise lies from the mean."""

    @abstractmethod
    def gather(self, noise: Tensor, gradient: Tensor) -> None:
        """Take a sample's noise, and the gradient of the loss there, times its weight in the mean over samples."""

    @abstractmethod
    def step(self, mu: Tensor, lr: float) -> None:
        """Move the mean, in place, and the covariance by what was gathered, and gather anew."""

    @abstractmethod
    def state(self, mu: Tensor) -> State:
        """The Gaussian around a mean."""

    @abstractmethod
    def tensors(self) -> dict[str, Tensor]:
        """What the steps change in place, besides the mean."""


class OnlineStepper(SamplingStepper):
    """The steps of online variational Bayes.

    Args:
        engine: The settings.
        problem: The task, and the Gaussians before it.
    """

    def __init__(self, engine: OnlineEngine, problem: Problem) -> None:
        super().__init__(problem)
        self._engine = engine
        self._moves = self._anew()

    def step(self, batch: tuple[object, ...], lr: float) -> float:
        """Take one step on one batch.

        Args:
            batch: The batch.
            lr: eta.

        Returns:
            The mean negative log likelihood at the samples.
        """
        particles, fit = self._engine.particles, 0.0
        weight = float(self._engine.likelihood_weight) / particles
        for sample in self.samples(batch, particles, lambda name, eps: self._moves[name].spread(eps)):
            fit += sample.value / (particles * sample.examples)
            for name, g in sample.gradient.items():
                self._moves[name].gather(sample.noise[name], -weight * g)
        for name, mu in self.mu.items():
            self._moves[name].step(mu, lr)
        return -fit

    def posterior(self) -> dict[str, State]:
        """The Gaussians of the last step."""
        return {name: self._moves[name].state(mu.clone()) for name, mu in self.mu.items()}

    def parts(self) -> Mapping[str, Mapping[str, Tensor]]:
        """The covariances."""
        return {f"block/{name}": move.tensors() for name, move in self._moves.items()}

    def restore(self, tensors: Mapping[str, Tensor]) -> None:
        """Take up what :meth:`tensors` gave; what was gathered of a step that failed is forgotten.

        Args:
            tensors: Its result.
        """
        self._moves = self._anew()
        super().restore(tensors)

    def _anew(self) -> dict[str, Move]:
        problem = self.problem
        return {name: self._engine.moved(state, name in problem.trained) for name, state in problem.states.items()}


class DiagonalMove(Move):
    """The fixed-point step of independent normals.

    Args:
        state: The normals before the task.
        sigma: The standard deviations that it begins with, of the block's shape.
    """

    def __init__(self, state: State, sigma: Tensor) -> None:
        self._state = state
        self._log_sigma = sigma.log().to(state.loc)
        self._total, self._with_noise = torch.zeros_like(state.loc), torch.zeros_like(state.loc)

    def spread(self, noise: Tensor) -> Tensor:
        """Sigma eps."""
        return self._log_sigma.exp() * noise

    def gather(self, noise: Tensor, gradient: Tensor) -> None:
        """Add to E[g] and E[g eps]."""
        self._total.add_(gradient)
        self._with_noise.addcmul_(gradient, noise)

    def step(self, mu: Tensor, lr: float) -> None:
        """Mu <- mu - eta sigma^2 E[g], sigma <- sigma (sqrt(1 + k^2) - k), k = sigma E[g eps] / 2."""
        sigma = self._log_sigma.exp()
        mu.sub_(sigma.square() * self._total, alpha=lr)
        # sqrt(1 + k^2) - k = exp(-asinh k), which stays positive however large k is.
        self._log_sigma.sub_(torch.asinh(sigma * self._with_noise / 2))
        self._total.zero_()
        self._with_noise.zero_()

    def state(self, mu: Tensor) -> State:
        """The normals around a mean."""
        return replace(self._state, loc=mu, precision=(-2 * self._log_sigma.double()).exp())

    def tensors(self) -> dict[str, Tensor]:
        """The log standard deviations."""
        return {"log_sigma": self._log_sigma}
