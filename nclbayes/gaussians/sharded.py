"""The Gaussian of a linear map whose factors one of several processes holds."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import ClassVar

import torch
from torch import Tensor

from nclbayes.blocks import KroneckerBlock
from nclbayes.fisher import KroneckerFisher
from nclbayes.gaussians.gradients import Gradient, RowGradient
from nclbayes.gaussians.kronecker import KroneckerState
from nclbayes.gaussians.preconditioners import Preconditioner
from nclbayes.gaussians.state import LinearMap, State, Structure
from nclbayes.kronecker import KroneckerNormal, SumRule
from nclbayes.kronecker.blockdiagonal import Matrix
from nclbayes.ranks import Ranks


@dataclass(frozen=True)
class ShardedState(State):
    """A Kronecker block and its Gaussian, of which every rank knows the mean, and one the precision.

    What gives another Gaussian is done by the rank that holds the factors, and nobody waits. What gives numbers is
    handed round, so that all ranks must ask for it.

    Attributes:
        block: The sites and their layout.
        loc: mu, [m, n] or [k, m, n], in the model's dtype.
        precision: None; :meth:`whole` has it.
        log_scale: log tau, the mean log eigenvalue of the block's prior precision.
        ranks: The ranks.
        owner: Which of them holds the factors.
        held: The Gaussian there, around any mean; None on the others.
    """

    structure: ClassVar[Structure] = Structure.KRONECKER

    block: KroneckerBlock
    ranks: Ranks
    owner: int
    held: KroneckerState | None = field(repr=False)

    @classmethod
    def of(cls, state: KroneckerState, ranks: Ranks, owner: int) -> ShardedState:
        """A Gaussian that every rank has, from now on held by one.

        Args:
            state: The Gaussian.
            ranks: The ranks.
            owner: Which of them holds it.

        Returns:
            The same Gaussian.
        """
        held = state if owner == ranks.rank else None
        return cls(state.block, state.loc, None, state.log_scale, ranks, owner, held)

    def here(self) -> KroneckerState | None:
        """The Gaussian with its factors, on the rank that holds them."""
        return None if self.held is None else self.held.moved(self.loc)

    def whole(self) -> KroneckerState:
        """The Gaussian with its factors, on every rank."""
        here = self.here()
        tensors, said = (None, None) if here is None else here.handed()
        where = f"the factors of block '{self.block.name}'"
        tensors, said = self.ranks.broadcast(where, tensors, said, self.owner, self.loc.device)
        return self._form.received(tensors, said) if here is None else here

    @property
    def kind(self) -> str:
        """The form of the Gaussian, for people."""
        return f"{self._form.kind}, held by rank {self.owner}"

    @property
    def cost(self) -> float:
        """About how many multiplications it takes to factorise it."""
        return self._form.cost

    @property
    def distribution(self) -> KroneckerNormal:
        """The block's Gaussian, in the model's dtype."""
        return self.whole().distribution

    @property
    def logdet(self) -> float:
        """log|Lambda|, of all matrices of a stack together."""
        return self._number(lambda state: state.logdet)

    @property
    def kl_of_sum(self) -> float | None:
        """The nats lost when a sum of two precisions was replaced by this one; None if it is no such sum."""
        lost = self._number(lambda state: math.nan if state.kl_of_sum is None else state.kl_of_sum)
        return None if math.isnan(lost) else lost

    def log_prob(self, matrix: Tensor) -> Tensor:
        """The log density of the block's weights, of a stack together."""
        like = matrix.new_empty(
            matrix.shape[: matrix.ndim - self.loc.ndim], dtype=torch.promote_types(matrix.dtype, self.loc.dtype)
        )
        return self._tensor(lambda state: state.log_prob(matrix), like)

    def whiten(self, gradients: Tensor) -> Tensor:
        """S_G^T J S_A: gradients whose inner products are those of Lambda^-1."""
        return self._tensor(lambda state: state.whiten(gradients), gradients)

    def colouring(self) -> LinearMap:
        """S_G eps S_A^T."""
        here = self.here()
        coloured = None if here is None else here.colouring()
        return lambda eps: self._handed(None if coloured is None else coloured(eps), eps)

    def multiplication(self, factor: float) -> LinearMap:
        """Factor G V A."""
        here = self.here()
        multiplied = None if here is None else here.multiplication(factor)
        return lambda matrix: self._handed(None if multiplied is None else multiplied(matrix), matrix)

    def preconditioner(self, tau: float, damping: float, held: ShardedState | None = None) -> Preconditioner:
        """What multiplies a gradient with ``tau (Lambda_held + damping I)^-1``, in the model's dtype."""
        here = self.here()
        stiff = None if held is None else held.here()
        own = None if here is None else here.preconditioner(tau, damping, stiff)
        return ShardedPreconditioner(self.block.name, self.ranks, self.owner, own)

    def quadratic(self, delta: Tensor) -> float:
        """delta^T Lambda delta."""
        return self._number(lambda state: state.quadratic(delta))

    def add(self, loc: Tensor, fisher: KroneckerFisher, rule: SumRule, measure: bool = True) -> ShardedState:
        """The Gaussian around `loc` whose precision has a task's Fisher added, on the rank that holds it.

        Args:
            loc: The new mean.
            fisher: The task's Fisher.
            rule: How to replace the sum of two Kronecker products by one.
            measure: Whether to measure what that loses.

        Returns:
            The new state.
        """
        return replace(self._changed(lambda state: state.add(loc, fisher, rule, measure)), loc=loc)

    def faded(self, prior: ShardedState, retention: float) -> ShardedState:
        """The Gaussian with the same mean whose precision has faded, on the rank that holds it.

        Args:
            prior: The block's prior, held by the same rank.
            retention: phi, above 0 and at most 1.

        Returns:
            The wider state.
        """
        before = prior.here()
        return self._changed(lambda state: state.faded(_there(before), retention))

    def stiffening(self, prior: ShardedState) -> Callable[[float], ShardedState]:
        """The Gaussian with the same mean whose precision keeps its directions alone, on the rank that holds it.

        Args:
            prior: The block's prior, held by the same rank.

        Returns:
            From how many times stiffer than a free direction the mean one is to the state.
        """
        here, before = self.here(), prior.here()
        if here is None:
            return lambda _: self
        stiffer = here.stiffening(_there(before))
        return lambda stiffness: replace(self, held=stiffer(stiffness))

    def narrowed(self, precision: float) -> ShardedState:
        """The Gaussian with a multiple of the identity added to its precision."""
        return self._changed(lambda state: state.narrowed(precision))

    def isotropic(self) -> ShardedState:
        """The Gaussian with the precision tau I, under which a step is one of plain training."""
        return self._changed(KroneckerState.isotropic)

    def to(self, device: torch.device) -> ShardedState:
        """The same on another device."""
        return replace(self._changed(lambda state: state.to(device)), loc=self.loc.to(device))

    def tensors(self) -> dict[str, Tensor]:
        """Mean, factors, their inverses and roots, on every rank."""
        return self.whole().tensors()

    def common(self) -> dict[str, Tensor]:
        """What all ranks have of it: the mean."""
        return {"loc": self.loc}

    def saved(self) -> dict[str, Tensor]:
        """What a file holds of it, on every rank."""
        return self.whole().saved()

    def with_tensors(self, tensors: Mapping[str, Tensor]) -> ShardedState:
        """A state of the same block from what :meth:`tensors` gave, held by the same rank."""
        return ShardedState.of(self._form.with_tensors(tensors), self.ranks, self.owner)

    def fingerprint(self) -> int:
        """A checksum: whether a block is as it was left."""
        return int(self._number(lambda state: float(state.fingerprint())))

    @cached_property
    def _form(self) -> KroneckerState:
        """The Gaussian without its precision, which knows what follows from the block."""
        return KroneckerState(self.block, self.loc, None, self.log_scale)  # type: ignore[arg-type]

    def _changed(self, change: Callable[[KroneckerState], KroneckerState]) -> ShardedState:
        here = self.here()
        return self if here is None else replace(self, held=change(here))

    def _number(self, of: Callable[[KroneckerState], float]) -> float:
        here = self.here()
        own = 0.0 if here is None else of(here)
        return self.ranks.meet(f"a number of block '{self.block.name}'", own)[self.owner][0]

    def _tensor(self, of: Callable[[KroneckerState], Tensor], like: Tensor) -> Tensor:
        here = self.here()
        return self._handed(None if here is None else of(here), like)

    def _handed(self, own: Tensor | None, like: Tensor) -> Tensor:
        return self.ranks.hand(f"a tensor of block '{self.block.name}'", own, like, self.owner)


