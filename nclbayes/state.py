"""The Gaussian of one block: what a posterior carries from task to task."""

from __future__ import annotations

import zlib
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from enum import Enum
from typing import Any

import torch
from pyro.distributions import Independent, Normal
from torch import Tensor

from nclbayes.blocks import Block, DiagonalBlock, KroneckerBlock
from nclbayes.fisher import DiagonalFisher, KroneckerFisher
from nclbayes.kronecker import KroneckerNormal, KroneckerPrecision, SumRule, kronecker_sum
from nclbayes.kronecker.triangular import between_triangles
from nclbayes.storage import memory_of
from nclbayes.watch import Latent


class Structure(Enum):
    """The form of the Gaussian of a linear map.

    Attributes:
        KRONECKER: A precision A (x) G.
        DIAGONAL: Independent weights.
    """

    KRONECKER = "kronecker"
    DIAGONAL = "diagonal"


@dataclass(frozen=True)
class KroneckerState:
    """A Kronecker block and its Gaussian N(loc, (A (x) G)^-1).

    Attributes:
        block: The sites and their layout.
        loc: mu, [m, n] or [k, m, n], in the model's dtype.
        precision: A (x) G, factorised, in float64.
        log_scale: log tau, the mean log eigenvalue of the block's prior precision.
    """

    block: KroneckerBlock
    loc: Tensor
    precision: KroneckerPrecision
    log_scale: float

    @property
    def kind(self) -> str:
        """The form of the Gaussian, for people."""
        return "Kronecker" + ("" if self.block.bias is None else ", with bias")

    @property
    def distribution(self) -> KroneckerNormal:
        """The block's Gaussian, in the model's dtype."""
        return KroneckerNormal.from_precision(self.loc, self.precision.to(self.loc.dtype))

    @property
    def logdet(self) -> float:
        """log|Lambda|, of all matrices of a stack together."""
        return float(self.precision.logdet.sum())

    def whiten(self, gradients: Tensor) -> Tensor:
        """S_G^T J S_A: gradients whose inner products are those of Lambda^-1."""
        p = self.precision
        return p.output_root.to(gradients.dtype).mT @ gradients @ p.input_root.to(gradients.dtype)

    def coloured(self, eps: Tensor) -> Tensor:
        """S_G eps S_A^T: standard normal noise with the covariance Lambda^-1."""
        p, dtype = self.precision, eps.dtype
        return between_triangles(p.output_root.to(dtype), eps, p.input_root.to(dtype))

    def quadratic(self, delta: Tensor) -> float:
        """delta^T Lambda delta."""
        d = delta.double()
        return float((d * self.precision.times(d)).sum())

    def add(self, loc: Tensor, fisher: KroneckerFisher, rule: SumRule, measure: bool = True) -> KroneckerState:
        """The Gaussian around `loc` whose precision has a task's Fisher added.

        Args:
            loc: The new mean.
            fisher: The task's Fisher.
            rule: How to replace the sum of two Kronecker products by one.
            measure: Whether to measure what that loses.

        Returns:
            The new state.
        """
        p = self.precision
        C, D = fisher.input, fisher.output
        if 1 in p.shape:
            # One side is a single number: the sum is a Kronecker product, and `kl` finds it.
            rule = SumRule.KL
        total = kronecker_sum(p.input, p.output, C, D, rule, rtol=fisher.rtol, measure=measure)
        return replace(self, loc=loc, precision=total)


@dataclass(frozen=True)
class DiagonalState:
    """A block and its independent normals.

    Attributes:
        block: The sites and their layout.
        loc: mu, of the block's shape.
        precision: One over the variance, of the block's shape, in float64.
        log_scale: log tau, the mean log precision of the block's prior.
    """

    block: Block
    loc: Tensor
    precision: Tensor
    log_scale: float

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

    def whiten(self, gradients: Tensor) -> Tensor:
        """Gradients divided by the root of the precision: their inner products are those of Lambda^-1."""
        return gradients * self.precision.rsqrt().to(gradients.dtype)

    def coloured(self, eps: Tensor) -> Tensor:
        """Standard normal noise with the covariance Lambda^-1."""
        return eps * self.precision.rsqrt().to(eps.dtype)

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


