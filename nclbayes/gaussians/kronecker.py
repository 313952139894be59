"""The Gaussian of a linear map, with a precision A (x) G."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import torch
from torch import Tensor

from nclbayes.blocks import KroneckerBlock
from nclbayes.fisher import KroneckerFisher
from nclbayes.gaussians.preconditioners import Preconditioner, kronecker_preconditioner
from nclbayes.gaussians.state import LinearMap, State, Structure
from nclbayes.kronecker import KroneckerNormal, KroneckerPrecision, KroneckerSum, SumRule, fade, kronecker_sum
from nclbayes.kronecker.blockdiagonal import BlockDiagonal, Matrix, identity_like, widths_of
from nclbayes.kronecker.stiffening import stiffening
from nclbayes.kronecker.triangular import between_triangles, symmetric_of, triangle_of, upper_of

_FACTORS, _ROOTS = ("input", "output"), ("input_root", "output_root")
_MATRICES = (*_FACTORS, "input_inverse", "output_inverse", *_ROOTS)
# What a sum knows besides.
_LOST = ("kl", "start_kl", "clipped")
# What a part's name ends with of which a file has the upper triangle alone.
TRIANGLE = "upper"


@dataclass(frozen=True)
class KroneckerState(State):
    """A Kronecker block and its Gaussian N(mu, (A (x) G)^-1).

    Attributes:
        block: The sites and their layout.
        loc: mu, [m, n] or [k, m, n], in the model's dtype.
        precision: A (x) G, factorised, in float64.
        log_scale: log tau, the mean log eigenvalue of the block's prior precision.
    """

    structure: ClassVar[Structure] = Structure.KRONECKER

    block: KroneckerBlock
    precision: KroneckerPrecision

    @property
    def kind(self) -> str:
        """The form of the Gaussian, for people."""
        return "Kronecker" + ("" if self.block.bias is None else ", with bias") + self._sides

    @property
    def _sides(self) -> str:
        found = ""
        for side, most, size in zip(("inputs", "outputs"), self.block.widths, reversed(self.block.shape), strict=False):
            widths = widths_of(size, most)
            if len(widths) > 1:
                found += f", {side} " + ("diagonal" if widths[0] == 1 else f"in {len(widths)} blocks of {widths[0]}")
        return found

    @property
    def distribution(self) -> KroneckerNormal:
        """The block's Gaussian, in the model's dtype."""
        return KroneckerNormal.from_precision(self.loc, self.precision.to(self.loc.dtype))

    @property
    def logdet(self) -> float:
        """log|Lambda|, of all matrices of a stack together."""
        return float(self.precision.logdet.sum())

    @property
    def kl_of_sum(self) -> float | None:
        """The nats lost when a sum of two precisions was replaced by this one; None if it is no such sum."""
        return float(self.precision.kl.sum()) if isinstance(self.precision, KroneckerSum) else None

    def log_prob(self, matrix: Tensor) -> Tensor:
        """The log density of the block's weights, of a stack together."""
        density = self.distribution.log_prob(matrix)
        return density.sum(-1) if self.loc.ndim == 3 else density

    def whiten(self, gradients: Tensor) -> Tensor:
        """S_G^T J S_A: gradients whose inner products are those of Lambda^-1."""
        p = self.precision
        return p.output_root.to(gradients.dtype).mT @ gradients @ p.input_root.to(gradients.dtype)

    def whitened_rows(self, inputs: Tensor, gradients: Tensor) -> tuple[Tensor, Tensor]:
        """Z S_A and g S_G: of ``J = sum g z^T`` what :meth:`whiten` gives is the sum of their products."""
        p = self.precision
        return inputs @ p.input_root.to(inputs.dtype), gradients @ p.output_root.to(gradients.dtype)

    def whole(self) -> KroneckerState:
        """Itself: its factors are here."""
        return self

    def colouring(self) -> LinearMap:
        """S_G eps S_A^T."""
        left, right = (root.to(self.loc.dtype) for root in (self.precision.output_root, self.precision.input_root))
        if isinstance(left, BlockDiagonal) or isinstance(right, BlockDiagonal):
            return lambda eps: left @ eps @ right.mT
        return lambda eps: between_triangles(left, eps, right)

    def multiplication(self, factor: float) -> LinearMap:
        """Factor G V A."""
        left, right = ((factor * self.precision.output).to(self.loc.dtype), self.precision.input.to(self.loc.dtype))
        return lambda matrix: left @ matrix @ right

    def preconditioner(self, tau: float, damping: float, held: KroneckerState | None = None) -> Preconditioner:
        """What multiplies a gradient with ``tau (Lambda_held + damping I)^-1``, in the model's dtype."""
        stiff = None if held is None else held.precision
        return kronecker_preconditioner(self.precision, tau, damping, self.loc.dtype, stiff)

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
        if 1 in p.shape:
            # One side is a single number: the sum is a Kronecker product, and `kl` finds it.
            rule = SumRule.KL
        total = kronecker_sum(p.input, p.output, fisher.input, fisher.output, rule, rtol=fisher.rtol, measure=measure)
        return replace(self, loc=loc, precision=total)

    def faded(self, prior: KroneckerState, retention: float) -> KroneckerState:
        """The Gaussian with the same mean whose precision has faded, ``phi Lambda + (1 - phi) Lambda_0``, nearly.

        Args:
            prior: The block's prior.
            retention: phi, above 0 and at most 1.

        Returns:
            The wider state; :func:`~nclbayes.kronecker.fade` says how it is a Kronecker product again.
        """
        return replace(self, precision=fade(self.precision, prior.precision, retention))

    def stiffening(self, prior: KroneckerState) -> Callable[[float], KroneckerState]:
        """The Gaussian with the same mean whose precision keeps its directions alone.

        Args:
            prior: The block's prior.

        Returns:
            From how many times stiffer than a free direction the mean one is to the state;
            :func:`~nclbayes.kronecker.stiffen` says how its two sides are held.
        """
        held = stiffening(self.precision, prior.precision)
        return lambda stiffness: replace(self, precision=held(stiffness))

    def narrowed(self, precision: float) -> KroneckerState:
        """The Gaussian with a multiple of the identity added to its precision (exactly, if that is one itself)."""
        p = self.precision
        C, D = (identity_like(m) for m in (p.input, p.output))
        return replace(self, precision=kronecker_sum(p.input, p.output, precision * C, D, measure=False))

    def isotropic(self) -> KroneckerState:
        """The Gaussian with the precision tau I, under which a step is one of plain training."""
        A, G = (identity_like(m) for m in (self.precision.input, self.precision.output))
        A = math.exp(self.log_scale) * A
        return replace(self, precision=KroneckerPrecision.factorise(A.contiguous(), G.contiguous()))

    def to(self, device: torch.device) -> KroneckerState:
        """The same on another device."""
        return replace(self, loc=self.loc.to(device), precision=self.precision.to(device))

    def tensors(self) -> dict[str, Tensor]:
        """Mean, factors, their inverses and roots."""
        found = {"loc": self.loc, "logdet": self.precision.logdet}
        for name in _MATRICES:
            matrix = getattr(self.precision, name)
            stacks = enumerate(matrix.parts) if isinstance(matrix, BlockDiagonal) else ()
            found |= {f"{name}.{i}": part for i, part in stacks} or {name: matrix}
        return found

    def saved(self) -> dict[str, Tensor]:
        """Mean and factors, of which each number once; and roots, where they are not the factors' own."""
        kept = _FACTORS if self.precision.is_own else (*_FACTORS, *_ROOTS)
        parts = {part: t for part, t in self.tensors().items() if part.partition(".")[0] in kept}
        found = {"loc": self.loc, **{f"{part}/{TRIANGLE}": triangle_of(tensor) for part, tensor in parts.items()}}
        return found if self.precision.is_own else found | {"logdet": self.precision.logdet}

    def with_tensors(self, tensors: Mapping[str, Tensor]) -> KroneckerState:
        """A state of the same block from what :meth:`tensors` gave."""
        return replace(self, loc=tensors["loc"], precision=precision_of(tensors))

    @property
    def cost(self) -> float:
        """About how many multiplications it takes to factorise both sides, of all matrices of a stack."""
        return cost_of(self.block)

    def handed(self) -> tuple[dict[str, Tensor], dict[str, Any]]:
        """Its tensors, and what was lost when they were a sum."""
        p = self.precision
        lost = {name: getattr(p, name) for name in _LOST} if isinstance(p, KroneckerSum) else {}
        return self.tensors() | lost, {"is_own": p.is_own, "iterations": getattr(p, "iterations", 0)}

    def received(self, tensors: Mapping[str, Tensor], said: Mapping[str, Any]) -> KroneckerState:
        """A state of the same block from what :meth:`handed` gave."""
        parts: dict[str, Any] = {name: _matrix(name, tensors) for name in _MATRICES}
        parts |= {"logdet": tensors["logdet"], "is_own": bool(said["is_own"])}
        if _LOST[0] not in tensors:
            return replace(self, loc=tensors["loc"], precision=KroneckerPrecision(**parts))
        parts |= {name: tensors[name] for name in _LOST} | {"iterations": int(said["iterations"])}
        return replace(self, loc=tensors["loc"], precision=KroneckerSum(**parts))


