"""Adam's steps on a penalised loss: what EWC, SI and KFAC have in common."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from nclbayes.engines.base import Engine, Problem
from nclbayes.engines.likelihood import LogLikelihood
from nclbayes.gaussians import State


@dataclass(frozen=True, kw_only=True)
class AdamEngine(Engine):
    """Settings of the methods that are optimised by Adam (Kingma and Ba 2014).

    The objective of task k is ``log p(D_k | theta) - (lambda/2) (theta - mu)^T Lambda (theta - mu)``, divided by N,
    with mu and Lambda of the tasks before. A block that no task has touched yet has its prior there, with weight 1.

    Attributes:
        prior_weight: lambda.
        momentum: Adam's beta_1.
        second_momentum: Adam's beta_2.
        epsilon: Added to the root of the second moment.
    """

    has_trust_region: ClassVar[bool] = False
    lr: float = 0.001
    second_momentum: float = 0.999
    epsilon: float = 1e-8

    def __post_init__(self) -> None:
        super().__post_init__()
        self._require("second_momentum", lambda v: 0 <= v < 1, "at least 0 and below 1")
        self._require("epsilon", lambda v: v > 0, "positive")

    @property
    def second_weight(self) -> float:
        """Lambda in Adam's second moment; the same as in the first, unless a method decouples them."""
        return self.prior_weight

    def begun(self, problem: Problem) -> AdamStepper:
        """What takes the steps of a task.

        Args:
            problem: The task, and the Gaussians before it.

        Returns:
            The stepper, at the start.
        """
        return AdamStepper(self, problem)


class AdamStepper:
    """Adam on the mean loss plus the penalty.

    Args:
        engine: The settings.
        problem: The task, and the Gaussians before it.
    """

    def __init__(self, engine: AdamEngine, problem: Problem) -> None:
        self._engine = engine
        self._likelihood = LogLikelihood(problem)
        self._blocks = {
            name: _AdamBlock(engine, state, problem.start[name], problem.size, name in problem.trained)
            for name, state in problem.states.items()
        }
        self._taken = 0

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
        self._taken += 1
        for name, block in self._blocks.items():
            loss_gradient = block.state.block.pack(gradient) / -examples
            self.moved(name, loss_gradient, block.step(loss_gradient, self._taken, lr))
        return -value / examples

    def moved(self, name: str, gradient: Tensor, step: Tensor) -> None:
        """Told of each block's step; SI listens.

        Args:
            name: The block.
            gradient: The gradient of the mean loss, without the penalty.
            step: What was added to theta.
        """

    def matrices(self) -> dict[str, Tensor]:
        """The present theta of each block."""
        return {name: block.theta for name, block in self._blocks.items()}

    def values(self) -> dict[str, Tensor]:
        """The present weights, by site."""
        found: dict[str, Tensor] = {}
        for block in self._blocks.values():
            found |= block.state.block.unpack(block.theta)
        return found

    def preconditioners(self) -> dict[str, Tensor]:
        """The root of the second moment of each block: what Adam divides a step by."""
        return {name: block.root(self._taken) for name, block in self._blocks.items()}

    def tensors(self) -> dict[str, Tensor]:
        """Everything that changes with the steps."""
        found = {"taken": torch.tensor(self._taken, device="cpu")}
        for name, block in self._blocks.items():
            found |= {f"{name}.theta": block.theta, f"{name}.first": block.first, f"{name}.second": block.second}
        return found

    def restore(self, tensors: Mapping[str, Tensor]) -> None:
        """Take up what :meth:`tensors` gave.

        Args:
            tensors: Its result.
        """
        self._taken = int(tensors["taken"])
        for name, block in self._blocks.items():
            for part in ("theta", "first", "second"):
                getattr(block, part).copy_(tensors[f"{name}.{part}"])


class _AdamBlock:
    """Iterate and moments of one block."""

    def __init__(self, engine: AdamEngine, state: State, start: Tensor, size: float, trained: bool) -> None:
        self.state, self._engine = state, engine
        self.theta = start.clone()
        self.first, self.second = torch.zeros_like(start), torch.zeros_like(start)
        self._weights = (engine.prior_weight, engine.second_weight) if trained else (1.0, 1.0)
        self._pull = state.multiplication(1 / size)

    def step(self, gradient: Tensor, taken: int, lr: float) -> Tensor:
        """One step; returns what was added to theta."""
        engine, (weight, second_weight) = self._engine, self._weights
        # The gradient of the penalty without its weight, Lambda (theta - mu) / N.
        pull = self._pull(self.theta - self.state.loc)
        beta, beta2 = engine.momentum, engine.second_momentum
        self.first.mul_(beta).add_(gradient + weight * pull, alpha=1 - beta)
        self.second.mul_(beta2).add_((gradient + second_weight * pull).square(), alpha=1 - beta2)
        step = self.first / (1 - beta**taken) / (self.root(taken) + engine.epsilon) * -lr
        self.theta += step
        return step

    def root(self, taken: int) -> Tensor:
        """The root of the second moment, corrected for its start at 0."""
        return (self.second / (1 - self._engine.second_momentum ** max(1, taken))).sqrt()
