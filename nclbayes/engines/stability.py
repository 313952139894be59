"""How large a step may be: what the curvature of the task at hand allows."""

from __future__ import annotations

import math
from collections.abc import Mapping

import torch
from torch import Tensor

from nclbayes.engines.base import Engine, Problem
from nclbayes.engines.settings import StepRule
from nclbayes.engines.steps import BlockSteps, Rate
from nclbayes.fisher import FisherAccumulator
from nclbayes.gaussians import Structure

# Curvature is measured before these steps, while it changes fast, and every so many steps from then on.
_EARLY, _EVERY = (0, 1, 2, 4, 8, 16, 32), 50
# So many pulls are taken at once, where they move the weights by at most such a part of the way to the mean.
_PULLS, _SMALL = 10, 0.1


class StableRate:
    """The learning rate up to which steps do not grow, measured again and again while the weights move.

    On a quadratic, ``M <- rho M + P g``, ``theta <- theta - lr M`` is stable while lr times the largest eigenvalue of
    P (F + Lambda / N) is below 2 (1 + rho). That eigenvalue is at most the sum of those of P F over the blocks, F being
    the Fisher of an example, and the largest of the pull's. The rate is held where lr times that is 1.

    The pull of the previous posterior takes as long as the rest of a step, and is hundreds of times smaller: where ten
    of them are still a small step, ten are taken at once.

    Args:
        engine: The engine; with any schedule but "auto" nothing is measured, and every rate is allowed.
        problem: The task.
        blocks: The steps of its blocks.

    Attributes:
        least: The least limit so far.
    """

    def __init__(self, engine: Engine, problem: Problem, blocks: list[BlockSteps]) -> None:
        self._is_on = isinstance(engine.schedule, str) and engine.steps_by is StepRule.SGD
        self._is_diagonal = engine.structure is Structure.DIAGONAL
        self._problem, self._blocks, self._lr, self._rho = problem, blocks, engine.lr, engine.momentum
        self._taken, self._limit, self.least = 0, math.inf, math.inf

    def allowed(self, lr: float, batch: tuple[object, ...], values: Mapping[str, Tensor]) -> Rate:
        """The size of the next step.

        Args:
            lr: What it would be.
            batch: The batch of the step.
            values: The present weights, by site.

        Returns:
            The same learning rate, or less, and how many pulls.
        """
        if not self._is_on:
            return Rate(lr)
        if self._taken in _EARLY or self._taken % _EVERY == 0:
            self._measure(batch, values)
        pulls = 0 if self._taken % self._pulls() else self._pulls()
        self._taken += 1
        return Rate(min(lr, self._limit), pulls)

    def tensors(self) -> dict[str, Tensor]:
        """Everything that changes with the steps."""
        held = [float(self._taken), self._limit, self.least]
        return {"rate": torch.tensor(held, dtype=torch.float64, device="cpu")} if self._is_on else {}

    def restore(self, tensors: Mapping[str, Tensor]) -> None:
        """Take up what :meth:`tensors` gave.

        Args:
            tensors: Its result.
        """
        if self._is_on:
            taken, self._limit, self.least = tensors["rate"].tolist()
            self._taken = int(taken)

    def _pulls(self) -> int:
        """How many pulls are taken at once."""
        return _PULLS if self._lr * _PULLS * self._pull() <= _SMALL * (1 - self._rho) else 1

    def _pull(self) -> float:
        return max(steps.pull for steps in self._blocks)

    def _measure(self, batch: tuple[object, ...], values: Mapping[str, Tensor]) -> None:
        # Draws its targets from a stream of its own.
        accumulator = FisherAccumulator(
            self._problem.model,
            {**self._problem.fixed, **values},
            diagonal=self._is_diagonal,
            blocks=self._problem.blocks,
            context=self._problem.task.context,
        )
        for part in self._problem.drawn_parts(batch, accumulator.generator):
            self._problem.meet(accumulator.update(*part))
        fishers = accumulator.of_all(self._problem.ranks).factors(1.0)
        curvature = sum(steps.curvature(fishers[steps.name]) for steps in self._blocks if steps.name in fishers)
        curvature += self._pulls() * self._pull()
        self._limit = 1 / curvature if curvature > 0 else math.inf
        self.least = min(self.least, self._limit)
