"""Online Laplace with Kronecker factors, optimised by Adam."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from nclbayes.engines.base import Outcome, Problem
from nclbayes.engines.curvature import Fisher, add_fishers, task_fisher
from nclbayes.engines.loop import Stepper, run_loop
from nclbayes.gaussians import State
from nclbayes.kronecker import SumRule
from nclbayes.methods.adam import AdamEngine, AdamStepper


@dataclass(frozen=True, kw_only=True)
class KFAC(AdamEngine):
    """Kronecker-factored online Laplace (Ritter et al. 2018).

    The objective is that of Laplace-NCL, ``log p(D_k | theta) - (lambda/2) (theta - mu)^T Lambda (theta - mu)``, and so
    are its stationary points and the Fisher that is added afterwards; but the path is Adam's, which knows nothing of
    what earlier tasks need. Large lambda is needed to retain them.

    Example:
        >>> from nclbayes.methods import KFAC
        >>> KFAC(prior_weight=1e4).lr
        0.001
    """

    can_stream: ClassVar[bool] = True
    kronecker_sum: SumRule | str = SumRule.ADDITIVE

    def run(self, problem: Problem) -> Outcome:
        """Learn a task.

        Args:
            problem: The task, and the Gaussians before it.

        Returns:
            The Gaussians after it. In memory, the root of Adam's second moment for each block.
        """
        stepper = self.begun(problem)
        history = run_loop(stepper, self, problem)
        fishers, _ = task_fisher(self, problem, stepper.values())
        after, memory = self.ended(problem, stepper, fishers)
        return Outcome(after, history, memory=memory)

    def ended(
        self, problem: Problem, stepper: Stepper, fishers: Mapping[str, Fisher]
    ) -> tuple[dict[str, State], dict[str, Tensor]]:
        """What a task leaves, once its steps have been taken.

        Args:
            problem: The task, and the Gaussians before it.
            stepper: What has taken the steps.
            fishers: The task's Fisher, by block.

        Returns:
            The Gaussians after it, and what to keep in memory besides.
        """
        assert isinstance(stepper, AdamStepper)
        after = add_fishers(problem, stepper.matrices(), fishers, self.kronecker_sum)
        return after, {f"adam/{name}": root for name, root in stepper.preconditioners().items()}