State = KroneckerState | DiagonalState


def prior_state(block: Block, latents: dict[str, Latent], structure: Structure = Structure.KRONECKER) -> State:
    """A block's Gaussian before any data.

    Args:
        block: The block.
        latents: Its sites as a run met them.
        structure: The form of a linear map's Gaussian; any other site has independent weights.

    Returns:
        The state.
    """
    if isinstance(block, DiagonalBlock) or structure is Structure.DIAGONAL:
        loc, scale = block.moments(latents)
        precision = scale.double().square().reciprocal()
        return DiagonalState(block, _copied(loc), precision, float(precision.log().mean()))
    prior = block.prior(latents)
    factors = KroneckerPrecision.factorise(prior.input_precision.double(), prior.output_precision.double())
    return KroneckerState(block, _copied(prior.loc), factors, float(factors.logdet.sum()) / block.size)


def _copied(loc: Tensor) -> Tensor:
    """A copy in the layout that it has when read from a file: products of another may round otherwise."""
    return loc.clone(memory_format=torch.contiguous_format)


def narrowed(state: State, precision: float) -> State:
    """A state with a multiple of the identity added to its precision (exactly, if that is one itself).

    Args:
        state: The state.
        precision: What to add to every direction's precision.

    Returns:
        The narrower state.
    """
    if isinstance(state, DiagonalState):
        return replace(state, precision=state.precision + precision)
    p = state.precision
    C, D = (torch.eye(m.shape[-1], dtype=m.dtype, device=m.device).expand_as(m) for m in (p.input, p.output))
    return replace(state, precision=kronecker_sum(p.input, p.output, precision * C, D, measure=False))


def moved(state: State, device: torch.device) -> State:
    """A state on another device.

    Args:
        state: The state.
        device: Where to.

    Returns:
        The moved state.
    """
    if isinstance(state, KroneckerState):
        return replace(state, loc=state.loc.to(device), precision=state.precision.to(device))
    return replace(state, loc=state.loc.to(device), precision=state.precision.to(device))


def state_tensors(state: State) -> dict[str, Tensor]:
    """What of a state must be saved so that it comes back bit for bit.

    Args:
        state: The state.

    Returns:
        Tensors by part.
    """
    if isinstance(state, DiagonalState):
        return {"loc": state.loc, "precision": state.precision}
    p = state.precision
    parts = ("input", "output", "input_inverse", "output_inverse", "input_root", "output_root", "logdet")
    return {"loc": state.loc, **{part: getattr(p, part) for part in parts}}


def fingerprint(state: State) -> int:
    """A checksum of a state: whether a block is as it was left, wherever it has been since.

    Args:
        state: The state.

    Returns:
        A number of 32 bits, the same on every device and with any number of threads.
    """
    checksum = 0
    for tensor in state_tensors(state).values():
        checksum = zlib.crc32(memory_of(tensor), checksum)
    return checksum


def state_settings(state: State) -> dict[str, Any]:
    """The rest of a state, as plain values.

    Args:
        state: The state.

    Returns:
        What :func:`state_from` needs besides the tensors.
    """
    kind = "kronecker" if isinstance(state, KroneckerState) else "diagonal"
    return {
        "kind": kind,
        "block": asdict(state.block),
        "log_scale": state.log_scale,
        "tensors": sorted(state_tensors(state)),
    }


def state_from(settings: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> State:
    """A state from its saved parts.

    Args:
        settings: From :func:`state_settings`.
        tensors: From :func:`state_tensors`.

    Returns:
        The state.
    """
    layout: dict[str, Any] = {name: tuple(v) if isinstance(v, list) else v for name, v in settings["block"].items()}
    rest = {part: tensor for part, tensor in tensors.items() if part != "loc"}
    if settings["kind"] == "diagonal":
        block: Block = KroneckerBlock(**layout) if "weight" in layout else DiagonalBlock(**layout)
        return DiagonalState(block, tensors["loc"], rest["precision"], settings["log_scale"])
    return KroneckerState(KroneckerBlock(**layout), tensors["loc"], KroneckerPrecision(**rest), settings["log_scale"])
