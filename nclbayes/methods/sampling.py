"""Steps from gradients at samples of the weights: what BGD, FOO-VB and IVON have in common."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import ClassVar, NamedTuple

import torch
from torch import Tensor

from nclbayes.engines.base import Engine, Outcome, Problem
from nclbayes.engines.curvature import Fisher
from nclbayes.engines.likelihood import LogLikelihood
from nclbayes.engines.loop import Stepper, run_loop
from nclbayes.gaussians import State


@dataclass(frozen=True, kw_only=True)
class SamplingEngine(Engine):
    """Settings of the methods whose Gaussian moves with every step, so that a task needs no end.

    Attributes:
        particles: Samples of the weights for each step.
    """

    needs_fisher: ClassVar[bool] = False
    has_trust_region: ClassVar[bool] = False
    keeps_last: ClassVar[bool] = True
    has_own_rate: ClassVar[bool] = True
    particles: int = 1

    def __post_init__(self) -> None:
        super().__post_init__()
        self._require_whole("particles")

    @abstractmethod
    def begun(self, problem: Problem) -> SamplingStepper:
        """What takes the steps of a task.

        Args:
            problem: The task, and the Gaussians before it.

        Returns:
            The stepper, at the start.
        """

    def run(self, problem: Problem) -> Outcome:
        """Learn a task.

        Args:
            problem: The task, and the Gaussians before it.

        Returns:
            The Gaussians after it.
        """
        stepper = self.begun(problem)
        history = run_loop(stepper, self, problem)
        return Outcome(stepper.posterior(), history)

    def ended(
        self, problem: Problem, stepper: Stepper, fishers: Mapping[str, Fisher]
    ) -> tuple[dict[str, State], dict[str, Tensor]]:
        """What a task leaves, once its steps have been taken.

        Args:
            problem: The task, and the Gaussians before it.
            stepper: What has taken the steps.
            fishers: Nothing.

        Returns:
            The Gaussians of the last step; nothing is kept in memory.
        """
        assert isinstance(stepper, SamplingStepper)
        return stepper.posterior(), {}


class Sample(NamedTuple):
    """A sample of the weights, and the likelihood there.

    Attributes:
        noise: The standard normal numbers that it was made of, by block.
        gradient: The gradient of the batch's log likelihood, summed, by block.
        value: The log likelihood, summed.
        examples: How many examples the batch has.
    """

    noise: dict[str, Tensor]
    gradient: dict[str, Tensor]
    value: float
    examples: int


class SamplingStepper:
    """Means, and gradients at samples around them.

    Args:
        problem: The task, and the Gaussians before it.
    """

    def __init__(self, problem: Problem) -> None:
        self.problem = problem
        self.mu = {name: start.clone() for name, start in problem.start.items()}
        self._likelihood = LogLikelihood(problem)

    @abstractmethod
    def step(self, batch: tuple[object, ...], lr: float) -> float:
        """Take one step; returns the mean negative log likelihood at the samples."""

    @abstractmethod
    def posterior(self) -> dict[str, State]:
        """The Gaussians of the last step."""

    @abstractmethod
    def parts(self) -> Mapping[str, Mapping[str, Tensor]]:
        """What changes with the steps in place, by kind and block, besides the means."""

    def samples(
        self, batch: tuple[object, ...], count: int, spread: Callable[[str, Tensor], Tensor]
    ) -> Iterator[Sample]:
        """Samples of the weights, one after the other, with the likelihood of a batch.

        Args:
            batch: The batch.
            count: How many samples.
            spread: From a block's name and its noise to how far the sample lies from the mean.

        Yields:
            The samples.
        """
        states = self.problem.states
        for _ in range(count):
            noise = {name: noise_like(mu, self.problem.generator) for name, mu in self.mu.items()}
            leaves: dict[str, Tensor] = {}
            for name, mu in self.mu.items():
                leaves |= states[name].block.unpack(mu + spread(name, noise[name]))
            leaves = {site: value.requires_grad_() for site, value in leaves.items()}
            value, gradient, examples = self._likelihood(batch, leaves)
            yield Sample(noise, {name: states[name].block.pack(gradient) for name in self.mu}, value, examples)

    def values(self) -> dict[str, Tensor]:
        """The present means, by site."""
        found: dict[str, Tensor] = {}
        for name, mu in self.mu.items():
            found |= self.problem.states[name].block.unpack(mu)
        return found

    def tensors(self) -> dict[str, Tensor]:
        """Everything that changes with the steps."""
        kinds = {"mu": self.mu, **self.parts()}
        return {f"{kind}/{name}": tensor for kind, tensors in kinds.items() for name, tensor in tensors.items()}

    def restore(self, tensors: Mapping[str, Tensor]) -> None:
        """Take up what :meth:`tensors` gave.

        Args:
            tensors: Its result.
        """
        for name, tensor in SamplingStepper.tensors(self).items():
            tensor.copy_(tensors[name])


def noise_like(like: Tensor, generator: torch.Generator) -> Tensor:
    """Standard normal numbers that a generator decides, wherever it lives.

    Args:
        like: Of which shape and dtype, and on which device.
        generator: The generator.

    Returns:
        The numbers.
    """
    eps = torch.randn(like.shape, generator=generator, dtype=like.dtype, device=generator.device)
    return eps.to(like.device)
