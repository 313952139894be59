"""Online elastic weight consolidation."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import ClassVar

from torch import Tensor

from nclbayes.engines.base import Outcome, Problem
from nclbayes.engines.curvature import Fisher, add_fishers, task_fisher
from nclbayes.engines.loop import Stepper, run_loop
from nclbayes.gaussians import State, Structure
from nclbayes.methods.adam import AdamEngine, AdamStepper


@dataclass(frozen=True, kw_only=True)
class EWC(AdamEngine):
    """Online EWC (Kirkpatrick et al. 2017; Schwarz et al. 2018): a diagonal Laplace approximation.

    Task k is learnt by Adam on ``log p(D_k | theta) - (lambda/2) sum_i Lambda_i (theta_i - mu_i)^2``; then
    ``Lambda <- gamma Lambda + diag F_k``.

    Attributes:
        decay: gamma, by which older tasks fade; 1 keeps them. It fades the prior with them, towards no precision at
            all, and only after a task, which is thus learnt under the whole pull; `retention` fades towards the prior,
            and before.

    Example:
        >>> from nclbayes.methods import EWC
        >>> EWC(prior_weight=100.0).structure.value
        'diagonal'
    """

    structure: ClassVar[Structure] = Structure.DIAGONAL
    can_stream: ClassVar[bool] = True
    decay: float = 1.0

    def __post_init__(self) -> None:
        super().__post_init__()
        self._require("decay", lambda v: 0 < v <= 1, "above 0 and at most 1")

    def run(self, problem: Problem) -> Outcome:
        """Learn a task.

        Args:
            problem: The task, and the Gaussians before it.

        Returns:
            The Gaussians after it.
        """
        stepper = self.begun(problem)
        history = run_loop(stepper, self, problem)
        fishers, _ = task_fisher(self, problem, stepper.values())
        after, _ = self.ended(problem, stepper, fishers)
        return Outcome(after, history)

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
        faded = {name: self._faded(state, name in problem.trained) for name, state in problem.states.items()}
        return add_fishers(replace(problem, states=faded), stepper.matrices(), fishers, self.kronecker_sum), {}

    def _faded(self, state: State, trained: bool) -> State:
        return replace(state, precision=state.precision * self.decay) if trained else state
