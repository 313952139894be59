"""IVON with the previous posterior as its prior."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import ClassVar

import torch
from torch import Tensor

from nclbayes.engines.base import Problem
from nclbayes.gaussians import State, Structure
from nclbayes.methods.sampling import SamplingEngine, SamplingStepper


@dataclass(frozen=True, kw_only=True)
class IVON(SamplingEngine):
    """The improved variational online Newton method (Shen et al. 2024), under any prior of independent normals.

    With the prior N(mu_0, 1/s_0), N examples, ``delta = lambda s_0 / N`` and samples ``theta = m + sigma eps``,
    ``sigma^2 = lambda / (N (h + delta))``, a step takes the mean g of the gradients of the mean loss,

        f <- mean of g (theta - m) / sigma^2
        v <- beta_1 v + (1 - beta_1) g
        h <- beta_2 h + (1 - beta_2) f + (1 - beta_2)^2 (h - f)^2 / (2 (h + delta))
        m <- m - lr (h_0 + tau / N) clip[ (v / (1 - beta_1^t) + delta (m - mu_0)) / (h + delta) ].

    What it leaves is N(m, sigma^2), which is the prior of the next task. Under the model's own prior, of mean 0 and one
    scale, this is the published method; its authors use it for single tasks. h begins anew with each task, at h_0. In a
    stream N is the segment's size, of which the settings of the stream tell.

    Attributes:
        lr: The learning rate; with `rescale_lr` that of plain SGD at the start.
        momentum: beta_1.
        second_momentum: beta_2. The published default moves h by a thousandth of its way in a hundred steps, which is
            for long training; a task of some hundred steps needs less, as what is left of h_0 counts as precision.
        prior_weight: lambda.
        particles: Samples of the weights for each step.
        hess_init: h_0, where h begins: the curvature of the mean loss that is expected.
        clip_radius: The largest absolute value of each number in the brackets; None: any.
        debias: Whether the momentum is divided by ``1 - beta_1^t``.
        rescale_lr: Whether the learning rate is multiplied with ``h_0 + tau / N``, tau the precision of a block's first
            prior.

    Example:
        >>> from nclbayes.methods import IVON
        >>> IVON(second_momentum=0.999).hess_init
        1.0
    """

    structure: ClassVar[Structure] = Structure.DIAGONAL
    can_stream: ClassVar[bool] = True
    lr: float = 0.1
    second_momentum: float = 0.99999
    hess_init: float = 1.0
    clip_radius: float | None = None
    debias: bool = True
    rescale_lr: bool = True

    def __post_init__(self) -> None:
        super().__post_init__()
        self._require("second_momentum", lambda v: 0 <= v < 1, "at least 0 and below 1")
        self._require("hess_init", lambda v: v > 0, "positive")
        self._require("clip_radius", lambda v: v > 0, "positive, or None")
        self._require("prior_weight", lambda v: v > 0, "positive")

    def begun(self, problem: Problem) -> IVONStepper:
        """What takes the steps of a task.

        Args:
            problem: The task, and the normals before it.

        Returns:
            The stepper, at the start.
        """
        return IVONStepper(self, problem)


class IVONStepper(SamplingStepper):
    """The steps of IVON.

    Args:
        engine: The settings.
        problem: The task, and the normals before it.
    """

    def __init__(self, engine: IVON, problem: Problem) -> None:
        super().__init__(problem)
        self._engine = engine
        # The effective sample size, N / lambda.
        self._size = problem.size / engine.prior_weight
        self._delta = {name: (state.precision / self._size).to(state.loc) for name, state in problem.states.items()}
        self._h = {name: torch.full_like(mu, engine.hess_init) for name, mu in self.mu.items()}
        self._momentum = {name: torch.zeros_like(mu) for name, mu in self.mu.items()}
        self._taken = torch.zeros((), dtype=torch.int64, device="cpu")

    def step(self, batch: tuple[object, ...], lr: float) -> float:
        """Take one step on one batch.

        Args:
            batch: The batch.
            lr: The learning rate.

        Returns:
            The mean negative log likelihood at the samples.
        """
        engine, fit = self._engine, 0.0
        sigma = {name: (self._size * (h + self._delta[name])).rsqrt() for name, h in self._h.items()}
        gradient = {name: torch.zeros_like(mu) for name, mu in self.mu.items()}
        with_noise = {name: torch.zeros_like(mu) for name, mu in self.mu.items()}
        for sample in self.samples(batch, engine.particles, lambda name, eps: sigma[name] * eps):
            weight = 1 / (engine.particles * sample.examples)
            fit += weight * sample.value
            for name, g in sample.gradient.items():
                gradient[name].sub_(g, alpha=weight)
                with_noise[name].addcmul_(g, sample.noise[name], value=-weight)
        self._taken += 1
        beta, beta_2 = engine.momentum, engine.second_momentum
        bias = 1 - beta ** int(self._taken) if engine.debias else 1.0
        for name, mu in self.mu.items():
            state, h, delta = self.problem.states[name], self._h[name], self._delta[name]
            f = with_noise[name] / sigma[name]
            away, free = f - h, h + delta
            h.add_((1 - beta_2) * away + 0.5 * (1 - beta_2) ** 2 * away.square() / free)
            self._momentum[name].mul_(beta).add_(gradient[name], alpha=1 - beta)
            direction = (self._momentum[name] / bias + delta * (mu - state.loc)) / (h + delta)
            if engine.clip_radius is not None:
                direction = direction.clamp(-engine.clip_radius, engine.clip_radius)
            scale = engine.hess_init + math.exp(state.log_scale) / self._size if engine.rescale_lr else 1.0
            mu.sub_(direction, alpha=lr * scale)
        return -fit

    def posterior(self) -> dict[str, State]:
        """The normals of the last step, ``N(m, 1 / (N (h + delta)))``."""
        found: dict[str, State] = {}
        for name, state in self.problem.states.items():
            precision = self._size * (self._h[name] + self._delta[name]).double()
            found[name] = replace(state, loc=self.mu[name].clone(), precision=precision)
        return found

    def parts(self) -> Mapping[str, Mapping[str, Tensor]]:
        """Curvature and momentum, and the number of steps."""
        return {"h": self._h, "momentum": self._momentum, "steps": {"taken": self._taken}}
