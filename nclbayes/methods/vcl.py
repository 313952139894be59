"""Variational continual learning with independent weights."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import ClassVar

import torch
from torch import Tensor

from nclbayes.engines.base import Outcome, Problem
from nclbayes.engines.likelihood import LogLikelihood
from nclbayes.engines.loop import run_loop
from nclbayes.gaussians import State, Structure
from nclbayes.methods.adam import AdamEngine


@dataclass(frozen=True, kw_only=True)
class VCL(AdamEngine):
    """Mean-field variational continual learning (Nguyen et al. 2018).

    For task k Adam maximises ``E_q[log p(D_k | theta)] - lambda KL(q || q_{k-1})`` over the means and log standard
    deviations of independent normals, with reparameterised samples ``theta = mu + sigma eps``.

    Attributes:
        particles: Samples of the weights for each step.
        init_scale: The largest sigma at the first step of a block's first task; a narrower prior's is kept.

    Example:
        >>> from nclbayes.methods import VCL
        >>> VCL(particles=4).init_scale
        0.01
    """

    structure: ClassVar[Structure] = Structure.DIAGONAL
    needs_fisher: ClassVar[bool] = False
    particles: int = 1
    init_scale: float = 0.01

    def __post_init__(self) -> None:
        super().__post_init__()
        self._require_whole("particles")
        self._require("init_scale", lambda v: v > 0, "positive")

    def run(self, problem: Problem) -> Outcome:
        """Learn a task.

        Args:
            problem: The task, and the normals before it.

        Returns:
            The normals after it.
        """
        stepper = MeanFieldStepper(self, problem)
        history = run_loop(stepper, self, problem)
        return Outcome(stepper.posterior(), history)


class MeanFieldStepper:
    """Adam's steps on means and log standard deviations.

    Args:
        engine: The settings.
        problem: The task, and the normals before it.
    """

    def __init__(self, engine: VCL, problem: Problem) -> None:
        self._engine, self._problem = engine, problem
        self._likelihood = LogLikelihood(problem)
        self._mu: dict[str, Tensor] = {}
        self._log_sigma: dict[str, Tensor] = {}
        self._precision: dict[str, Tensor] = {}
        for name, state in problem.states.items():
            start = problem.start[name]
            self._mu[name] = start.clone().requires_grad_()
            sigma = state.precision.rsqrt().to(start)
            if name not in problem.trained:
                sigma = sigma.clamp(max=engine.init_scale)
            self._log_sigma[name] = sigma.log().requires_grad_()
            self._precision[name] = state.precision.to(start)
        self._adam = torch.optim.Adam(
            [*self._mu.values(), *self._log_sigma.values()],
            lr=engine.lr,
            betas=(float(engine.momentum), float(engine.second_momentum)),
            eps=engine.epsilon,
        )

    def step(self, batch: tuple[object, ...], lr: float) -> float:
        """Take one step on one batch.

        Args:
            batch: The batch.
            lr: The learning rate.

        Returns:
            The mean negative log likelihood at the samples.
        """
        particles, size = self._engine.particles, self._problem.size
        self._start_from_the_kl(self._engine.prior_weight / size)
        fit = 0.0
        for _ in range(particles):
            eps = {name: self._noise(mu) for name, mu in self._mu.items()}
            leaves: dict[str, Tensor] = {}
            for name, mu in self._mu.items():
                theta = (mu + self._log_sigma[name].exp() * eps[name]).detach()
                leaves |= self._problem.states[name].block.unpack(theta)
            leaves = {site: value.requires_grad_() for site, value in leaves.items()}
            value, gradient, examples = self._likelihood(batch, leaves)
            fit += value / (particles * examples)
            for name, mu in self._mu.items():
                g = self._problem.states[name].block.pack(gradient) / -(particles * examples)
                assert mu.grad is not None
                mu.grad += g
                log_sigma = self._log_sigma[name]
                assert log_sigma.grad is not None
                log_sigma.grad += g * eps[name] * log_sigma.detach().exp()
        for group in self._adam.param_groups:
            group["lr"] = lr
        self._adam.step()
        return -fit

    def posterior(self) -> dict[str, State]:
        """The normals of the present means and standard deviations."""
        found: dict[str, State] = {}
        for name, state in self._problem.states.items():
            precision = (-2 * self._log_sigma[name].detach().double()).exp()
            found[name] = replace(state, loc=self._mu[name].detach().clone(), precision=precision)
        return found

    def values(self) -> dict[str, Tensor]:
        """The present means, by site."""
        found: dict[str, Tensor] = {}
        for name, mu in self._mu.items():
            found |= self._problem.states[name].block.unpack(mu.detach())
        return found

    def tensors(self) -> dict[str, Tensor]:
        """Everything that changes with the steps."""
        found: dict[str, Tensor] = {}
        for kind, parameters in (("mu", self._mu), ("log_sigma", self._log_sigma)):
            for name, parameter in parameters.items():
                found[f"{kind}/{name}"] = parameter.detach()
                held = self._adam.state.get(parameter, {})
                found |= {f"{kind}/{name}/{part}": t for part, t in held.items()}
        return found

    def restore(self, tensors: Mapping[str, Tensor]) -> None:
        """Take up what :meth:`tensors` gave.

        Args:
            tensors: Its result.
        """
        for kind, parameters in (("mu", self._mu), ("log_sigma", self._log_sigma)):
            for name, parameter in parameters.items():
                parameter.data.copy_(tensors[f"{kind}/{name}"])
                taken = torch.zeros((), dtype=torch.float32, device="cpu")
                held = {
                    "step": taken,
                    "exp_avg": torch.zeros_like(parameter.data),
                    "exp_avg_sq": torch.zeros_like(parameter.data),
                }
                for part, tensor in held.items():
                    tensor.copy_(tensors[f"{kind}/{name}/{part}"])
                self._adam.state[parameter] = held

    def _start_from_the_kl(self, weight: float) -> None:
        """Gradients of KL(q || q_{k-1}): Lambda (mu - mu_0) and Lambda sigma^2 - 1, times a weight."""
        for name, mu in self._mu.items():
            precision, log_sigma = self._precision[name], self._log_sigma[name]
            mu.grad = weight * precision * (mu.detach() - self._problem.states[name].loc)
            log_sigma.grad = weight * (precision * (2 * log_sigma.detach()).exp() - 1)

    def _noise(self, like: Tensor) -> Tensor:
        generator = self._problem.generator
        eps = torch.randn(like.shape, generator=generator, dtype=like.dtype, device=generator.device)
        return eps.to(like.device)
