"""Synaptic intelligence."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import ClassVar

import torch
from torch import Tensor

from nclbayes.engines.base import Outcome, Problem
from nclbayes.engines.loop import run_loop
from nclbayes.gaussians import State, Structure
from nclbayes.methods.adam import AdamEngine, AdamStepper


@dataclass(frozen=True, kw_only=True)
class SynapticIntelligence(AdamEngine):
    """SI (Zenke, Poole and Ganguli 2017): importances from the path that training took.

    While a task is learnt, ``w_i`` sums ``-g_i dtheta_i``, what weight i did for the mean loss. Afterwards
    ``Omega_i <- Omega_i + max(w_i, 0) / (D_i^2 + xi)``, D the way from start to end, and later tasks are learnt by Adam
    with the penalty ``c sum_i Omega_i (theta_i - mu_i)^2``. In the units of a posterior, where everything is N times
    the mean, that is a Gaussian of precision ``2 N Omega``, N the size of the task that is learnt. To it comes the
    precision of the prior, which SI itself does not have: make that wide where c is large.

    Attributes:
        prior_weight: c.
        damping: xi, which bounds the importance of weights that hardly moved.

    Example:
        >>> from nclbayes.methods import SynapticIntelligence
        >>> SynapticIntelligence(prior_weight=0.5).damping
        0.1
    """

    structure: ClassVar[Structure] = Structure.DIAGONAL
    needs_fisher: ClassVar[bool] = False
    can_fade: ClassVar[bool] = False
    damping: float = 0.1

    def __post_init__(self) -> None:
        super().__post_init__()
        self._require("damping", lambda v: v > 0, "positive")

    def run(self, problem: Problem) -> Outcome:
        """Learn a task.

        Args:
            problem: The task, and the Gaussians before it.

        Returns:
            The Gaussians after it, and in memory Omega, with the size that they have it for.
        """
        size, omegas = problem.size, {name: _importance(state, problem) for name, state in problem.states.items()}
        problem = replace(problem, states={n: _resized(s, omegas[n], problem) for n, s in problem.states.items()})
        stepper = PathStepper(self, problem)
        history = run_loop(stepper, self, problem)
        after: dict[str, State] = {}
        memory: dict[str, Tensor] = {}
        for name, theta in stepper.matrices().items():
            state = problem.states[name]
            way = (theta - problem.start[name]).double()
            importance = stepper.path[name].clamp(min=0) / (way.square() + self.damping)
            precision, omega = state.precision + 2 * size * importance, omegas[name]
            after[name] = replace(state, loc=theta, precision=precision)
            memory[f"si/{name}"] = importance if omega is None else omega.to(way) + importance
            left = (size, after[name].fingerprint())
            memory[f"si/{name}/left"] = torch.tensor(left, dtype=torch.float64, device="cpu")
        return Outcome(after, history, memory=memory)


def _importance(state: State, problem: Problem) -> Tensor | None:
    """Omega, if the block is still as it was left: another engine may have learnt since."""
    left = problem.memory.get(f"si/{state.block.name}/left")
    untouched = left is not None and int(left[1]) == state.fingerprint()
    return problem.memory[f"si/{state.block.name}"] if untouched else None


def _resized(state: State, importance: Tensor | None, problem: Problem) -> State:
    """The precision 2 N Omega for another N than it was left with."""
    if importance is None:
        return state
    change = problem.size - float(problem.memory[f"si/{state.block.name}/left"][0])
    return replace(state, precision=state.precision + 2 * change * importance.to(state.precision))


class PathStepper(AdamStepper):
    """Adam's steps, with the path integral of the loss along them.

    Args:
        engine: The settings.
        problem: The task, and the Gaussians before it.
    """

    def __init__(self, engine: SynapticIntelligence, problem: Problem) -> None:
        super().__init__(engine, problem)
        self.path = {
            name: torch.zeros(start.shape, dtype=torch.float64, device=start.device)
            for name, start in problem.start.items()
        }

    def moved(self, name: str, gradient: Tensor, step: Tensor) -> None:
        """Add -g dtheta to the path integral.

        Args:
            name: The block.
            gradient: The gradient of the mean loss.
            step: What was added to theta.
        """
        self.path[name] -= gradient * step

    def tensors(self) -> dict[str, Tensor]:
        """Everything that changes with the steps."""
        return super().tensors() | {f"path/{name}": path for name, path in self.path.items()}

    def restore(self, tensors: Mapping[str, Tensor]) -> None:
        """Take up what :meth:`tensors` gave.

        Args:
            tensors: Its result.
        """
        super().restore(tensors)
        for name, path in self.path.items():
            path.copy_(tensors[f"path/{name}"])