def cost_of(block: KroneckerBlock) -> float:
    """About how many multiplications it takes to factorise both sides of a block's precision.

    Args:
        block: The block.

    Returns:
        Their number, for all matrices of a stack.
    """
    sides = zip(reversed(block.shape), block.widths, strict=False)
    cubes = sum(width**3 for size, most in sides for width in widths_of(size, most))
    return float(math.prod(block.shape[:-2]) * cubes)


def precision_of(tensors: Mapping[str, Tensor]) -> KroneckerPrecision:
    """The precision whose parts :meth:`KroneckerState.tensors` gave, or of which there are the factors alone.

    Args:
        tensors: By part.

    Returns:
        The precision, factorised.

    Raises:
        MatrixError: If one of its factors is not positive definite.
    """
    if "logdet" not in tensors:
        return KroneckerPrecision.factorise(_matrix("input", tensors), _matrix("output", tensors))
    matrices = {name: _matrix(name, tensors) for name in _MATRICES}
    return KroneckerPrecision(**matrices, logdet=tensors["logdet"], is_own=False)


def unfolded(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The parts of which :meth:`KroneckerState.saved` gave triangles, as :meth:`KroneckerState.tensors` has them.

    Args:
        tensors: By part; where none is a triangle, they are all there.

    Returns:
        Mean and factors; where there are roots, all parts.
    """
    found: dict[str, Tensor] = {}
    for name, tensor in tensors.items():
        part, _, kind = name.partition("/")
        if kind != TRIANGLE:
            found[name] = tensor
        elif part.partition(".")[0] in _ROOTS:
            found[part] = root = upper_of(tensor)
            found[part.replace("_root", "_inverse")] = root @ root.mT
        else:
            found[part] = symmetric_of(tensor)
    return found


def _matrix(name: str, tensors: Mapping[str, Tensor]) -> Matrix:
    stacks = sorted(part for part in tensors if part.startswith(f"{name}."))
    return BlockDiagonal(tuple(tensors[part] for part in stacks)) if stacks else tensors[name]
