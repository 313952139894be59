"""Gradient projection memory."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor

from nclbayes.engines.base import Engine, Outcome, Problem
from nclbayes.engines.curvature import task_fisher
from nclbayes.engines.loop import run_loop
from nclbayes.fisher import KroneckerFisher
from nclbayes.gaussians import State
from nclbayes.kronecker.blockdiagonal import whole
from nclbayes.methods.owm import refuse_other_engines, signed
from nclbayes.methods.plain import PlainStepper


@dataclass(frozen=True, kw_only=True)
class GPM(Engine):
    """Gradient projection memory (Saha, Garg and Roy 2021): steps orthogonal to the inputs of earlier tasks.

    For each linear map it keeps an orthonormal basis M of inputs that matter, and learns by stochastic gradient descent
    on ``g - g M M^T``. After a task, M grows by the leading singular vectors of the task's inputs, as many as it takes
    for M to hold a share `threshold` of their power. A weight that is no linear map is trained plainly.

    Attributes:
        threshold: The share of the inputs' power that is protected.

    Example:
        >>> from nclbayes.methods import GPM
        >>> GPM(threshold=0.97).momentum
        0.9
    """

    has_trust_region: ClassVar[bool] = False
    has_prior: ClassVar[bool] = False
    can_fade: ClassVar[bool] = False
    needs_activity: ClassVar[bool] = True
    threshold: float = 0.97

    def __post_init__(self) -> None:
        super().__post_init__()
        self._require("threshold", lambda v: 0 < v <= 1, "above 0 and at most 1")

    def run(self, problem: Problem) -> Outcome:
        """Learn a task.

        Args:
            problem: The task, and the bases of earlier tasks in memory.

        Returns:
            The Gaussians with their means moved, and the new bases in memory.

        Raises:
            SettingError: If another engine has learnt earlier tasks.
        """
        refuse_other_engines(self, problem)
        bases = {name: problem.memory.get(f"gpm/{name}") for name in problem.states}
        projections = {
            name: _complement(basis, problem.start[name]) for name, basis in bases.items() if basis is not None
        }
        stepper = PlainStepper(self.momentum, problem, projections)
        history = run_loop(stepper, self, problem)
        fishers, _ = task_fisher(self, problem, stepper.values())
        after: dict[str, State] = {
            name: state.moved(stepper.theta[name])
            for name, state in problem.states.items()
            if name in fishers or name in problem.trained
        }
        memory = {
            f"gpm/{name}": _grow(bases[name], whole(fisher.input), self.threshold)
            for name, fisher in fishers.items()
            if isinstance(fisher, KroneckerFisher)
        }
        return signed(self, Outcome(after, history, memory=memory))


def grow_basis(basis: Tensor | None, inputs: Tensor, threshold: float) -> Tensor:
    """Add directions to a basis until it holds a share of the inputs' power.

    Args:
        basis: M, orthonormal columns [n, r]; None: nothing yet.
        inputs: E[z z^T], [n, n].
        threshold: The share.

    Returns:
        The larger basis, [n, r'].
    """
    n = inputs.shape[0]
    if basis is None:
        basis = inputs.new_zeros(n, 0)
    basis = basis.to(inputs)
    outside = torch.eye(n, dtype=inputs.dtype, device=inputs.device) - basis @ basis.mT
    power, directions = torch.linalg.eigh(outside @ inputs @ outside)
    power, directions = power.flip(0).clamp(min=0), directions.flip(1)
    total = inputs.diagonal().sum()
    held = total - power.sum() + power.cumsum(0)
    # Rounding may leave a last trace of power that no direction holds.
    missing = threshold * total * (1 - 1e-12)
    if total - power.sum() >= missing:
        return basis
    count = int((held < missing).sum()) + 1
    return torch.linalg.qr(torch.cat([basis, directions[:, : min(count, n - basis.shape[1])]], dim=1)).Q.contiguous()


def _grow(basis: Tensor | None, inputs: Tensor, threshold: float) -> Tensor:
    """Let one basis grow, or those of a stack: these are kept as wide as the widest, with zeros."""
    if inputs.ndim == 2:
        return grow_basis(basis, inputs, threshold)
    before = [None if basis is None else basis[k][:, basis[k].any(0)] for k in range(len(inputs))]
    grown = [grow_basis(m, z, threshold) for m, z in zip(before, inputs, strict=True)]
    width = max(m.shape[1] for m in grown)
    return torch.stack([F.pad(m, (0, width - m.shape[1])) for m in grown])


def _complement(basis: Tensor, like: Tensor) -> Tensor:
    """I - M M^T, in the dtype and on the device of a block's weights."""
    identity = torch.eye(basis.shape[-2], dtype=basis.dtype, device=basis.device)
    return (identity - basis @ basis.mT).to(like)