@dataclass(frozen=True)
class ShardedPreconditioner:
    """A preconditioner that one rank has, which hands round what it gives.

    Attributes:
        name: The block's name.
        ranks: The ranks.
        owner: Which of them has it.
        own: The preconditioner there; None on the others.
    """

    name: str
    ranks: Ranks
    owner: int
    own: Preconditioner | None

    def prefers_rows(self, rows: float) -> bool:
        """Whether a gradient is better left as rows: never, as one rank would need those of all."""
        return False

    def curvature(self, inputs: Matrix, outputs: Matrix) -> float:
        """The largest eigenvalue of ``tau P (inputs (x) outputs)``.

        Args:
            inputs: [n, n] or [k, n, n], float64.
            outputs: [m, m] or [k, m, m], float64.

        Returns:
            The eigenvalue, or a bound of it.
        """
        return self._number(0.0 if self.own is None else self.own.curvature(inputs, outputs))

    def add(self, m: Tensor, g: Gradient, rho: float, factor: float) -> None:
        """M <- rho M + factor tau P g.

        Args:
            m: M, changed in place.
            g: The gradient, summed over all ranks.
            rho: What M is multiplied with.
            factor: What the rest is multiplied with.
        """
        assert not isinstance(g, RowGradient) or not g.pieces
        own = None
        if self.own is not None:
            own = torch.zeros_like(m)
            self.own.add(own, g, 0.0, 1.0)
        m.mul_(rho).add_(self._handed(own, m), alpha=factor)

    def add_pull(self, m: Tensor, theta: Tensor, loc: Tensor, factor: float) -> None:
        """M <- M + factor P Lambda (theta - mu).

        Args:
            m: M, changed in place.
            theta: The weights.
            loc: mu.
            factor: What that is multiplied with.
        """
        if not self.has_pull:
            m.add_(theta, alpha=factor).sub_(loc, alpha=factor)
            return
        own = None
        if self.own is not None:
            own = torch.zeros_like(m)
            self.own.add_pull(own, theta, loc, 1.0)
        m.add_(self._handed(own, m), alpha=factor)

    @property
    def pull_strength(self) -> float:
        """The largest eigenvalue of P Lambda."""
        return self._number(0.0 if self.own is None else self.own.pull_strength)

    @cached_property
    def has_pull(self) -> bool:
        """Whether P Lambda is another matrix than the identity."""
        return self._number(float(self.own is not None and self.own.has_pull)) > 0

    def _number(self, own: float) -> float:
        return self.ranks.meet(f"a number of block '{self.name}'", own)[self.owner][0]

    def _handed(self, own: Tensor | None, like: Tensor) -> Tensor:
        return self.ranks.hand(f"a step of block '{self.name}'", own, like, self.owner)


def _there(state: KroneckerState | None) -> KroneckerState:
    assert state is not None
    return state
