"""Projection by activity: OWM and DOWM, as NCL with other factors and without the pull of the prior."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import ClassVar

import torch
from torch import Tensor

from nclbayes.engines.base import Engine, Outcome, Problem
from nclbayes.engines.curvature import Fisher
from nclbayes.engines.laplace import TrustRegion
from nclbayes.errors import SettingError
from nclbayes.fisher import KroneckerFisher
from nclbayes.gaussians import State, Structure
from nclbayes.kronecker import KroneckerPrecision
from nclbayes.kronecker.blockdiagonal import whole


def activity_factors(theta: Tensor, fisher: KroneckerFisher, both_sides: bool) -> tuple[Tensor, Tensor]:
    """The factors by which OWM and DOWM stand in for a Fisher.

    Args:
        theta: The map's matrix W, [m, n] or [k, m, n].
        fisher: Its Fisher, of which the input side E[z z^T] is used.
        both_sides: Whether the output side is W E[z z^T] W^T, as in DOWM, or the identity.

    Returns:
        The input side [n, n] and the output side [m, m], float64.
    """
    inputs, W = whole(fisher.input), theta.double()
    if both_sides:
        return inputs, W @ inputs @ W.mT
    return inputs, _identity(W.shape[-2], inputs)


@dataclass(frozen=True, kw_only=True)
class OWM(TrustRegion):
    """Orthogonal weight modification (Zeng et al. 2019).

    Stochastic gradient descent with momentum on the current task alone, its gradient multiplied by

        P_R = alpha (mean over tasks of E[z z^T] + alpha I)^-1

    so that maps change little on inputs that earlier tasks used. It is Laplace-NCL with the precision P_R^-1 (x) I and
    without the pull of the prior mean (lambda = 0). A weight that is no linear map is trained plainly.

    Attributes:
        alpha: How much input power a direction may have before it is protected.

    Example:
        >>> from nclbayes.methods import OWM
        >>> OWM(alpha=1e-3).prior_weight
        0.0
    """

    both_sides: ClassVar[bool] = False
    needs_activity: ClassVar[bool] = True
    can_stiffen: ClassVar[bool] = False
    can_fade: ClassVar[bool] = False
    can_stream: ClassVar[bool] = False
    alpha: float = 1e-3
    prior_weight: float = 0.0

    def __post_init__(self) -> None:
        super().__post_init__()
        self._require("alpha", lambda v: v > 0, "positive")
        if self.prior_weight != 0:
            raise SettingError(f"{type(self).__name__} has no pull of the prior: leave prior_weight at 0.")

    @property
    def preconditioner_damping(self) -> float:
        """Nothing: alpha is part of the projection."""
        return 0.0

    def run(self, problem: Problem) -> Outcome:
        """Learn a task.

        Args:
            problem: The task, and the precisions before it.

        Returns:
            The precisions after it; there is no evidence, as there is no posterior.

        Raises:
            SettingError: If another engine has learnt earlier tasks.
        """
        refuse_other_engines(self, problem)
        states = {
            name: state if _is_map(state) and name in problem.trained else state.isotropic()
            for name, state in problem.states.items()
        }
        return signed(self, super().run(replace(problem, states=states)))

    @property
    def has_evidence(self) -> bool:
        """It does not: there is no posterior."""
        return False

    def absorb(
        self, problem: Problem, theta: Mapping[str, Tensor], fishers: Mapping[str, Fisher]
    ) -> tuple[dict[str, State], dict[str, Tensor]]:
        """Average the task's factors with those of earlier tasks.

        Args:
            problem: The task, and the precisions before it.
            theta: The learnt weights.
            fishers: The task's Fisher there.

        Returns:
            The new precisions, and in memory the averages with the number of tasks.
        """
        states: dict[str, State] = {}
        memory: dict[str, Tensor] = {}
        for name, fisher in fishers.items():
            state = problem.states[name].moved(theta[name])
            if isinstance(fisher, KroneckerFisher):
                sides = dict(
                    zip(("input", "output"), activity_factors(theta[name], fisher, self.both_sides), strict=True)
                )
                kept = _kept(self, name)
                count = 1 + int(problem.memory.get(f"{kept}/tasks", torch.zeros((), dtype=torch.int64, device="cpu")))
                for side, factor in sides.items():
                    before = problem.memory.get(f"{kept}/{side}")
                    if before is not None:
                        sides[side] = before.to(factor) + (factor - before.to(factor)) / count
                    memory[f"{kept}/{side}"] = sides[side]
                memory[f"{kept}/tasks"] = torch.tensor(count, device="cpu")
                state = replace(state, precision=self._precision(sides, state))
            states[name] = state
        return states, memory

    def _precision(self, sides: Mapping[str, Tensor], state: State) -> KroneckerPrecision:
        """Of the prior's scale, and the identity where no task had any input: P^-1 on each side."""
        A, G = self._inverse_projection(sides["input"]), sides["output"]
        if self.both_sides:
            G = self._inverse_projection(G)
        tau = torch.tensor(state.log_scale, dtype=A.dtype, device=A.device).exp()
        return KroneckerPrecision.factorise(tau * A, G.expand(*A.shape[:-2], *G.shape[-2:]).contiguous())

    def _inverse_projection(self, power: Tensor) -> Tensor:
        """I + power / alpha; rounding makes powers of nothing a little negative, which a small alpha would enlarge."""
        values, vectors = torch.linalg.eigh(power)
        scaled = (vectors * (values.clamp(min=0) / self.alpha).unsqueeze(-2)) @ vectors.mT
        return _identity(power.shape[-1], power) + (scaled + scaled.mT) / 2


