"""FOO-VB: online variational Bayes with matrix normals."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from enum import Enum
from typing import ClassVar

import torch
from torch import Tensor

from nclbayes.errors import NonFiniteError, SettingError
from nclbayes.gaussians import KroneckerState, ShardedState, State, Structure
from nclbayes.kronecker import KroneckerPrecision, is_finite
from nclbayes.kronecker.blockdiagonal import BlockDiagonal, Matrix, each, identity_like
from nclbayes.methods.online import DiagonalMove, Move, OnlineEngine


class Solution(str, Enum):
    """Which solution of the fixed-point equations a step takes.

    Attributes:
        PUBLISHED: That of the authors' program: each factor as if the other one stayed, and never a wider one.
        JOINT: That of both factors together, which is BGD's step where there is a single weight.
    """

    PUBLISHED = "published"
    JOINT = "joint"


@dataclass(frozen=True, kw_only=True)
class FOOVB(OnlineEngine):
    """FOO-VB with matrix normals (Zeno, Golan, Hoffer and Soudry 2021), which knows no tasks.

    A map's weights are ``W = M + B Phi A^T``, of covariance ``A A^T (x) B B^T``. With Psi the gradient of the
    mini-batch's summed negative log likelihood at a sample, a step is ``M <- M - eta B B^T E[Psi] A A^T``, and B and A
    become B Y and A X, where

        Y = f(K_B),         K_B = E[B^T Psi A Phi^T] / n
        X = f(K_A),         K_A = E[A^T Psi^T B Phi] / m,      f(K) = S (sqrt(1 + k^2 / 4) - k / 2) S^T, K = S k W^T,

    which is what the program of its authors does, up to a rotation of the noise. Blocks that are no linear maps move as
    in :class:`~nclbayes.methods.BGD`.

    Singular values are never negative, so that no step widens anything; and both factors take all of what the data say
    of the whole precision, which counts twice. The solution "joint" is free of both: f takes the symmetric part of K
    with its eigenvalues, and with ``r^2 = tr(Y Y^T) / m`` A follows B, ``X = f(E[A^T Psi^T B Y Phi] / (m r)) / r``.
    These solve the stationarity conditions of the variational objective of the mini-batch with its gradients held
    fixed, first in B and then in A; of a single weight they are BGD's step. But where samples are few, their noise may
    widen the Gaussian until learning diverges.

    Attributes:
        init_scale: The largest standard deviation at the first step of a block's first task, times the root of the
            number of a map's inputs (of other blocks: of weights). A narrower prior's is kept.
        solution: "published" or "joint".

    Example:
        >>> from nclbayes.methods import FOOVB
        >>> FOOVB(particles=20).solution.value
        'published'
    """

    structure: ClassVar[Structure] = Structure.KRONECKER
    can_stream: ClassVar[bool] = True
    init_scale: float = 1.0
    solution: Solution | str = Solution.PUBLISHED

    def __post_init__(self) -> None:
        super().__post_init__()
        self._require("init_scale", lambda v: 1e-100 <= v <= 1e100, "positive, from 1e-100 to 1e100")
        try:
            object.__setattr__(self, "solution", Solution(self.solution))
        except ValueError:
            allowed = ", ".join(repr(member.value) for member in Solution)
            raise SettingError(f"solution is {self.solution!r}; choose one of {allowed}.") from None

    def moved(self, state: State, is_trained: bool) -> Move:
        """What moves a block's Gaussian.

        Args:
            state: The Gaussian before the task.
            is_trained: Whether a task has touched it before.

        Returns:
            What moves it, at the start.
        """
        if isinstance(state, KroneckerState | ShardedState):
            largest = math.inf if is_trained else self.init_scale / math.sqrt(state.block.shape[-1])
            return KroneckerMove(state, largest, Solution(self.solution))
        sigma = state.precision.rsqrt()
        return DiagonalMove(
            state, sigma if is_trained else sigma.clamp(max=self.init_scale / math.sqrt(state.loc.numel()))
        )


class KroneckerMove(Move):
    """The fixed-point step of a matrix normal.

    Args:
        state: The matrix normal before the task.
        largest: The largest standard deviation, of the geometric mean of all directions, that it begins with.
        solution: Which solution of the equations to take.
    """

    def __init__(self, state: KroneckerState | ShardedState, largest: float, solution: Solution) -> None:
        self._state, self._is_joint = state, solution is Solution.JOINT
        precision, dtype = state.whole().precision, state.loc.dtype
        # A: [..., n, n] and B: [..., m, m].
        self._A: Matrix = precision.input_root.to(dtype)
        self._B: Matrix = precision.output_root.to(dtype)
        if state.log_scale < -2 * math.log(largest):
            root = math.sqrt(largest)
            self._A, self._B = root * identity_like(self._A), root * identity_like(self._B)
        self._A, self._B = (each(lambda part: part.clone(), side) for side in (self._A, self._B))
        self._phi: list[Tensor] = []
        self._psi: list[Tensor] = []

    def spread(self, noise: Tensor) -> Tensor:
        """B Phi A^T."""
        found: Tensor = self._B @ noise @ self._A.mT
        return found

    def gather(self, noise: Tensor, gradient: Tensor) -> None:
        """Keep Phi and Psi."""
        self._phi.append(noise)
        self._psi.append(gradient)

    def step(self, mu: Tensor, lr: float) -> None:
        """Move M, and then B and A."""
        phi, psi = torch.stack(self._phi), torch.stack(self._psi)
        self._phi, self._psi = [], []
        if not is_finite(psi):
            raise NonFiniteError(f"The gradient of block '{self._state.block.name}' became NaN or infinite.")
        A, B, (m, n) = self._A, self._B, mu.shape[-2:]
        mu.sub_(B @ (B.mT @ psi.sum(0) @ A) @ A.mT, alpha=lr)
        PA = psi @ A
        K_B = products((B.mT @ PA).mT, phi.mT, B) / n
        if self._is_joint:
            Y = each(_symmetric_step, K_B)
            B = B @ Y
            r = (Y.square().sum((-2, -1)) / m).sqrt()[..., None, None]
            X = each(_symmetric_step, products(PA, B @ phi, A) / m * (1 / r)) * (1 / r)
        else:
            X = each(_narrowing_step, products(PA, B @ phi, A) / m)
            B = B @ each(_narrowing_step, K_B)
        A = A @ X
        for old, new in ((self._A, A), (self._B, B)):
            each(lambda one, other: one.copy_(other), old, new)

    def state(self, mu: Tensor) -> State:
        """The matrix normal around a mean."""
        inverses = (each(lambda part: torch.linalg.inv(part.double()), root) for root in (self._A, self._B))
        precision = KroneckerPrecision.factorise(*(each(lambda part: part.mT @ part, inverse) for inverse in inverses))
        state = self._state
        if isinstance(state, KroneckerState):
            return replace(state, loc=mu, precision=precision)
        return ShardedState.of(KroneckerState(state.block, mu, precision, state.log_scale), state.ranks, state.owner)

    def tensors(self) -> dict[str, Tensor]:
        """A and B, in stacks of blocks where they are held so."""
        found: dict[str, Tensor] = {}
        for name, root in (("A", self._A), ("B", self._B)):
            parts = enumerate(root.parts) if isinstance(root, BlockDiagonal) else ()
            found |= {f"{name}.{i}": part for i, part in parts} or {name: root}  # type: ignore[dict-item]
        return found


def products(left: Tensor, right: Tensor, like: Matrix) -> Matrix:
    """The sum over samples of ``left^T right``, as far as a matrix has entries there.

    Args:
        left: [samples, ..., rows, k].
        right: The same shape.
        like: Of which form the result is, [..., k, k].

    Returns:
        That.
    """
    left, right = (side.movedim(0, -3).flatten(-3, -2) for side in (left, right))
    if not isinstance(like, BlockDiagonal):
        return left.mT @ right
    widths = [part.shape[-3:-1] for part in like.parts]
    pieces = zip(left.split(like.sizes, dim=-1), right.split(like.sizes, dim=-1), widths, strict=True)
    blocks = ((a.unflatten(-1, size).movedim(-2, -3), b.unflatten(-1, size).movedim(-2, -3)) for a, b, size in pieces)
    return BlockDiagonal(tuple(a.mT @ b for a, b in blocks))


def _symmetric_step(K: Tensor) -> Tensor:
    """U f(k) U^T of the symmetric part U k U^T of K."""
    k, U = torch.linalg.eigh((K + K.mT) / 2)
    return (U * _f(k)[..., None, :]) @ U.mT


def _narrowing_step(K: Tensor) -> Tensor:
    """S f(k) S^T of ``K = S k W^T``; with W^T in place of S^T it would be the same Gaussian, its noise turned."""
    S, k, _ = torch.linalg.svd(K)
    return (S * _f(k)[..., None, :]) @ S.mT


def _f(k: Tensor) -> Tensor:
    """Sqrt(1 + k^2 / 4) - k / 2, positive however large k is."""
    return torch.exp(-torch.asinh(k / 2))
