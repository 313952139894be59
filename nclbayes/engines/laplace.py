"""Laplace-NCL: the posterior mode by trust-region steps, and the Fisher around it."""

from __future__ import annotations

import math
import time
from dataclasses import dataclass

import torch
from torch import Tensor

from nclbayes.engines.base import Engine, Outcome, Problem
from nclbayes.engines.likelihood import LogLikelihood, log_likelihood
from nclbayes.engines.loop import run_loop
from nclbayes.fisher import FisherAccumulator
from nclbayes.kronecker import KroneckerSum, SumRule, kronecker_sum
from nclbayes.state import DiagonalState, State
from nclbayes.task import to_device


@dataclass(frozen=True, kw_only=True)
class LaplaceNCL(Engine):
    """Settings of Laplace-NCL.

    For task k it climbs ``log p(D_k | theta) - (lambda/2) (theta - mu)^T Lambda (theta - mu)`` in the direction that a
    trust region of the previous precision gives,

        theta <- theta + lr [ Lambda^-1 grad log p(D_k | theta) - lambda (theta - mu) ],

    with momentum, and then adds the task's Fisher at the mode to Lambda.

    Example:
        >>> from nclbayes import LaplaceNCL
        >>> LaplaceNCL(steps=500).kronecker_sum.value
        'kl'
    """

    def run(self, problem: Problem) -> Outcome:
        """Find the mode of the task's posterior, then add the Fisher there to the precision.

        Args:
            problem: The task, and the Gaussians before it.

        Returns:
            The Gaussians after it.
        """
        started = time.perf_counter()
        task, states = problem.task, problem.states
        likelihood = LogLikelihood(problem.model, task.context, problem.fixed)
        stepper = LaplaceStepper(self, likelihood, states, problem.start, task.size)
        history = run_loop(
            stepper,
            task,
            self,
            problem.device,
            problem.generator,
            progress=problem.progress,
            callbacks=problem.callbacks,
        )
        theta = stepper.matrices()
        accumulator = FisherAccumulator(
            problem.model,
            problem.fixed | stepper.values(),
            kind=self.fisher,
            samples=self.fisher_samples,
            temperature=self.fisher_temperature,
            context=task.context,
            generator=problem.generator,
        )
        fit = 0.0
        for batch in task.epoch(self.batch_size, problem.generator, self.fisher_size):
            run = accumulator.update(to_device(batch, problem.device))
            fit += float(log_likelihood(run.observed).detach())
        fisher = accumulator.factors(task.size)
        after: dict[str, State] = {}
        for name, state in states.items():
            if name in fisher:
                after[name] = state.add(theta[name], fisher[name], SumRule(self.kronecker_sum))  # type: ignore[arg-type]
        return Outcome(
            states=after,
            history=history,
            seconds=time.perf_counter() - started,
            log_evidence=_log_evidence(fit * task.size / accumulator.examples, states, after),
            kl_of_sums={
                name: float(state.precision.kl.sum())
                for name, state in after.items()
                if isinstance(state.precision, KroneckerSum)
            },
        )


class LaplaceStepper:
    """The steps of Laplace-NCL on one task.

    In summed units a block's step on the bracket above is ``lr tau / N``, tau = (det Lambda_0)^(1/d) of its first
    prior: in directions that no task has constrained, that is plain SGD on the mean loss with learning rate `lr`.

    Args:
        settings: The engine's settings.
        likelihood: The task's log likelihood, with its gradient.
        states: The blocks' Gaussians before the task.
        start: Where to start, a matrix for each block.
        size: N.
    """

    def __init__(
        self,
        settings: LaplaceNCL,
        likelihood: LogLikelihood,
        states: dict[str, State],
        start: dict[str, Tensor],
        size: int,
    ) -> None:
        self._likelihood = likelihood
        self._settings = settings
        self._blocks = [_BlockSteps(settings, state, start[name], size) for name, state in states.items()]
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
        value, gradient, examples = self._likelihood(batch, self._leaves)
        deltas = [steps.direction(gradient, examples).mul_(-lr) for steps in self._blocks]
        if self._settings.trust_radius is not None:
            length = sum(steps.state.quadratic(d) for steps, d in zip(self._blocks, deltas, strict=True)) / 2
            shrink = min(1.0, self._settings.trust_radius / math.sqrt(length)) if length > 0 else 1.0
            deltas = [delta.mul_(shrink) for delta in deltas]
        for steps, delta in zip(self._blocks, deltas, strict=True):
            steps.theta.add_(delta)
        return -value / examples

    def matrices(self) -> dict[str, Tensor]:
        """The present theta of each block."""
        return {steps.state.block.name: steps.theta for steps in self._blocks}

    def values(self) -> dict[str, Tensor]:
        """The present weights, by site."""
        return {site: leaf.detach() for site, leaf in self._leaves.items()}


class _BlockSteps:
    """Momentum, preconditioner and iterate of one block."""

    def __init__(self, settings: LaplaceNCL, state: State, start: Tensor, size: int) -> None:
        self.state = state
        self.theta = start.clone()
        self._rho = settings.momentum
        tau = math.exp(state.log_scale)
        self._pull = settings.prior_weight * tau / size
        self._momentum = torch.zeros_like(self.theta)
        damped = _damped(state, size * settings.alpha**2)
        dtype = state.loc.dtype
        if isinstance(damped, Tensor):
            self._left, self._right = None, (tau / damped).to(dtype)
        else:
            self._left, self._right = damped[1].to(dtype), (tau * damped[0]).to(dtype)

    def direction(self, gradient: dict[str, Tensor], examples: int) -> Tensor:
        """M <- rho M - (tau / B) G^-1 g A^-1 + lambda (tau / N) (theta - mu); returns a copy of M."""
        g = self.state.block.pack(gradient)
        natural = g * self._right if self._left is None else self._left @ g @ self._right
        self._momentum.mul_(self._rho).add_(natural, alpha=-1 / examples)
        self._momentum.add_(self.theta - self.state.loc, alpha=self._pull)
        return self._momentum.clone()


def _log_evidence(fit: float, before: dict[str, State], after: dict[str, State]) -> float:
    """Log p(D_k | theta) + log q_{k-1}(theta) + (d/2) log 2 pi - 1/2 log|Lambda_k|, at the mode theta."""
    total = fit
    for name, state in after.items():
        prior = before[name]
        total += (prior.logdet - state.logdet - prior.quadratic(state.loc - prior.loc)) / 2
    return total


def _damped(state: State, damping: float) -> Tensor | tuple[Tensor, Tensor]:
    """(Lambda + N alpha^2 I): a diagonal, or the inverses of its two factors."""
    if isinstance(state, DiagonalState):
        return state.precision + damping
    p = state.precision
    # ||Lambda^-1|| N alpha^2 bounds what damping changes, relatively; below 1e-9 it is not worth an eigendecomposition.
    traces = [m.diagonal(dim1=-2, dim2=-1).sum(-1) for m in (p.input_inverse, p.output_inverse)]
    if damping == 0 or float((traces[0] * traces[1]).max()) * damping < 1e-9:
        return p.input_inverse, p.output_inverse
    identities = [torch.eye(m.shape[-1], dtype=m.dtype, device=m.device).expand_as(m) for m in (p.input, p.output)]
    total = kronecker_sum(p.input, p.output, damping * identities[0], identities[1])
    return total.input_inverse, total.output_inverse