@dataclass(frozen=True, kw_only=True)
class DOWM(OWM):
    """OWM on both sides (Duncker et al. 2020): P_L = alpha (mean over tasks of W E[z z^T] W^T + alpha I)^-1 as well.

    Example:
        >>> from nclbayes.methods import DOWM
        >>> DOWM(alpha=0.1).both_sides
        True
    """

    both_sides: ClassVar[bool] = True


@dataclass(frozen=True, kw_only=True)
class LaplaceOWM(TrustRegion):
    """Laplace-NCL with OWM's factors in place of the Fisher's: ``N E[z z^T] (x) I`` (Kao et al. 2021).

    Example:
        >>> from nclbayes.methods import LaplaceOWM
        >>> LaplaceOWM().prior_weight
        1.0
    """

    both_sides: ClassVar[bool] = False
    needs_activity: ClassVar[bool] = True

    @property
    def has_evidence(self) -> bool:
        """It does not: these factors are not those of a Fisher."""
        return False

    def absorb(
        self, problem: Problem, theta: Mapping[str, Tensor], fishers: Mapping[str, Fisher]
    ) -> tuple[dict[str, State], dict[str, Tensor]]:
        """Add N times the factors of the task's activity to the precision.

        Args:
            problem: The task, and the Gaussians before it.
            theta: The learnt weights.
            fishers: The task's Fisher there.

        Returns:
            The new Gaussians.
        """
        changed = dict(fishers)
        for name, fisher in fishers.items():
            if isinstance(fisher, KroneckerFisher):
                A, G = activity_factors(theta[name], fisher, self.both_sides)
                changed[name] = replace(fisher, input=A, output=problem.size * G.expand_as(whole(fisher.output)))
        return super().absorb(problem, theta, changed)


@dataclass(frozen=True, kw_only=True)
class LaplaceDOWM(LaplaceOWM):
    """Laplace-NCL with DOWM's factors: ``N E[z z^T] (x) W E[z z^T] W^T`` (Kao et al. 2021).

    Example:
        >>> from nclbayes.methods import LaplaceDOWM
        >>> LaplaceDOWM().both_sides
        True
    """

    both_sides: ClassVar[bool] = True


def refuse_other_engines(engine: Engine, problem: Problem) -> None:
    """Refuse to go on where another engine has learnt: what it knows of earlier tasks would be lost.

    Args:
        engine: The engine.
        problem: The task, and what earlier ones left.

    Raises:
        SettingError: If a linear map that earlier tasks have trained is not as this engine left it.
    """
    for name, state in problem.states.items():
        left = problem.memory.get(f"{_kept(engine, name)}/left")
        is_left = left is not None and int(left) == state.fingerprint()
        if _is_map(state) and name in problem.trained and not is_left:
            kind = type(engine).__name__
            raise SettingError(
                f"Another engine than {kind} has learnt earlier tasks of this posterior, and {kind} protects only what "
                "it has seen itself: start a new posterior with it, or go on with the other engine."
            )


def signed(engine: Engine, outcome: Outcome) -> Outcome:
    """An outcome that :func:`refuse_other_engines` will know again.

    Args:
        engine: The engine.
        outcome: What it made of a task.

    Returns:
        The same, with how it left the linear maps in memory.
    """
    left = {
        f"{_kept(engine, name)}/left": torch.tensor(state.fingerprint(), device="cpu")
        for name, state in outcome.states.items()
        if _is_map(state)
    }
    return replace(outcome, memory={**outcome.memory, **left})


def _kept(engine: Engine, name: str) -> str:
    """Where in memory a block's averages are."""
    return f"{type(engine).__name__.lower()}/{name}"


def _is_map(state: State) -> bool:
    """Whether a block is a linear map, whose inputs can be protected."""
    return state.structure is Structure.KRONECKER


def _identity(size: int, like: Tensor) -> Tensor:
    return torch.eye(size, dtype=like.dtype, device=like.device)
