"""Bayesian gradient descent: online variational Bayes with independent weights."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from nclbayes.gaussians import State, Structure
from nclbayes.methods.online import DiagonalMove, OnlineEngine


@dataclass(frozen=True, kw_only=True)
class BGD(OnlineEngine):
    """Bayesian gradient descent (Zeno, Golan, Hoffer and Soudry 2018), which knows no tasks.

    With L the negative log likelihood of the mini-batch, summed over its examples, and samples
    ``theta = mu + sigma eps``, a step is

        mu    <- mu - eta sigma^2 E[dL/dtheta]
        sigma <- sigma sqrt(1 + k^2) - sigma k,   k = sigma E[dL/dtheta eps] / 2.

    Attributes:
        init_scale: The largest sigma at the first step of a block's first task; a narrower prior's is kept.

    Example:
        >>> from nclbayes.methods import BGD
        >>> BGD(init_scale=0.03).particles
        10
    """

    structure: ClassVar[Structure] = Structure.DIAGONAL
    can_stream: ClassVar[bool] = True
    init_scale: float = 0.05

    def __post_init__(self) -> None:
        super().__post_init__()
        self._require("init_scale", lambda v: 1e-100 <= v <= 1e100, "positive, from 1e-100 to 1e100")

    def moved(self, state: State, is_trained: bool) -> DiagonalMove:
        """What moves a block's normals.

        Args:
            state: The normals before the task.
            is_trained: Whether a task has touched them before.

        Returns:
            What moves them, at the start.
        """
        sigma = state.precision.rsqrt()
        return DiagonalMove(state, sigma if is_trained else sigma.clamp(max=self.init_scale))
