"""Plain training on the current task: what continual learning is measured against."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import ClassVar

import torch
from torch import Tensor

from nclbayes.engines.base import Engine, Outcome, Problem
from nclbayes.engines.curvature import Fisher
from nclbayes.engines.likelihood import LogLikelihood
from nclbayes.engines.loop import Stepper, run_loop
from nclbayes.gaussians import State


@dataclass(frozen=True, kw_only=True)
class PlainTraining(Engine):
    """Stochastic gradient descent with momentum on the current task's mean loss; nothing is done against forgetting.

    The precision of the posterior is left as it was, and nothing pulls towards its mean.

    Example:
        >>> from nclbayes.methods import PlainTraining
        >>> PlainTraining(steps=100, lr=0.1).momentum
        0.9
    """

    needs_fisher: ClassVar[bool] = False
    can_stream: ClassVar[bool] = True
    has_trust_region: ClassVar[bool] = False
    has_prior: ClassVar[bool] = False
    can_fade: ClassVar[bool] = False

    def run(self, problem: Problem) -> Outcome:
        """Train on the task.

        Args:
            problem: The task, and the Gaussians before it.

        Returns:
            The Gaussians with their means moved.
        """
        stepper = self.begun(problem)
        history = run_loop(stepper, self, problem)
        after, _ = self.ended(problem, stepper, {})
        return Outcome(after, history)

    def begun(self, problem: Problem) -> PlainStepper:
        """What takes the steps of a task.

        Args:
            problem: The task, and the Gaussians before it.

        Returns:
            The stepper, at the start.
        """
        return PlainStepper(self.momentum, problem)

    def ended(
        self, problem: Problem, stepper: Stepper, fishers: Mapping[str, Fisher]
    ) -> tuple[dict[str, State], dict[str, Tensor]]:
        """What a task leaves, once its steps have been taken.

        Args:
            problem: The task, and the Gaussians before it.
            stepper: What has taken the steps.
            fishers: Nothing.

        Returns:
            The Gaussians after it, and what to keep in memory besides.
        """
        assert isinstance(stepper, PlainStepper)
        return {name: replace(state, loc=stepper.theta[name]) for name, state in problem.states.items()}, {}


class PlainStepper:
    """Steps M <- rho M - (g / B) P, theta <- theta - lr M.

    Args:
        momentum: rho.
        problem: The task, with the blocks and where they start.
        projections: P for some of the blocks, [n, n]; the identity for the others.
    """

    def __init__(self, momentum: float, problem: Problem, projections: Mapping[str, Tensor] | None = None) -> None:
        self._rho = momentum
        self._likelihood = LogLikelihood(problem)
        self._blocks = {name: state.block for name, state in problem.states.items()}
        self._projections = dict(projections or {})
        self.theta = {name: start.clone() for name, start in problem.start.items()}
        self._momentum = {name: torch.zeros_like(theta) for name, theta in self.theta.items()}

    def step(self, batch: tuple[object, ...], lr: float) -> float:
        """Take one step on one batch.

        Args:
            batch: The batch.
            lr: The learning rate.

        Returns:
            The mean negative log likelihood before the step.
        """
        leaves = {site: value.detach().requires_grad_() for site, value in self.values().items()}
        value, gradient, examples = self._likelihood(batch, leaves)
        for name, block in self._blocks.items():
            g = block.pack(gradient)
            g = g @ self._projections[name] if name in self._projections else g
            self._momentum[name].mul_(self._rho).sub_(g, alpha=1 / examples)
            self.theta[name].sub_(self._momentum[name], alpha=lr)
        return -value / examples

    def values(self) -> dict[str, Tensor]:
        """The present weights, by site."""
        found: dict[str, Tensor] = {}
        for name, block in self._blocks.items():
            found |= block.unpack(self.theta[name])
        return found

    def tensors(self) -> dict[str, Tensor]:
        """Everything that changes with the steps."""
        found = {f"{name}.theta": tensor for name, tensor in self.theta.items()}
        return found | {f"{name}.momentum": tensor for name, tensor in self._momentum.items()}

    def restore(self, tensors: Mapping[str, Tensor]) -> None:
        """Take up what :meth:`tensors` gave.

        Args:
            tensors: Its result.
        """
        for name in self._blocks:
            self.theta[name].copy_(tensors[f"{name}.theta"])
            self._momentum[name].copy_(tensors[f"{name}.momentum"])
