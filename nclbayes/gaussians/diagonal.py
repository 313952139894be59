"""The Gaussian of a block of independent weights."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import ClassVar

import torch
from pyro.distributions import Independent, Normal
from torch import Tensor

from nclbayes.blocks import DiagonalBlock
from nclbayes.fisher import DiagonalFisher
from nclbayes.gaussians.preconditioners import Elementwise, Preconditioner
from nclbayes.gaussians.state import LinearMap, State, Structure
from nclbayes.kronecker import SumRule


@dataclass(frozen=True)
class DiagonalState(State):
    """A block and its independent normals.

    Attributes:
        block: The sites and their layout.
        loc: mu, of the block's shape.
        precision: One over the variance, of the block's shape, in float64.
        log_scale: log tau, the mean log precision of the block's prior.
    """

    structure: ClassVar[Structure] = Structure.DIAGONAL

    precision: Tensor

    @property
    def kind(self) -> str:
        """The form of the Gaussian, for people."""
        return f"diagonal ({self.block.reason})" if isinstance(self.block, DiagonalBlock) else "diagonal"

    @property
    def distribution(self) -> Independent:
        """The block's normals, in the model's dtype."""
        scale = self.precision.rsqrt().to(self.loc.dtype)
        return Independent(Normal(self.loc, scale), self.loc.ndim)

    @property
    def logdet(self) -> float:
        """log|Lambda|."""
        return float(self.precision.log().sum())

    def log_prob(self, matrix: Tensor) -> Tensor:
        """The log density of the block's weights."""
        return self.distribution.log_prob(matrix)

    def whiten(self, gradients: Tensor) -> Tensor:
        """Gradients divided by the root of the precision: their inner products are those of Lambda^-1."""
        return gradients * self.precision.rsqrt().to(gradients.dtype)

    def colouring(self) -> LinearMap:
        """Eps divided by the root of the precision."""
        scale = self.precision.rsqrt().to(self.loc.dtype)
        return lambda eps: eps * scale

    def multiplication(self, factor: float) -> LinearMap:
        """Factor times the precision, elementwise."""
        weights = (factor * self.precision).to(self.loc.dtype)
        return lambda matrix: weights * matrix

    def preconditioner(self, tau: float, damping: float, held: DiagonalState | None = None) -> Preconditioner:
        """What multiplies a gradient with ``tau / (Lambda_held + damping)``, in the model's dtype."""
        precision = self.precision if held is None else held.precision
        inverse, dtype = 1 / (precision + damping), self.loc.dtype
        return Elementwise((tau * inverse).to(dtype), (inverse * self.precision).to(dtype))

    def quadratic(self, delta: Tensor) -> float:
        """delta^T Lambda delta."""
        return float((delta.double().square() * self.precision).sum())

    def add(self, loc: Tensor, fisher: DiagonalFisher, rule: SumRule, measure: bool = True) -> DiagonalState:
        """The normals around `loc` with a task's Fisher added to their precisions.

        Args:
            loc: The new mean.
            fisher: The task's Fisher.
            rule: Not needed: diagonals add exactly.
            measure: Not needed: nothing is lost.

        Returns:
            The new state.
        """
        return replace(self, loc=loc, precision=self.precision + fisher.diagonal)

    def faded(self, prior: DiagonalState, retention: float) -> DiagonalState:
        """The normals with the same means whose precisions have faded, ``phi Lambda + (1 - phi) Lambda_0``.

        Args:
            prior: The block's prior.
            retention: phi, above 0 and at most 1.

        Returns:
            The wider state.
        """
        return replace(self, precision=torch.lerp(prior.precision, self.precision, retention))

    def stiffening(self, prior: DiagonalState) -> Callable[[float], DiagonalState]:
        """The normals with the same means whose precisions exceed their priors in the same proportions.

        Args:
            prior: The block's prior.

        Returns:
            From how many times stiffer than a free weight the mean one is to the state with the precisions
            ``p_0 (1 + stiffness (r - 1) / mean(r - 1))``, ``r = p / p_0``.
        """
        excess = (self.precision / prior.precision - 1).clamp(min=0.0)
        mean = excess.mean()
        shape = excess / mean if mean > 1e-9 else torch.zeros_like(excess)
        return lambda stiffness: replace(self, precision=prior.precision * (1 + stiffness * shape))

    def narrowed(self, precision: float) -> DiagonalState:
        """The normals with a number added to every precision."""
        return replace(self, precision=self.precision + precision)

    def isotropic(self) -> DiagonalState:
        """The normals with the precision tau, under which a step is one of plain training."""
        return replace(self, precision=torch.full_like(self.precision, math.exp(self.log_scale)))

    def to(self, device: torch.device) -> DiagonalState:
        """The same on another device."""
        return replace(self, loc=self.loc.to(device), precision=self.precision.to(device))

    def tensors(self) -> dict[str, Tensor]:
        """Means and precisions."""
        return {"loc": self.loc, "precision": self.precision}

    def with_tensors(self, tensors: Mapping[str, Tensor]) -> DiagonalState:
        """A state of the same block from what :meth:`tensors` gave."""
        return replace(self, loc=tensors["loc"], precision=tensors["precision"])
